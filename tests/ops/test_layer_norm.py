# SPDX-License-Identifier: Apache-2.0
"""Facts about layer_norm that its samples do not say; test_rms_norm.py has one more."""

from __future__ import annotations

import pytest
import torch

from liger_core import layer_norm
from ops.agreement import leaf


def test_the_bias_gradient_is_summed_in_float32(device: torch.device) -> None:
    x = torch.randn(2048, 8, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(8, device=device, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(layer_norm(x, None, bias), bias, torch.ones_like(x))
    assert grad.tolist() == [2048.0] * 8


def test_a_constant_row_is_the_bias_alone(device: torch.device) -> None:
    """Of a mean that is off by an ulp, 1/√eps would make a thousandth of the row."""
    x, weight, bias = (torch.full((4, 600), 1000.0, device=device), leaf(600, device=device), leaf(600, device=device))
    assert torch.equal(layer_norm(x, weight, bias, 1e-6), bias.detach().expand(4, 600))


@pytest.mark.parametrize("width", [600, 5120])
def test_a_row_whose_squares_overflow_stays_finite(width: int, device: torch.device) -> None:
    x = torch.full((1, width), 1.0, device=device)
    x[0, 0] = 1e21
    assert bool(layer_norm(x).isfinite().all())
