# SPDX-License-Identifier: Apache-2.0
"""Facts about swiglu, geglu and relu_squared that their samples do not say."""

import pytest
import torch
from torch import Tensor

from liger_core import explain, relu_squared, swiglu
from liger_core.plugins import PROJECT, registry
from ops.agreement import leaf, saved
from ops.allocations import allocations


def gradients(device: torch.device, *, overwrite: bool, packed: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients by a backward that keeps its graph, and then by one that frees it."""
    torch.manual_seed(0)
    inputs = [leaf(5, 78, device=device) for _ in range(1 if packed else 2)]
    # Results of something, as they are in a model, so that nobody else holds them.
    result = swiglu(*[x * 1.0 for x in inputs], overwrite=overwrite)
    upstream = torch.randn_like(result)
    kept = torch.autograd.grad(result, inputs, upstream, retain_graph=True)
    return list(kept), list(torch.autograd.grad(result, inputs, upstream))


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_overwriting_gate_and_up_gives_the_same_gradients(packed: bool, device: torch.device) -> None:
    expected, _ = gradients(device, overwrite=False, packed=packed)
    for got in gradients(device, overwrite=True, packed=packed):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert not one.requires_grad


def test_gate_and_up_that_share_memory_are_not_overwritten(device: torch.device) -> None:
    def squared(overwrite: bool) -> Tensor:
        x = torch.linspace(-2, 2, 78, device=device, requires_grad=True)
        both = (x * 1.0).reshape(6, 13)
        (gradient,) = torch.autograd.grad(swiglu(both, both, overwrite=overwrite).sum(), x)
        return gradient

    torch.testing.assert_close(squared(True), squared(False))


def test_a_fused_backward_that_may_overwrite_needs_no_memory(measured_device: torch.device) -> None:
    name = explain(swiglu, torch.zeros(1, 2, device=measured_device)).backend
    if name == "reference" or registry().backends[name].distribution not in PROJECT:
        pytest.skip("plain PyTorch keeps more than the inputs, and another backend need not overwrite them")
    gate, up = (leaf(512, 512, device=measured_device) for _ in range(2))

    def backward(overwrite: bool) -> int:
        product = [x * 1.0 for x in (gate, up)]
        result = swiglu(*product, overwrite=overwrite)
        # Nobody else holds them now.
        product.clear()
        upstream = torch.ones_like(result)
        return allocations(lambda: torch.autograd.grad(result, (gate, up), upstream), measured_device).peak

    assert backward(True) < backward(False)


def test_a_nan_stays_one_and_infinities_are_those_of_relu(device: torch.device) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device=device)
    y = relu_squared(x)
    assert y[0].isnan()
    assert y[1:].tolist() == [float("inf"), 0.0, 0.0]


def test_no_gradient_reaches_what_is_not_positive_even_from_an_infinite_one(device: torch.device) -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], device=device, requires_grad=True)
    relu_squared(x).backward(torch.tensor([float("inf"), float("inf"), 3.0], device=device))
    assert x.grad.tolist() == [0.0, 0.0, 12.0]


def test_nothing_but_the_input_is_kept(device: torch.device) -> None:
    x = leaf(64, 1024, device=device)
    fresh = {t.data_ptr() for t in saved(lambda: relu_squared(x), x)}
    # The reference keeps relu(x), and so may a backend of another package.
    assert len(fresh) <= (0 if explain(relu_squared, x).backend in ("triton", "inductor") else 1)


def test_the_gradient_does_not_overflow_before_the_upstream_gradient_is_met(device: torch.device) -> None:
    x = torch.tensor([60000.0], dtype=torch.float16, device=device, requires_grad=True)
    relu_squared(x).backward(torch.tensor([0.25], dtype=torch.float16, device=device))
    assert x.grad.tolist() == [30000.0]


def test_a_small_up_brings_a_square_back_that_is_too_large_for_the_dtype(device: torch.device) -> None:
    x, up = (torch.tensor([value], dtype=torch.float16, device=device, requires_grad=True) for value in (300.0, 0.001))
    y = relu_squared(x, up)
    assert y.tolist() == [(90000 * up.double()).half().item()] == [90.0625]
    y.backward(torch.tensor([0.25], dtype=torch.float16, device=device))
    assert (x.grad.tolist(), up.grad.tolist()) == ([(150 * up.double()).half().item()], [22496.0])
