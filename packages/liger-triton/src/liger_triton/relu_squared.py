# SPDX-License-Identifier: Apache-2.0
"""relu_squared in Triton; with up, it uses the kernels of the gated activations."""

import triton
import triton.language as tl
from torch import Tensor

from liger_triton._gated import PLAIN, RELU_SQUARED, gated
from liger_triton.launch import TILE_WARPS, Launcher, differentiable_kernels, first_like, rows_of, supported, tiles_of


def relu_squared(x: Tensor, up: Tensor | None = None) -> Tensor:
    supported(x)
    return _relu_squared(x) if up is None else _gated_relu_squared(x, up, RELU_SQUARED, PLAIN, False)


def _launch(y: Tensor, /, x: Tensor) -> None:
    x = rows_of(x)
    rows, width, tiles, block = tiles_of(x, y.view(x.shape))
    if rows * width:
        forward_launch((rows * tiles,), x, y, x.stride(0), width, tiles, BLOCK=block, num_warps=TILE_WARPS)


def _launch_backward(grad_x: Tensor, /, grad_y: Tensor, x: Tensor, needs: list[bool]) -> None:
    grad_y, x = rows_of(grad_y), rows_of(x)
    rows, width, tiles, block = tiles_of(x, grad_y, grad_x.view(x.shape))
    if rows * width:
        backward_launch(
            (rows * tiles,),
            grad_y,
            x,
            grad_x,
            grad_y.stride(0),
            x.stride(0),
            width,
            tiles,
            BLOCK=block,
            num_warps=TILE_WARPS,
        )


@triton.jit
def forward_kernel(x, y, x_stride, width, tiles, BLOCK: tl.constexpr):
    """One program squares one tile of columns of one row."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = (program % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    # A select, not a maximum, so that NaN stays NaN.
    value = tl.where(value < 0.0, 0.0, value * value)
    tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(grad_y, x, grad_x, grad_stride, x_stride, width, tiles, BLOCK: tl.constexpr):
    """One program computes one tile of grad_x = 2 · max(x, 0) · grad_y."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = (program % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    grad = tl.load(grad_y + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.where(value <= 0.0, 0.0, 2.0 * value * grad)
    tl.store(grad_x + row * width + column, grad.to(grad_x.dtype.element_ty), mask=mask)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
_relu_squared = differentiable_kernels("relu_squared", first_like, _launch, _launch_backward, first_like)
_gated_relu_squared = gated("gated_relu_squared")
