# SPDX-License-Identifier: Apache-2.0
"""The faults that the generated tests must find in an op, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import Case, change_of
from conformance.guarding import GuardedMemory
from conformance.running import KernelCall, Trial, penalty
from conformance.variations import LAYOUTS, SCALES
from liger_core.kernels import Kernel, Outputs
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
    return Op(
        reference,
        check=lambda x: None,
        samples=samples,
        misuses=lambda device: iter(()),
        workloads=lambda: (),
        work=lambda x: Work(0, 0),
    )


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


def test_an_exponential_that_overflows_fails_shifted_values(device: torch.device) -> None:
    trial = Trial(tried(canceling, device), change=change_of("x_lowered"))
    assert "output: relative error inf" in " ".join(trial.complaints(trial.run()))


@pytest.mark.parametrize(("left", "wrong"), [(1e-6, False), (1e-4, True)], ids=["round_off", "more"])
def test_what_is_left_of_a_gradient_that_is_zero_is_round_off(left: float, wrong: bool, device: torch.device) -> None:
    def inexact(x: Tensor) -> Tensor:
        return summing_to_one(x) + left * (x - x.detach())

    trial = Trial(tried(inexact, device, summing_to_one), layout=LAYOUTS["expanded"])
    assert bool(trial.complaints(trial.run())) is wrong


def test_an_input_that_is_overwritten_is_named(device: torch.device) -> None:
    def overwriting(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        x.detach().zero_()
        return y

    trial = Trial(tried(overwriting, device))
    assert trial.complaints(trial.run()) == ["x was overwritten"]


def test_a_failing_case_prints_what_its_sample_is_for(device: torch.device) -> None:
    trial = Trial(tried(canceling, device))
    with pytest.raises(
        AssertionError, match=r"^output: wrong; gradient of x: None – this sample is for: moderate values$"
    ):
        trial.expect(["output: wrong", "gradient of x: None"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_not_dense_and_changes_no_values_that_it_may_keep(name: str) -> None:
    dense = torch.randn(3, 4, 5)
    laid = LAYOUTS[name](dense, 0)
    assert laid.shape == dense.shape
    assert not laid.is_contiguous()
    assert torch.equal(LAYOUTS[name](laid.contiguous(), 0), laid)
    assert torch.equal(laid, dense) is (name in ("transposed", "sliced"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_upstream_gradient_has_the_layout_in_the_implementation_and_is_dense_in_the_definition(
    name: str, device: torch.device
) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y.register_hook(lambda grad: seen.append(grad.stride()))
        return y

    trial = Trial(tried(watched, device), layout=LAYOUTS[name])
    assert trial.complaints(trial.run()) == []
    assert seen == [LAYOUTS[name](torch.zeros(3, 8), 0).stride()]
    assert trial.reference.cotangents["output"].is_contiguous()


def test_two_sliced_upstream_gradients_have_row_strides_of_their_own() -> None:
    first, second = (LAYOUTS["sliced"](torch.zeros(3, 8), output).stride(0) for output in range(2))
    assert 8 < first < second


def filling(name: str, beyond: int) -> Kernel:
    """A kernel that stores so many elements past the end of its result."""

    def allocate(x: Tensor) -> Outputs:
        return (torch.empty_like(x),)

    def launch(y: Tensor, /, x: Tensor) -> None:
        y.as_strided((y.numel() + beyond,), (1,)).fill_(1.0)

    return Kernel("liger_test", name, allocate, launch)


def test_a_store_past_the_end_names_the_kernel_and_the_tensor(guarded_memory: GuardedMemory) -> None:
    x = torch.randn(3, 5)
    filling("masked", 0)(x)
    with pytest.raises(
        AssertionError, match=r"^liger_test::unmasked wrote outside its tensors: y \(3, 5\): 12 bytes after it$"
    ):
        filling("unmasked", 3)(x)
    guarded_memory.check("the next one")


def test_a_load_past_the_end_reads_nan(guarded_memory: GuardedMemory) -> None:
    y = torch.zeros(5, dtype=torch.bfloat16)
    assert y.as_strided((6,), (1,))[-1].isnan()


def test_memory_that_is_never_written_is_nan(guarded_memory: GuardedMemory) -> None:
    assert torch.empty(3).isnan().all()
    assert not torch.zeros(3).any()


def greedy(needs: list[bool]) -> list[str]:
    """What is said of a backward kernel that computes all of its gradients."""

    def launch(grad_a: Tensor | None, grad_b: Tensor | None, /, grad_y: Tensor, needs: list[bool]) -> None: ...

    kernel = Kernel("liger_test", f"greedy_{sum(needs)}", lambda *_: (), launch)
    return KernelCall(kernel, (torch.zeros(1), needs), (torch.zeros(1), torch.zeros(1))).unasked()


def test_a_gradient_that_was_not_requested_is_named() -> None:
    assert greedy([True, False]) == ["liger_test::greedy_1: grad_b must be None where nobody asked for it"]


def test_asking_for_every_gradient_where_one_is_wanted_is_named() -> None:
    assert greedy([True, True]) == ["liger_test::greedy_2: one gradient must be asked for, got needs=[True, True]"]


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
