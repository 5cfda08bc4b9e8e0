# SPDX-License-Identifier: Apache-2.0
"""modulated_rms_norm in Triton."""

from torch import Tensor

from liger_core.kernels import Outputs
from liger_triton import _norm_modulated
from liger_triton.launch import dense_like, differentiable_kernels, supported


def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    supported(x, scale, shift, weight)
    _norm_modulated.check_width(x)
    return _modulated_rms_norm(x, scale, shift, weight, eps)


def _allocate(x: Tensor, *rest: object) -> Outputs:
    return dense_like(x), *_norm_modulated.statistics(x, 1)


def _launch(
    y: Tensor, inverse: Tensor, /, x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, eps: float
) -> None:
    _norm_modulated.forward(x, scale, shift, weight, y, None, inverse, eps)


def _launch_backward(
    grad_x: Tensor | None, grad_scale: Tensor | None, grad_shift: Tensor | None, grad_weight: Tensor | None, /,
    grad_y: Tensor, x: Tensor,
    scale: Tensor, shift: Tensor | None, weight: Tensor | None, inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    _norm_modulated.backward(grad_y, x, scale, weight, None, inverse, grad_x, grad_scale, grad_shift, grad_weight)


_modulated_rms_norm = differentiable_kernels("modulated_rms_norm", _allocate, _launch, _launch_backward)
