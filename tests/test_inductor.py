# SPDX-License-Identifier: Apache-2.0
"""The backend `inductor`: what compiles, how often, and what runs the reference. `nox -s parity` tests all samples."""

import json
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import Case, sample_names
from conformance.running import Trial
from conformance.variations import LAYOUTS
from liger_core import BackendError, Op, relu_squared, rope, swiglu, use
from liger_core.plugins import registry

pytest.importorskip("liger_inductor")
from liger_inductor import compiled, plugin
from liger_inductor.table import TABLE

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(plugin._unavailable() is not None, reason="torch.compile needs a C++ compiler on the CPU"),
]


@pytest.fixture
def programs() -> dict[str, int]:
    """How many graphs were compiled since the test began; what was compiled before is forgotten."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counted: dict[str, int] = torch._dynamo.utils.counters["stats"]
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("op", TABLE, ids=lambda op: str(op.name))
def test_a_sample_of_every_op_is_as_accurate_as_the_reference(op: Op[..., Any]) -> None:
    device, dtype = torch.device("cpu"), torch.float32
    trial = Trial(Case(op, "inductor", dtype, sample_names(op, device, dtype)[0], device))
    trial.expect(trial.complaints(trial.run()))


def step(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    with use("inductor", only=[relu_squared]):
        relu_squared(leaf).backward(torch.ones_like(leaf))
    return leaf.grad


@pytest.mark.slow
def test_other_sizes_and_evaluation_use_the_same_programs(programs: dict[str, int]) -> None:
    torch.testing.assert_close(step(torch.full((3, 5), 2.0)), torch.full((3, 5), 4.0))
    # Forward and backward.
    assert programs["unique_graphs"] == 2
    step(torch.randn(7, 40))
    with torch.no_grad(), use("inductor", only=[relu_squared]):
        relu_squared(torch.nn.Parameter(torch.randn(4, 9)))
    assert programs["unique_graphs"] == 2


def test_upstream_gradients_of_any_layout_use_the_same_program(programs: dict[str, int]) -> None:
    x, weights = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    for upstream in (weights, *(layout(weights, 0) for layout in LAYOUTS.values())):
        with use("inductor", only=[relu_squared]):
            y = relu_squared(x)
        torch.testing.assert_close(torch.autograd.grad(y, x, upstream)[0], 2 * x.relu() * upstream)
        # Forward and backward.
        assert programs["unique_graphs"] == 2


def test_calls_past_the_limit_run_uncompiled(programs: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "PROGRAMS", 1)
    implementation = compiled.compiled(relu_squared)
    with torch._dynamo.config.patch(recompile_limit=1):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.full((2, 3), 3.0, dtype=dtype, requires_grad=True)
            y = implementation(x)
            y.backward(torch.ones_like(y))
            assert torch.equal(y, torch.full_like(x, 9.0))
            assert torch.equal(x.grad, torch.full_like(x, 6.0))
    assert programs["unique_graphs"] == 2


def test_every_op_has_programs_of_its_own(programs: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "PROGRAMS", 1)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for op in (relu_squared, swiglu):
            compiled.compiled(op)(torch.ones(2, 4))
    assert programs["unique_graphs"] == 2


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_a_transform_gets_the_reference(transform: object, programs: dict[str, int]) -> None:
    with use("inductor", only=[relu_squared]):
        made = transform(lambda x: relu_squared(x).sum())(torch.tensor([1.0, 2.0]))  # type: ignore[operator]
    assert made.shape == (2,)
    assert programs["unique_graphs"] == 0


def test_a_call_that_overwrites_its_arguments_gets_the_reference(programs: dict[str, int]) -> None:
    q, k, table = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.ones(3, 4)
    with use("inductor", only=[rope]):
        rotated, _ = rope(q, k, table, table, inplace=True)
    assert rotated is q
    assert programs["unique_graphs"] == 0


def test_it_is_selected_by_name_only() -> None:
    assert not registry().backends["inductor"].automatic


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, fresh_selection: None) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match="and CXX=no-such-compiler is not a program"):
        use("inductor")


def test_the_readme_has_every_op_with_the_committed_figures() -> None:
    rows = json.loads((ROOT / "benchmarks/results/2026-11-23-cpu-inductor/results.json").read_text())
    key = operator.itemgetter("op", "workload", "dtype", "pass", "implementation")
    times = {key(row): row["median_ms"] for row in rows}
    shapes = dict.fromkeys((row["op"], row["workload"]) for row in rows)
    passes = [(dtype, part) for dtype in ("bfloat16", "float32") for part in ("forward", "full")]
    lines = []
    for op, shape in shapes:
        ratios = [times[op, shape, *each, "eager"] / times[op, shape, *each, "inductor"] for each in passes]
        lines.append(" | ".join([f"| `{op}`", shape, *(f"{ratio:.1f}" for ratio in ratios)]) + " |")
    text = (ROOT / "packages/liger-inductor/README.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("| `")] == lines
    assert {op for op, _ in shapes} == {op.name for op in TABLE}
