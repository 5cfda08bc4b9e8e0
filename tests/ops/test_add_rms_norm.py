# SPDX-License-Identifier: Apache-2.0
"""Facts about add_rms_norm that its samples do not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liger_core import add_rms_norm
from ops.agreement import disagreements, leaf

Named = dict[str, Tensor]


@pytest.fixture
def arguments(device: torch.device) -> Named:
    return {"x": leaf(6, 40, device=device), "residual": leaf(6, 40, device=device), "weight": leaf(40, device=device)}


def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The step of a decoder layer as models write it."""
    summed = residual + x
    return F.rms_norm(summed, (x.shape[-1],), weight, 1e-6), summed


def gradients(call: Any, arguments: Named) -> Named:
    """What backward() leaves in the leaves for a sum in which both outputs have weights of their own."""
    for tensor in arguments.values():
        tensor.grad = None
    normed, summed = call(**arguments)
    (normed.sin().sum() + summed.cos().sum()).backward()
    return {name: tensor.grad for name, tensor in arguments.items() if tensor.grad is not None}


def test_add_rms_norm_equals_the_functions_of_pytorch(arguments: Named) -> None:
    assert disagreements(add_rms_norm, plain, **arguments) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pair_is_the_decoder_step_of_llama(dtype: torch.dtype, device: torch.device) -> None:
    def llama(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        summed = residual + x
        wide = summed.to(torch.promote_types(x.dtype, torch.float32))
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), summed

    tensors = {name: leaf(6, 40, device=device, dtype=dtype) for name in ("x", "residual")}
    assert disagreements(add_rms_norm, llama, **tensors, weight=leaf(40, device=device, dtype=dtype)) == []


def test_the_sum_is_that_of_pytorch_bit_for_bit(device: torch.device) -> None:
    x, residual = (torch.randn(7, 72, device=device).bfloat16() for _ in range(2))
    assert torch.equal(add_rms_norm(x, residual)[1], x + residual)


def test_what_is_normalized_is_the_rounded_sum(device: torch.device) -> None:
    # In bfloat16 256 + 1 is 256. Among 128s the norm of 256 is 1.9547, that of 257 1.9619, which differ in bfloat16.
    x, residual = torch.zeros(1, 64), torch.full((1, 64), 128.0)
    x[0, 0], residual[0, 0] = 1.0, 256.0
    normed, summed = add_rms_norm(*(t.to(device, torch.bfloat16) for t in (x, residual)))
    assert (float(summed[0, 0]), float(normed[0, 0])) == (256.0, 1.953125)


def test_the_gradients_that_a_backward_leaves_are_tensors_of_their_own(arguments: Named) -> None:
    found = gradients(add_rms_norm, arguments)
    before = found["residual"].clone()
    found["x"].zero_()
    assert torch.equal(found["residual"], before)


def test_a_second_backward_adds_the_same_gradients(arguments: Named) -> None:
    normed, summed = add_rms_norm(**arguments)
    total = normed.sin().sum() + summed.cos().sum()
    total.backward(retain_graph=True)
    once = {name: tensor.grad.clone() for name, tensor in arguments.items() if tensor.grad is not None}
    total.backward()
    assert [name for name, tensor in arguments.items() if not torch.equal(tensor.grad, 2 * once[name])] == []  # type: ignore[arg-type]


def test_gradients_changed_in_place_do_not_change_the_next_ones(arguments: Named) -> None:
    outputs, tensors = add_rms_norm(**arguments), list(arguments.values())
    weights = [torch.randn_like(o) for o in outputs]
    first = torch.autograd.grad(outputs, tensors, weights, retain_graph=True)
    kept = [g.clone() for g in first]
    for gradient in first:
        gradient.add_(1.0)
    again = torch.autograd.grad(outputs, tensors, weights)
    assert [i for i, (a, b) in enumerate(zip(again, kept, strict=True)) if not torch.equal(a, b)] == []


def test_a_gradient_that_grows_by_other_uses_does_not_grow_for_the_other_input(arguments: Named) -> None:
    # Both inputs are used once more, so that autograd adds to the gradient that they share.
    def twice(call: Any) -> Any:
        def used(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            x, residual = x * 1.5, residual * 0.5
            normed, summed = call(x, residual, weight)
            return normed, summed, 3.0 * x, 5.0 * residual

        return used

    assert disagreements(twice(add_rms_norm), twice(plain), **arguments) == []


def test_one_tensor_as_both_inputs_gets_both_gradients(device: torch.device) -> None:
    tensors = {"x": leaf(6, 40, device=device), "weight": leaf(40, device=device)}
    assert (
        disagreements(lambda x, weight: add_rms_norm(x, x, weight), lambda x, weight: plain(x, x, weight), **tensors)
        == []
    )


def test_the_sum_alone_passes_its_gradient_on(arguments: Named) -> None:
    weights = torch.randn(6, 40, device=arguments["x"].device)
    summed = add_rms_norm(**arguments)[1]
    got = torch.autograd.grad(summed, [arguments["x"], arguments["residual"]], weights)
    assert [torch.equal(g, weights) for g in got] == [True, True]


def test_writing_to_the_sum_before_backward_is_noticed_or_harmless(arguments: Named) -> None:
    # Harmless where the backward pass begins from the arguments.
    def overwritten(**given: Tensor) -> Tensor:
        normed, summed = add_rms_norm(**given)
        with torch.no_grad():
            summed.add_(1.0)
        return normed

    try:
        found = disagreements(overwritten, lambda **given: plain(**given)[0], **arguments)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        found = []
    assert found == []


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    draw=st.integers(0, 99),
    rows=st.integers(0, 9),
    width=st.integers(8, 130),
    eps=st.sampled_from([1e-6, 1e-3, 0.3]),
    offset=st.sampled_from([0.0, 1.0]),
    has_weight=st.booleans(),
)
def test_any_shape_and_option_is_the_naive_formula(
    device: torch.device, draw: int, rows: int, width: int, eps: float, offset: float, has_weight: bool
) -> None:
    torch.manual_seed(draw)

    def naive(x: Tensor, residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        summed = x + residual
        scaled = summed / (summed.square().mean(-1, keepdim=True) + eps).sqrt()
        return (scaled if weight is None else scaled * (weight + offset)), summed

    tensors: dict[str, Any] = {name: leaf(rows, width, device=device) for name in ("x", "residual")}
    options: dict[str, Any] = {"eps": eps}
    if has_weight:
        tensors["weight"], options["weight_offset"] = leaf(width, device=device), offset
    assert disagreements(lambda **a: add_rms_norm(**a, **options), naive, **tensors) == []
