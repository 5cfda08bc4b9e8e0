# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md and peer-operators.md: their figures are those of committed results, and their operators and ops
those that there are."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from liger_bench.bench.rows import HEADER
from liger_bench.peers import liger_kernel
from liger_bench.results import append_csv
from liger_core.builtin import CATALOGUE
from liger_train.row import row_of
from liger_train.setup import Setup

ROOT = Path(__file__).parents[2]
OPS = [op.name for op in CATALOGUE]
ROW = dict.fromkeys(HEADER, "") | {
    "op": "rms_norm", "workload": "64x128", "pass": "full", "device": "cuda", "dtype": "bfloat16", "median_ms": 2.0,
    "low_ms": 1.9,
    "high_ms": 2.1, "limit_ms": 1.8, "copy_ms": 1.9, "share": 0.9, "error_outputs": 0.002, "error_gradients": 0.004,
    "error_eager_ratio": 0.5, "machine": "NVIDIA H200; 4 threads", "versions": "torch 2.11.0, liger-kernel 0.8.5",
    "commit": "c",
}  # fmt: skip
FIRST, SECOND = "2026-11-21T10:00:00+00:00", "2026-11-22T10:00:00+00:00"

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def generators() -> Iterator[SimpleNamespace]:
    """The modules of docs/generate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "generate")
        yield SimpleNamespace(
            page=importlib.import_module("peer_operators"),
            benchmarks=importlib.import_module("benchmarks"),
            older_runs=importlib.import_module("older_runs"),
            results=importlib.import_module("peer_results"),
            steps=importlib.import_module("steps"),
            trainers=importlib.import_module("trainers"),
        )


@pytest.fixture
def description(generators: SimpleNamespace) -> dict[str, Any]:
    return deepcopy(generators.page.described())


def found(generators: SimpleNamespace, folder: Path, *rows: dict[str, Any]) -> list[Any]:
    append_csv([ROW | row for row in rows], folder / "run" / "results.csv", HEADER)
    return generators.results.pairs(generators.results.measured("NVIDIA H200", folder), ["rms_norm"])


def ours(date: str, **columns: Any) -> dict[str, Any]:
    return {"implementation": "triton", "kind": "backend", "date": date} | columns


def theirs(date: str, **columns: Any) -> dict[str, Any]:
    return {"implementation": "liger-kernel", "kind": "peer", "date": date} | columns


def test_the_page_is_that_of_the_committed_results(generators: SimpleNamespace) -> None:
    page: ModuleType = generators.page
    assert page.PAGE.read_text() == page.page(), "run python docs/generate/peer_operators.py"


def test_the_page_of_older_runs_is_that_of_the_committed_results(generators: SimpleNamespace, tmp_path: Path) -> None:
    page: ModuleType = generators.older_runs
    images = tmp_path / page.IMAGES.relative_to(ROOT)
    assert page.PAGE.read_text() == page.page(images), "run python docs/generate/older_runs.py"
    assert {path.name for path in images.iterdir()} == {path.name for path in page.IMAGES.iterdir()}


def test_the_page_of_all_ops_is_that_of_the_committed_results(generators: SimpleNamespace) -> None:
    page: ModuleType = generators.benchmarks
    text = page.PAGE.read_text()
    # An op that is not measured yet is on the site, and needs no line here.
    assert text == page.page([op for op in OPS if f"[{op}]" in text]), "run python docs/generate/benchmarks.py"
    measured = {row["op"] for card in generators.results.CARDS for row in generators.results.measured(card)}
    assert [op for op in measured if f"[{op}]" not in text] == []


def newest(generators: SimpleNamespace, folder: Path, *rows: dict[str, Any]) -> list[Any]:
    found(generators, folder, *rows)
    return list(generators.benchmarks.newest(generators.results.measured("NVIDIA H200", folder)))


def test_the_page_of_all_ops_has_the_newest_run_with_each_kind_of_other(
    generators: SimpleNamespace, tmp_path: Path
) -> None:
    eager = theirs(FIRST, median_ms=8.0) | {"implementation": "eager"}
    ratios = newest(
        generators,
        tmp_path,
        ours(FIRST),
        eager,
        theirs(FIRST, median_ms=6.0),
        ours(SECOND),
        theirs(SECOND, median_ms=3.0),
    )
    line = generators.benchmarks.line("rms_norm", ratios)
    assert [line[1], line[4]] == ["4.00 ×", "1.50 × (liger-kernel)"]
    assert [FIRST[:10] in line[3], SECOND[:10] in line[6]] == [True, True]
    assert generators.benchmarks.line("rope", ratios)[1:] == ["–"] * 6


@pytest.mark.parametrize(
    ("columns", "listed"),
    [
        ({"median_ms": 1.6, "high_ms": 1.7}, True),
        ({"median_ms": 1.95, "high_ms": 1.96}, False),
        ({"median_ms": 1.6, "high_ms": 1.95}, False),
        ({"median_ms": 4.0, "high_ms": 4.1}, False),
    ],
    ids=["slower", "by_less_than_3_percent", "within_the_spread", "faster"],
)
def test_what_is_slower_is_listed(
    generators: SimpleNamespace, tmp_path: Path, columns: dict[str, float], listed: bool
) -> None:
    ratios = newest(generators, tmp_path, ours(FIRST), theirs(FIRST, low_ms=1.5, **columns))
    assert [row[0] for row in generators.benchmarks.slower_ops(ratios)] == ["rms_norm 64x128, full"] * listed


def test_the_description_has_no_mistakes(generators: SimpleNamespace, description: dict[str, Any]) -> None:
    assert generators.page.mistakes(description, OPS) == []


def test_an_operator_of_an_op_that_does_not_exist_is_a_mistake(
    generators: SimpleNamespace, description: dict[str, Any]
) -> None:
    description["compared"]["liger_rms_norm"] = ["rms_norm", "rms_nrom"]
    assert generators.page.mistakes(description, OPS) == ["liger_rms_norm names the op rms_nrom, which does not exist"]


def test_an_op_without_an_operator_needs_no_entry(generators: SimpleNamespace, description: dict[str, Any]) -> None:
    assert generators.page.mistakes(description, [*OPS, "new_norm"]) == []


def test_an_operator_in_two_tables_is_a_mistake(generators: SimpleNamespace, description: dict[str, Any]) -> None:
    description["none"]["liger_softmax"] = "unknown"
    assert generators.page.mistakes(description, OPS) == ["liger_softmax is in two tables"]


def test_a_variant_of_an_operator_that_is_not_compared_is_a_mistake(
    generators: SimpleNamespace, description: dict[str, Any]
) -> None:
    description["variants"]["liger_mhc_apply"] = "liger-kernel apply"
    assert generators.page.mistakes(description, OPS) == ["variants names liger_mhc_apply, which is not compared"]


def test_the_figures_of_a_variant_belong_to_its_operator(
    generators: SimpleNamespace, tmp_path: Path, description: dict[str, Any]
) -> None:
    description["compared"] = {"plain": ["rms_norm"], "other": ["rms_norm"]}
    description["variants"] = {"other": "liger-kernel other"}
    both = found(
        generators,
        tmp_path,
        ours(FIRST),
        theirs(FIRST, median_ms=6.0),
        theirs(FIRST, median_ms=4.0) | {"implementation": "liger-kernel other"},
    )
    lines = generators.page._overview(description, both).splitlines()
    (plain,), (other,) = ([line for line in lines if line.startswith(f"| `{name}`")] for name in ("plain", "other"))
    assert "3.00 ×" in plain
    assert "2.00 ×" not in plain
    assert "2.00 ×" in other
    assert "3.00 ×" not in other
    assert generators.page._missing(description, both) == ""
    assert "liger bench rms_norm " in generators.page._missing(description, both[:1])


def test_compared_are_the_ops_that_liger_bench_calls_liger_kernel_for(
    description: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(liger_fused_linear_cross_entropy=print)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", package)
    peers = liger_kernel.peers()
    assert {op for ops in description["compared"].values() for op in ops} == {op for peer in peers for op in peer.calls}
    assert set(description["variants"].values()) <= {peer.name for peer in peers}


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


def test_a_figure_is_of_the_newest_run_that_has_both(generators: SimpleNamespace, tmp_path: Path) -> None:
    (pair,) = found(
        generators,
        tmp_path,
        ours(FIRST),
        theirs(FIRST, median_ms=4.0),
        ours(SECOND, median_ms=1.0),
        theirs(SECOND, median_ms=3.0),
    )
    assert (pair.speed("full"), pair.run[-1]) == (3.0, SECOND)


def test_figures_of_two_runs_are_never_compared(generators: SimpleNamespace, tmp_path: Path) -> None:
    assert found(generators, tmp_path, ours(SECOND), theirs(FIRST)) == []
    (pair,) = found(generators, tmp_path, ours(FIRST, commit="other"), theirs(FIRST, commit="other", median_ms=1.0))
    assert pair.speed("full") == 0.5


@pytest.mark.parametrize(
    "columns",
    [
        {"machine": "NVIDIA H100; 4 threads"},
        {"dtype": "float16"},
        {"axis": "N"},
        {"median_ms": "", "reason": "out of memory"},
    ],
)
def test_other_cards_dtypes_and_series_are_left_out(
    generators: SimpleNamespace, tmp_path: Path, columns: dict[str, str]
) -> None:
    assert found(generators, tmp_path, ours(FIRST, **columns), theirs(FIRST, **columns)) == []


def test_every_card_has_figures_of_its_own(
    generators: SimpleNamespace, tmp_path: Path, description: dict[str, Any]
) -> None:
    other = {"machine": "NVIDIA H100; 4 threads"}
    found(
        generators,
        tmp_path,
        ours(FIRST),
        theirs(FIRST, median_ms=6.0),
        ours(SECOND, **other),
        theirs(SECOND, median_ms=4.0, **other),
    )
    speeds = {}
    for card in generators.results.CARDS:
        (pair,) = generators.results.pairs(generators.results.measured(card, tmp_path), ["rms_norm"])
        speeds[card] = pair.speed("full")
        assert f"{speeds[card]:.2f} ×" in generators.page._measured(description, [pair])
    assert speeds == {"NVIDIA H200": 3.0, "NVIDIA H100": 2.0}


def test_what_is_beyond_a_bound_is_listed(generators: SimpleNamespace, tmp_path: Path) -> None:
    columns = {"share": 0.8, "graph_ms": 2.5, "error_gradients": 0.005}
    slow = found(generators, tmp_path, ours(FIRST, **columns), theirs(FIRST, median_ms=1.5, high_ms=1.6))
    text = "\n".join(generators.page._below(slow))
    assert "* rms_norm 64x128, full: 0.750 ×" in text.splitlines()
    assert "* rms_norm 64x128, full: 0.800; 0.720; 0.950" in text.splitlines()
    assert "* rms_norm 64x128, gradients: 1.250 × that of liger-kernel (5.0e-03 and 4.0e-03)" in text


def test_a_reason_for_what_is_within_the_bounds_is_a_mistake(generators: SimpleNamespace, tmp_path: Path) -> None:
    low = found(generators, tmp_path / "low", ours(FIRST, share=0.8), theirs(FIRST))
    fast = found(generators, tmp_path / "fast", ours(FIRST, share=0.95), theirs(FIRST))
    for key in ("rms_norm", "rms_norm 64x128"):
        assert f"* {key}: it is read twice" in generators.page._bounds({key: "it is read twice"}, low).splitlines()
        with pytest.raises(ValueError, match=f"bounds names {key}, which no row"):
            generators.page._bounds({key: "it is read twice"}, fast)


def test_what_is_within_every_bound_is_not_listed(generators: SimpleNamespace, tmp_path: Path) -> None:
    fast = found(generators, tmp_path, ours(FIRST, share=0.95), theirs(FIRST, median_ms=2.5))
    assert [part.rpartition(" ")[2] for part in generators.page._below(fast)] == ["none."] * 4


def test_a_time_within_the_spread_of_the_other_is_called_equal(generators: SimpleNamespace, tmp_path: Path) -> None:
    (near,) = found(generators, tmp_path / "near", ours(FIRST), theirs(FIRST, median_ms=1.95, low_ms=1.9, high_ms=2.05))
    # The last percentiles of one of them may be high because of another process, which says nothing about the medians.
    (wide,) = found(generators, tmp_path / "wide", ours(FIRST), theirs(FIRST, median_ms=1.5, low_ms=1.4, high_ms=9.0))
    assert near.within_spread("full")
    assert not wide.within_spread("full")


def test_a_short_shape_is_compared_with_a_copy_of_as_many_bytes(generators: SimpleNamespace, tmp_path: Path) -> None:
    (pair,) = found(generators, tmp_path, ours(FIRST, limit_ms=0.4, share=0.2, copy_ms=1.9), theirs(FIRST))
    assert pair.short("full")
    assert pair.of_copy("full") == pytest.approx(0.95)
    assert [part.rpartition(" ")[2] for part in generators.page._below([pair])] == ["none."] * 4


def test_errors_in_the_last_digit_of_float32_are_equal(generators: SimpleNamespace, tmp_path: Path) -> None:
    (pair,) = found(
        generators, tmp_path, ours(FIRST, error_outputs=1e-7), theirs(FIRST, error_outputs=1e-9, error_gradients=0)
    )
    assert pair.error("error_outputs", pair.peer) == 1.0
    assert pair.error("error_gradients", pair.peer) is None


def test_a_page_of_steps_has_shares_of_the_card_and_the_longest_sequences(
    generators: SimpleNamespace, tmp_path: Path
) -> None:
    where = {"machine": "NVIDIA H100; CPU", "versions": "torch 2.11.0", "commit": "c", "date": FIRST}
    setup, ran = Setup("small", 2, 512), {"tokens_per_second": 1e6, "peak_bytes": 1 << 30, "trainable_parameters": 11e6}
    full, failed = {"out_of_memory": True, "reason": "out of memory"}, {"failed": True, "reason": "no kernel"}
    peer = replace(setup, liger="liger-kernel")
    steps = [row_of(replace(setup, liger="none"), where, full), row_of(setup, where, ran), row_of(peer, where, failed)]
    short, long = (replace(setup, batch=1, memory_limit=1 << 30, sequence=length) for length in (1024, 2048))
    (tmp_path / "train.json").write_text(
        # A search takes two steps, and the first two have no speed.
        json.dumps([row.columns() for row in [*steps, row_of(short, where, {}), row_of(long, where, full)]])
    )
    text = generators.steps.page(tmp_path)
    # 6 operations for each weight but the embedding, whose matrix is the head's, and 4 scores of a token in 3.5 passes.
    useful = 1e6 * (6 * 11_094_272 + 3.5 * 4 * 256 * 256 * 4) / 989e12
    assert "| small 2 × 512 | Transformers | out of memory | – | – | – | – |" in text
    assert f"|  | Liger | 1,000,000 | – | {useful:.2f} |" in text
    assert "* small 2 × 512, liger-kernel: no kernel" in text
    assert "| small, all weights | – | – | 1,024 |" in text


def test_the_table_of_trainers_has_both_heads_side_by_side(generators: SimpleNamespace) -> None:
    where = {"machine": "NVIDIA H100; CPU", "versions": "trl 1.16.0", "commit": "c", "date": FIRST, "device": "cuda"}
    row = where | {"trainer": "sft", "model": "gemma-3-1b", "length": 8192, "memory_limit": 79.0, "peak_bytes": 9 << 30}
    rows = [row | {"head": "liger", "tokens_per_second": 40100.0}, row | {"head": "trl", "tokens_per_second": 23400.0}]
    assert "| `SFTTrainer` | 23,400 → **40,100** | 9.0 → **9.0** | – → **–** |" in generators.trainers.table(
        rows, "run"
    )
