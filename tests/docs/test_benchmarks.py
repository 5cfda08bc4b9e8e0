# SPDX-License-Identifier: Apache-2.0
"""The benchmark pages: their figures are those of committed results, and their operators and ops those that there are."""

import ast
import importlib
import importlib.util
import json
import sys
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liger_bench.peers import liger_kernel
from liger_core.builtin import CATALOGUE
from liger_train.row import row_of
from liger_train.setup import Setup

ROOT = Path(__file__).parents[2]
OPS = [op.name for op in CATALOGUE]
WHERE = {"machine": "NVIDIA H100; CPU", "versions": "torch 2.11.0", "commit": "c", "date": "2026-11-21T10:00:00+00:00"}

pytestmark = pytest.mark.cpu


@pytest.fixture
def description(generators: Any) -> dict[str, Any]:
    return deepcopy(generators.peer_operators.described())


@pytest.mark.parametrize("name", ["all_ops", "benchmarks"])
def test_a_page_is_that_of_the_committed_results(generators: Any, name: str) -> None:
    page = getattr(generators, name)
    text, ops = page.PAGE.read_text(), generators.all_ops.PAGE.read_text()
    # A new op is on the site, and needs no line here.
    assert text == page.page([op for op in OPS if f"[{op}]" in ops or f"{op}<br>" in ops]), (
        f"run docs/generate/{name}.py"
    )


def test_the_page_of_steps_is_that_of_the_newest_run(generators: Any) -> None:
    page = generators.steps
    assert page.PAGE.read_text() == page.page(generators.all_ops.newest("steps")), "run docs/generate/steps.py"


def test_every_op_is_measured_or_named_as_not_measured(generators: Any) -> None:
    text = generators.all_ops.page([*OPS, "new_norm"])
    unmeasured = next((line for line in text.splitlines() if line.startswith("Not measured: ")), "")
    assert [op for op in OPS if (f"| {op}<br>" in text) == (f"[{op}]" in unmeasured)] == []
    assert "[new_norm]" in unmeasured


def test_the_description_has_no_mistakes(generators: Any, description: dict[str, Any]) -> None:
    assert generators.peer_operators.mistakes(description, OPS) == []


def test_an_operator_of_an_unknown_op_or_in_two_tables_is_a_mistake(
    generators: Any, description: dict[str, Any]
) -> None:
    description["compared"]["liger_rms_norm"] = ["rms_norm", "rms_nrom"]
    description["none"]["liger_softmax"] = "unknown"
    unknown = "liger_rms_norm names the op rms_nrom, which does not exist"
    assert sorted(generators.peer_operators.mistakes(description, OPS)) == [unknown, "liger_softmax is in two tables"]


def test_compared_are_the_ops_that_liger_bench_calls_liger_kernel_for(
    description: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(liger_fused_linear_cross_entropy=print)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", package)
    called = {op for peer in liger_kernel.peers() for op in peer.calls}
    assert {op for ops in description["compared"].values() for op in ops} == called


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.parametrize("module", ["transformers/functional.py", "chunked_loss/functional.py"])
def test_every_function_of_liger_kernel_is_described(description: dict[str, Any], module: str) -> None:
    """By its source, since it can be imported with a GPU only."""
    spec = importlib.util.find_spec("liger_kernel")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / module).read_text())
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    public |= {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    named = {
        name.split(".")[-1]
        for table in ("compared", "covered", "none")
        for key in description[table]
        for name in key.split(", ")
    }
    assert {name for name in public if name.startswith("liger_")} - named == set()


def test_a_page_of_steps_has_shares_of_the_card_and_the_longest_sequences(generators: Any, tmp_path: Path) -> None:
    setup, ran = Setup("small", 2, 512), {"tokens_per_second": 1e6, "peak_bytes": 1 << 30, "trainable_parameters": 11e6}
    full, failed = {"out_of_memory": True, "reason": "out of memory"}, {"failed": True, "reason": "no kernel"}
    peer = replace(setup, liger="liger-kernel")
    steps = [row_of(replace(setup, liger="none"), WHERE, full), row_of(setup, WHERE, ran), row_of(peer, WHERE, failed)]
    short, long = (replace(setup, batch=1, memory_limit=1 << 30, sequence=length) for length in (1024, 2048))
    (tmp_path / "train.json").write_text(
        # A search takes two steps, and the first two have no speed.
        json.dumps([row.columns() for row in [*steps, row_of(short, WHERE, {}), row_of(long, WHERE, full)]])
    )
    traced = tmp_path / "traces" / "profiles" / "small.json"
    traced.parent.mkdir(parents=True)
    traced.write_text(json.dumps({"setup": asdict(setup), "milliseconds": {"matmuls": 0.5, "attention": 0.25}}))
    text = generators.steps.page(tmp_path)
    # The head's forward pass is not repeated.
    rate = 1024 * (8 * 11_094_272 - 2 * 32_000 * 256) / 0.5e9
    assert f"| small 2 × 512 | Liger | 0.2 | 0.5 | 0.8 | {rate:.0f} |" in text
    # 6 operations for each weight but the embedding, whose matrix is the head's, and 4 scores of a token in 3.5 passes.
    useful = 1e6 * (6 * 11_094_272 + 3.5 * 4 * 256 * 256 * 4) / 989e12
    assert "| small 2 × 512 | Transformers | out of memory | – | – | – | – |" in text
    assert f"|  | Liger | 1,000,000 | – | {useful:.2f} |" in text
    assert "* small 2 × 512, liger-kernel: no kernel" in text
    assert "| small, all weights | – | – | 1,024 |" in text


def steps(**speeds: float) -> list[dict[str, Any]]:
    """Rows of one run, by the speed of each implementation, whose peaks are a GiB for each of its letters."""
    liger = {"hf": "none", "liger": "all", "peer": "liger-kernel"}
    rows = []
    for name, speed in speeds.items():
        ran = {"tokens_per_second": speed, "low_tokens_per_second": speed - 5, "high_tokens_per_second": speed + 5}
        setup = replace(Setup("small", 2, 512), liger=liger[name])
        rows.append(row_of(setup, WHERE, ran | {"peak_bytes": len(name) << 30}).columns())
    return rows


@pytest.mark.parametrize(
    ("speed", "listed"),
    [(120.0, ["0.83 ×"]), (102.0, []), (80.0, [])],
    ids=["slower", "by_less_than_3_percent", "faster"],
)
def test_a_run_that_another_implementation_runs_faster_is_listed(
    generators: Any, speed: float, listed: list[str]
) -> None:
    rows = steps(hf=50.0, liger=100.0, peer=speed)
    lines = list(generators.benchmarks.slower_runs(ROOT / "benchmarks" / "results" / "run", rows))
    assert [line[1] for line in lines] == listed
    assert [line[2] for line in lines] == ["liger-kernel"] * len(listed)


def test_runs_within_the_spread_of_their_steps_are_not_listed(generators: Any) -> None:
    assert list(generators.steps.slower(steps(liger=100.0, peer=109.0), 0.97)) == []
