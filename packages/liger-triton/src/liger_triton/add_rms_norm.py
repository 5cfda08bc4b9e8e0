# SPDX-License-Identifier: Apache-2.0
"""add_rms_norm in Triton: one read of x and residual writes both results; one backward pass serves both inputs."""

from typing import Literal

import torch
from torch import Tensor

from liger_core.kernels import Outputs
from liger_triton.launch import dense_like, differentiable_kernels, supported
from liger_triton.rms_norm import launch_norm, launch_norm_backward


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: Literal["input", "float32"] = "input",
) -> tuple[Tensor, Tensor]:
    supported(x, weight)
    return _add_rms_norm(x, residual, weight, eps, weight_offset, cast == "input")


def _allocate(x: Tensor, *rest: object) -> Outputs:
    rows = x.numel() // max(1, x.shape[-1])
    return dense_like(x), dense_like(x), x.new_empty(rows, dtype=torch.float32)


def _launch(
    normed: Tensor, summed: Tensor, inverse_rms: Tensor, /, x: Tensor, residual: Tensor, weight: Tensor | None,
    eps: float, weight_offset: float, cast_input: bool,
) -> None:  # fmt: skip
    launch_norm(
        x=x, residual=residual, weight=weight, summed=summed, y=normed, inverse=inverse_rms,
        eps=eps, offset=weight_offset, cast_input=cast_input,
    )  # fmt: skip


def _allocate_backward(
    grad_normed: Tensor | None, grad_summed: Tensor | None, summed: Tensor, weight: Tensor | None, inverse_rms: Tensor,
    weight_offset: float, needs: list[bool],
) -> Outputs:  # fmt: skip
    return (
        dense_like(summed) if needs[0] else None,
        dense_like(weight) if needs[1] and weight is not None and grad_normed is not None else None,
    )


def _launch_backward(
    grad_x_and_residual: Tensor | None, grad_weight: Tensor | None, /, grad_normed: Tensor | None,
    grad_summed: Tensor | None, summed: Tensor,
    weight: Tensor | None, inverse_rms: Tensor, weight_offset: float, needs: list[bool],
) -> None:  # fmt: skip
    if grad_normed is not None:
        launch_norm_backward(
            grad_y=grad_normed, grad_summed=grad_summed, x=summed, weight=weight, inverse=inverse_rms,
            offset=weight_offset, grad_x=grad_x_and_residual, grad_weight=grad_weight,
        )  # fmt: skip
    elif grad_x_and_residual is not None and grad_summed is not None:
        grad_x_and_residual.copy_(grad_summed)


_add_rms_norm = differentiable_kernels(
    "add_rms_norm", _allocate, _launch, _launch_backward, _allocate_backward, public=2
)
