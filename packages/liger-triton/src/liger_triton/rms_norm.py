# SPDX-License-Identifier: Apache-2.0
"""rms_norm in Triton."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Outputs
from liger_triton import _norm
from liger_triton.launch import TritonKernel, dense_like, supported


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: Literal["input", "float32"] = "input",
) -> Tensor:
    supported(x, weight)
    result: Tensor = _rms_norm(x, weight, eps, weight_offset, cast == "input")
    return result


def _allocate(x: Tensor, *rest: object) -> Outputs:
    rows = x.numel() // max(1, x.shape[-1])
    return dense_like(x), x.new_empty(rows, dtype=torch.float32)


def _launch(
    y: Tensor,
    inverse_rms: Tensor,
    /,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_input: bool,
) -> None:
    _norm.forward(x, None, weight, None, None, y, None, inverse_rms, eps, weight_offset, cast_input)


def _allocate_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, inverse_rms: Tensor, weight_offset: float, needs: list[bool]
) -> Outputs:
    return (
        dense_like(x) if needs[0] else None,
        dense_like(weight) if needs[1] and weight is not None else None,
    )


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, /, grad_y: Tensor, x: Tensor, weight: Tensor | None,
    inverse_rms: Tensor,
    weight_offset: float, needs: list[bool],
) -> None:  # fmt: skip
    _norm.backward(grad_y, None, x, weight, None, inverse_rms, weight_offset, grad_x, grad_weight, None)


_rms_norm = differentiable(
    TritonKernel("rms_norm", _allocate, _launch),
    TritonKernel("rms_norm_backward", _allocate_backward, _launch_backward),
    saves=("x", "weight", "inverse_rms"),
)
