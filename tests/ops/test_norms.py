# SPDX-License-Identifier: Apache-2.0
"""Facts about rms_norm, layer_norm and group_norm that their samples do not say."""

import pytest
import torch
from torch import Tensor

from liger_core import Op, Unsupported, layer_norm, rms_norm
from ops.agreement import leaf


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
        x = x.clone().requires_grad_()
        return torch.autograd.grad(op(x, eps=1e-30), x, upstream)[0]

    torch.testing.assert_close(gradient(x * scale) * scale, gradient(x), rtol=1e-4, atol=1e-5)


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


def test_a_group_that_32_bits_cannot_count_is_declined() -> None:
    """The kernels count in 32 bits within a group, and would leave the result unwritten."""
    kernel = pytest.importorskip("liger_triton.group_norm").group_norm
    with pytest.raises(Unsupported, match=r"^groups of 2147483648 numbers, more than 2147418112$"):
        kernel(torch.zeros(1, 1, 1).expand(1, 1, 2**31), 1)
