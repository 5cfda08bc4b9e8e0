# SPDX-License-Identifier: Apache-2.0
"""Facts about rms_norm that its samples do not say, one of them of layer_norm, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_core import Op, layer_norm, rms_norm


def test_wide_rows_are_summed_in_float32(device: torch.device) -> None:
    # A bfloat16 sum of ones stops at 256.
    x = torch.ones(2, 8192, device=device, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x), x)


def test_the_weight_gradient_is_summed_in_float32(device: torch.device) -> None:
    x = torch.ones(2048, 8, device=device, dtype=torch.bfloat16)
    weight = torch.ones(8, device=device, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x, weight), weight, torch.ones_like(x))
    assert grad.tolist() == [2048.0] * 8


def test_a_row_of_zeros_stays_zero_and_has_a_finite_gradient(device: torch.device) -> None:
    x = torch.zeros(2, 16, device=device, requires_grad=True)
    y = rms_norm(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not y.any()
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("op", [rms_norm, layer_norm], ids=lambda op: str(op.name))
@pytest.mark.parametrize("scale", [1e-8, 1e8, 1e18], ids=str)
def test_a_scaled_row_has_the_gradient_scaled_down(scale: float, op: Op[..., Tensor], device: torch.device) -> None:
    x, upstream = torch.randn(4, 64, device=device), torch.randn(4, 64, device=device)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(op(leaf, eps=1e-30), leaf, upstream)[0]

    torch.testing.assert_close(gradient(x * scale) * scale, gradient(x), rtol=1e-4, atol=1e-5)
