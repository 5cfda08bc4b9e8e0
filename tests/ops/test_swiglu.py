# SPDX-License-Identifier: Apache-2.0
"""Facts about swiglu and geglu that their samples do not say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_core import explain, swiglu
from liger_core.plugins import PROJECT, registry
from ops.agreement import leaf
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
