# SPDX-License-Identifier: Apache-2.0
"""layer_norm in Triton."""

import torch
from torch import Tensor

from liger_core.kernels import Outputs
from liger_triton.launch import dense_like, differentiable_kernels, supported
from liger_triton.rms_norm import launch_norm, launch_norm_backward


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    supported(x, weight, bias)
    return _layer_norm(x, weight, bias, eps)


def _allocate(x: Tensor, *rest: object) -> Outputs:
    rows = x.numel() // max(1, x.shape[-1])
    return dense_like(x), x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _launch(
    y: Tensor, mean: Tensor, inverse: Tensor, /, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    launch_norm(x=x, weight=weight, bias=bias, y=y, mean=mean, inverse=inverse, eps=eps)


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /, grad_y: Tensor, x: Tensor,
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    launch_norm_backward(
        grad_y=grad_y, x=x, weight=weight, mean=mean, inverse=inverse,
        grad_x=grad_x, grad_weight=grad_weight, grad_bias=grad_bias,
    )  # fmt: skip


_layer_norm = differentiable_kernels("layer_norm", _allocate, _launch, _launch_backward)
