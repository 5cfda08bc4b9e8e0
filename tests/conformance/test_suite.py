# SPDX-License-Identifier: Apache-2.0
"""The faults that the generated tests must find in an op, and their messages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import Case
from conformance.running import Trial, penalty
from conformance.variations import LAYOUTS, SCALES
from liger_core.op import Op, Sample, Work


def bounded(x: Tensor) -> Tensor:
    return torch.tanh(x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("plain", (torch.randn(3, 8, device=device).to(dtype),), why="moderate values")


def summing_to_one(x: Tensor) -> Tensor:
    """A constant upstream gradient makes its gradient zero."""
    powers = torch.exp(x)
    return powers / powers.sum(-1, keepdim=True)


def op_of(reference: Callable[[Tensor], Tensor]) -> Op[..., Any]:
    described: dict[str, Any] = {"check": lambda x: None, "samples": samples, "work": lambda x: Work(0, 0)}
    return Op(reference, **described, misuses=lambda device: iter(()), workloads=lambda: ())


@dataclass(frozen=True)
class Tried(Case):
    """A case whose implementation is given."""

    implementation: Callable[..., Any] = bounded

    def call(self, arguments: Any) -> Any:
        return self.implementation(**arguments)


def tried(
    implementation: Callable[..., Any], device: torch.device, reference: Callable[[Tensor], Tensor] = bounded
) -> Tried:
    return Tried(op_of(reference), "tried", torch.float32, "plain", device, implementation)


def canceling(x: Tensor) -> Tensor:
    """tanh by its exponential, which cancels near 0."""
    decay = torch.exp(-2.0 * x)
    return (1.0 - decay) / (1.0 + decay)


def test_a_tanh_that_cancels_near_zero_passes_moderate_values_and_fails_small_ones(device: torch.device) -> None:
    moderate, small = Trial(tried(canceling, device)), Trial(tried(canceling, device), change=SCALES["small"])
    assert moderate.complaints(moderate.run()) == []
    assert "output: relative error" in " ".join(small.complaints(small.run()))


@pytest.mark.parametrize(("left", "wrong"), [(1e-6, False), (1e-4, True)], ids=["round_off", "more"])
def test_what_is_left_of_a_gradient_that_is_zero_is_round_off(left: float, wrong: bool, device: torch.device) -> None:
    def inexact(x: Tensor) -> Tensor:
        return summing_to_one(x) + left * (x - x.detach())

    trial = Trial(tried(inexact, device, summing_to_one), layout=LAYOUTS["expanded"])
    assert bool(trial.complaints(trial.run())) is wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_not_dense_and_changes_no_values_that_it_may_keep(name: str) -> None:
    dense = torch.randn(3, 4, 5)
    laid = LAYOUTS[name](dense, 0)
    assert laid.shape == dense.shape
    assert not laid.is_contiguous()
    assert torch.equal(LAYOUTS[name](laid.contiguous(), 0), laid)
    assert torch.equal(laid, dense) is (name in ("transposed", "sliced"))


def test_a_second_derivative_that_torch_refuses_counts_as_refused(device: torch.device) -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2 * ctx.saved_tensors[0]

    arguments = {"x": torch.randn(3, device=device)}
    assert penalty(lambda given: Once.apply(given["x"]), arguments, ["x"]) is None
    compiled = torch.compile(lambda given: given["x"].square(), backend="aot_eager")
    assert penalty(compiled, arguments, ["x"]) is None


def test_a_second_derivative_that_fails_otherwise_is_an_error(device: torch.device) -> None:
    def call(given: Any) -> Tensor:
        y = given["x"].square()
        y.register_hook(lambda grad: torch.mm(grad, grad))
        return y

    with pytest.raises(RuntimeError, match="must be a matrix"):
        penalty(call, {"x": torch.randn(3, device=device)}, ["x"])
