# SPDX-License-Identifier: Apache-2.0
"""Facts about layer_norm that its samples do not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liger_core import layer_norm
from ops.agreement import disagreements, leaf


@pytest.mark.parametrize(
    "parts", [(), ("weight",), ("weight", "bias"), ("bias",)], ids=lambda p: "_and_".join(p) or "neither"
)
def test_layer_norm_equals_the_function_of_pytorch(parts: tuple[str, ...], device: torch.device) -> None:
    def formula(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)

    assert (
        disagreements(
            layer_norm, formula, x=leaf(2, 3, 40, device=device), **{name: leaf(40, device=device) for name in parts}
        )
        == []
    )


def test_layer_norm_ignores_a_shift_of_its_input(device: torch.device) -> None:
    # Whole numbers, so that shifting rounds nothing.
    x = torch.randint(-8, 8, (4, 64), device=device).float()
    torch.testing.assert_close(layer_norm(x + 1024), layer_norm(x))


def test_rows_have_mean_zero_and_variance_one(device: torch.device) -> None:
    y = layer_norm(torch.randn(5, 100, device=device) * 7 + 3, eps=1e-12)
    torch.testing.assert_close(y.mean(-1), torch.zeros(5, device=device), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones(5, device=device))


def test_the_gradient_of_every_row_sums_to_zero(device: torch.device) -> None:
    x = leaf(5, 100, device=device)
    (grad,) = torch.autograd.grad(layer_norm(x), x, torch.randn(5, 100, device=device))
    torch.testing.assert_close(grad.sum(-1), torch.zeros(5, device=device), atol=1e-5, rtol=0)


def test_the_bias_gradient_is_summed_in_float32(device: torch.device) -> None:
    x = torch.randn(2048, 8, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(8, device=device, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(layer_norm(x, None, bias), bias, torch.ones_like(x))
    assert grad.tolist() == [2048.0] * 8


def test_a_constant_row_becomes_the_bias(device: torch.device) -> None:
    bias = torch.randn(16, device=device)
    x = torch.full((3, 16), 5.0, device=device)
    assert torch.equal(layer_norm(x, torch.randn(16, device=device), bias), bias.expand(3, 16))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    draw=st.integers(0, 99),
    rows=st.integers(1, 9),
    width=st.integers(8, 130),
    eps=st.sampled_from([1e-6, 1e-3, 0.3]),
    parts=st.sets(st.sampled_from(["weight", "bias"])),
)
def test_any_shape_and_option_is_the_naive_formula(
    device: torch.device, draw: int, rows: int, width: int, eps: float, parts: set[str]
) -> None:
    torch.manual_seed(draw)

    def naive(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    arguments: dict[str, Any] = {name: leaf(width, device=device) for name in sorted(parts)}
    assert (
        disagreements(lambda **a: layer_norm(**a, eps=eps), naive, x=leaf(rows, width, device=device), **arguments)
        == []
    )


@pytest.mark.parametrize("scale", [1e-8, 1e8, 1e18], ids=str)
def test_a_scaled_row_has_the_gradient_scaled_down(scale: float, device: torch.device) -> None:
    x, upstream = torch.randn(4, 64, device=device), torch.randn(4, 64, device=device)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(layer_norm(leaf, eps=1e-30), leaf, upstream)[0]

    torch.testing.assert_close(gradient(x * scale) * scale, gradient(x), rtol=1e-4, atol=1e-5)


def test_a_constant_row_is_the_bias_alone(device: torch.device) -> None:
    """Of a mean that is off by an ulp, 1/√eps would make a thousandth of the row."""
    x, weight, bias = (torch.full((4, 600), 1000.0, device=device), leaf(600, device=device), leaf(600, device=device))
    assert torch.equal(layer_norm(x, weight, bias, 1e-6), bias.detach().expand(4, 600))


@pytest.mark.parametrize("width", [600, 5120])
def test_a_row_whose_squares_overflow_stays_finite(width: int, device: torch.device) -> None:
    x = torch.full((1, width), 1.0, device=device)
    x[0, 0] = 1e21
    assert bool(layer_norm(x).isfinite().all())
