# SPDX-License-Identifier: Apache-2.0
"""add_layer_norm in Triton: one read of x and residual writes both results; one backward pass serves both inputs."""

import torch
from torch import Tensor

from liger_core.kernels import Outputs
from liger_triton.launch import dense_like, differentiable_kernels, gradients_like, supported
from liger_triton.rms_norm import launch_norm, launch_norm_backward


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    supported(x, weight, bias)
    return _add_layer_norm(x, residual, weight, bias, eps)


def _allocate(x: Tensor, *rest: object) -> Outputs:
    rows = x.numel() // max(1, x.shape[-1])
    return dense_like(x), dense_like(x), x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _launch(
    normed: Tensor, summed: Tensor, mean: Tensor, inverse: Tensor, /, x: Tensor, residual: Tensor,
    weight: Tensor | None, bias: Tensor | None, eps: float,
) -> None:  # fmt: skip
    launch_norm(
        x=x, residual=residual, weight=weight, bias=bias, summed=summed, y=normed, mean=mean, inverse=inverse, eps=eps
    )


def _allocate_backward(
    grad_normed: Tensor | None, grad_summed: Tensor | None, summed: Tensor, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor, inverse: Tensor, needs: list[bool],
) -> Outputs:  # fmt: skip
    if grad_normed is None:
        needs = [needs[0], False, False]
    return gradients_like(needs, summed, weight, bias)


def _launch_backward(
    grad_x_and_residual: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /,
    grad_normed: Tensor | None, grad_summed: Tensor | None, summed: Tensor, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor, inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if grad_normed is not None:
        launch_norm_backward(
            grad_y=grad_normed, grad_summed=grad_summed, x=summed, weight=weight, mean=mean, inverse=inverse,
            grad_x=grad_x_and_residual, grad_weight=grad_weight, grad_bias=grad_bias,
        )  # fmt: skip
    elif grad_x_and_residual is not None and grad_summed is not None:
        grad_x_and_residual.copy_(grad_summed)


_add_layer_norm = differentiable_kernels(
    "add_layer_norm", _allocate, _launch, _launch_backward, _allocate_backward, public=2
)
