# SPDX-License-Identifier: Apache-2.0
"""sparsemax in Triton: no sort. The set of candidates shrinks to the support, each time to what is above the threshold of the last set."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs, differentiable
from liger_triton.launch import Launcher, TritonKernel, cdiv, dense_like, row_shape, strided_rows, supported

WIDEST = 32768


def sparsemax(x: Tensor) -> Tensor:
    supported(x)
    if x.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {x.shape[-1]} columns, more than {WIDEST}")
    result: Tensor = _sparsemax(x)
    return result


def _allocate(x: Tensor) -> Outputs:
    return (dense_like(x),)


def _launch(y: Tensor, /, x: Tensor) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    block, several, warps = forward_shape(width)
    forward_launch((cdiv(rows, several),), x, y, x_stride, rows, width, ROWS=several, BLOCK=block, num_warps=warps)


def _allocate_backward(grad_y: Tensor, y: Tensor, needs: list[bool]) -> Outputs:
    return (dense_like(y),)


def _launch_backward(grad_x: Tensor, /, grad_y: Tensor, y: Tensor, needs: list[bool]) -> None:
    if y.numel() == 0:
        return
    width = y.shape[-1]
    rows = y.numel() // width
    grad_y, grad_stride = strided_rows(grad_y)
    block, several, warps = backward_shape(width)
    backward_launch((cdiv(rows, several),), grad_y, y, grad_x, grad_stride, rows, width, ROWS=several, BLOCK=block, num_warps=warps)


def forward_shape(width: int) -> tuple[int, int, int]:
    """Block of columns, rows of a program, warps."""
    return row_shape(width, 1024, lambda block: min(16, max(4, block // 1024)))


def backward_shape(width: int) -> tuple[int, int, int]:
    """Block of columns, rows of a program, warps."""
    return row_shape(width, 1024, lambda block: min(32, max(4, block // 1024)))


_sparsemax = differentiable(
    TritonKernel("sparsemax", _allocate, _launch),
    TritonKernel("sparsemax_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def forward_kernel(x, y, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes ROWS rows, each in one block; it stops when no threshold rises any more.

    The threshold of a set that contains the support is at most the right one, so that nothing of the support is lost (Michelot 1986).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    # The last row again for the lanes behind it.
    source = tl.minimum(row, rows - 1)
    value = tl.load(x + source[:, None] * x_stride + column[None, :], mask=(column < width)[None, :], other=float("-inf")).to(tl.float32)
    value = value - tl.max(value, 1)[:, None]
    threshold = tl.full((ROWS,), -1.0, dtype=tl.float32)
    rising = 1
    while rising > 0:
        inside = value > threshold[:, None]
        size = tl.sum(inside.to(tl.float32), 1)
        # Correctly rounded, so that a threshold that x can have is met exactly.
        higher = tl.div_rn(tl.sum(tl.where(inside, value, 0.0), 1) - 1.0, size)
        # Nothing is inside of a row without a finite value.
        higher = tl.where(size > 0.0, higher, float("nan"))
        rising = tl.max((higher > threshold).to(tl.int32), 0)
        threshold = higher
    # Compared so that NaN stays NaN.
    result = tl.where(value <= threshold[:, None], 0.0, value - threshold[:, None])
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(grad_y, y, grad_x, grad_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """On the support, the gradient less its mean there."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inside = tl.load(y + row[:, None] * width + column[None, :], mask=mask, other=0.0) > 0.0
    size = tl.maximum(tl.sum(inside.to(tl.float32), 1), 1.0)
    mean = tl.sum(tl.where(inside, grad, 0.0), 1) / size
    result = tl.where(inside, grad - mean[:, None], 0.0)
    tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
