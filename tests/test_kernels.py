# SPDX-License-Identifier: Apache-2.0
"""What a kernel's signature says, and the sentences for a signature that says something else."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from liger_core.autograd import differentiable, made_again
from liger_core.kernels import Kernel

NUMBERS = itertools.count()


class Scale(NamedTuple):
    factor: float
    bias: Tensor | None


class Results(NamedTuple):
    y: Tensor
    total: Tensor | None


def kernel(launch: Callable[..., None], allocate: Callable[..., Any] | None = None) -> Kernel:
    """A kernel under a name of its own, `…_<number>`; its results are like its first input."""

    def like(*inputs: Any) -> tuple[Tensor]:
        return (torch.empty_like(inputs[0]),)

    return Kernel("liger_test", f"{launch.__name__}_{next(NUMBERS)}", allocate or like, launch)


def scaled(results: Results, /, x: Tensor, scale: Scale, sums: bool) -> None:
    results.y.copy_(x * scale.factor + (0 if scale.bias is None else scale.bias))
    if results.total is not None:
        results.total.copy_(results.y.sum())


def scaled_backward(grad_x: Tensor, /, grad_y: Tensor, scale: Scale, needs: list[bool]) -> None:
    grad_x.copy_(grad_y * scale.factor)


def results_of(x: Tensor, scale: Scale, sums: bool) -> Results:
    return Results(torch.empty_like(x), x.new_empty(()) if sums else None)


def test_the_schema_is_the_signature_of_launch() -> None:
    made = kernel(scaled, results_of)
    inputs, results = str(made.schema).partition("(")[2].split(" -> ")
    assert inputs == "Tensor x, float factor, Tensor? bias, bool sums)"
    assert results == "(Tensor y, Tensor? total)"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_structures_reach_the_launcher_as_structures(compiled: bool) -> None:
    function = differentiable(kernel(scaled, results_of), kernel(scaled_backward), saves=("bias",), public=2)
    call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    x = torch.randn(5, requires_grad=True)
    y, total = call(x, Scale(3.0, torch.ones(5)), True)
    torch.testing.assert_close((y, total), (3 * x + 1, (3 * x + 1).sum()))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((5,), 3.0))


def copy(y: Tensor, /, x: Tensor) -> None:
    y.copy_(x)


def no_slash(y: Tensor, x: Tensor) -> None: ...
def many(y: Tensor, /, *x: Tensor) -> None: ...
def text(y: Tensor, /, x: Tensor, mode: bytes) -> None: ...
def unannotated(y: Tensor, /, x) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("launch", "sentence"),
    [
        (no_slash, "must take outputs, a slash and inputs, (y, /, x, weight), got (y: torch.Tensor, x: torch.Tensor)"),
        (many, "take outputs, a slash and inputs, (y, /, x, weight), got (y: torch.Tensor, /, *x: torch.Tensor)"),
        (text, "mode must be annotated with one of Tensor, torch.Tensor | None, bool, int, float"),
        (unannotated, "x must be annotated with one of Tensor, torch.Tensor | None, bool, int, float"),
    ],
    ids=["no_slash", "variable_inputs", "type_without_schema", "unannotated"],
)
def test_a_signature_that_is_not_a_schema_is_refused(launch: Callable[..., None], sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        kernel(launch)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"liger_test::{launch.__name__}")


@pytest.mark.parametrize(
    ("allocate", "came"),
    [(torch.empty_like, "Tensor"), (lambda x: (torch.empty_like(x), torch.empty_like(x)), "2 values")],
    ids=["no_tuple", "too_many"],
)
def test_allocate_must_return_what_launch_takes(allocate: Callable[..., Any], came: str) -> None:
    made = kernel(copy, allocate)
    sentence = f"allocate must return a tuple of y, as launch takes them before its slash, got {came}"
    for x in (torch.ones(3), torch.ones(3, device="meta")):
        with pytest.raises(TypeError, match=sentence):
            made(x)


def output_kept(grad_x: Tensor, /, grad_y: Tensor, y: Tensor, needs: list[bool]) -> None: ...


def test_outputs_cannot_be_saved_before_the_forward() -> None:
    with pytest.raises(TypeError, match="keep_first needs one output and a backward that saves inputs only, got y"):
        differentiable(kernel(copy), kernel(output_kept), saves=("y",), keep_first=True)


def wrong_name(grad_x: Tensor, /, grad_y: Tensor, xx: Tensor, needs: list[bool]) -> None: ...
def wrong_gradient(grad_x: Tensor, /, gard_y: Tensor, needs: list[bool]) -> None: ...
def wrong_result(grad_z: Tensor, /, grad_y: Tensor, needs: list[bool]) -> None: ...
def no_needs(grad_x: Tensor, /, grad_y: Tensor) -> None: ...
def one_need(grad_x: Tensor, /, grad_y: Tensor, needs: bool) -> None: ...
def late_gradient(grad_x: Tensor, /, x: Tensor, grad_y: Tensor, needs: list[bool]) -> None: ...


@pytest.mark.parametrize(
    ("backward", "sentence"),
    [
        (wrong_name, "its inputs must be gradients of public outputs, inputs and outputs of liger_test::copy_"),
        (wrong_gradient, "got gard_y. Did you mean 'grad_y'?"),
        (wrong_result, "its results must be grad_<input of liger_test::copy_"),
        (no_needs, "its last input must be needs: list[bool], got Tensor grad_y"),
        (one_need, "its last input must be needs: list[bool], got bool needs"),
        (late_gradient, "grad_y must come first and in this order, got x, grad_y"),
    ],
    ids=["wrong_name", "wrong_gradient", "wrong_result", "no_needs", "one_need", "late_gradient"],
)
def test_a_backward_that_fits_no_forward_is_refused(backward: Callable[..., None], sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        differentiable(kernel(copy), kernel(backward), saves=())
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"liger_test::{backward.__name__}")


def input_saved(grad_x: Tensor, /, grad_y: Tensor, x: Tensor, needs: list[bool]) -> None: ...


@pytest.mark.parametrize("saves", [(), ("y",), ("x", "y"), ("x", "x"), ("grad_y", "x")], ids=str)
def test_saves_must_name_the_tensors_that_backward_takes(saves: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=r"saves must name the tensors that it takes besides gradients \(x\), got"):
        differentiable(kernel(copy), kernel(input_saved), saves)


def times(y: Tensor, /, x: Tensor, weight: Tensor) -> None:
    torch.mul(x, weight, out=y)


def times_backward(grad_x: Tensor, /, grad_y: Tensor, weight: Tensor, needs: list[bool]) -> None:
    torch.mul(grad_y, weight, out=grad_x)


def test_a_tensor_that_can_be_made_again_is_not_kept_for_the_backward_pass() -> None:
    multiply = differentiable(kernel(times), kernel(times_backward), saves=("weight",))
    made: list[Tensor] = []
    kept: list[Tensor] = []

    def make() -> Tensor:
        made.append(torch.tensor([2.0, 3.0]))
        return made[-1]

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = multiply(x, made_again(make))
    assert (len(made), kept) == (1, [])
    y.sum().backward()
    assert len(made) == 2
    assert x.grad.tolist() == [2.0, 3.0]


def test_no_kernel_is_tuned_by_running_it() -> None:
    """A tuner runs a kernel many times. Those that add to their outputs or overwrite their inputs would be wrong once."""
    sources = Path(__file__).parents[1].glob("packages/liger-triton/src/**/*.py")
    assert [path.name for path in sources if "autotune" in path.read_text()] == []
