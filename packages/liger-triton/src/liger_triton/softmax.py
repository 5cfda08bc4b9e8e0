# SPDX-License-Identifier: Apache-2.0
"""softmax in Triton: a row that fits in registers is read once; a longer one twice, the second time mostly from the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liger_core.kernels import Outputs, differentiable
from liger_triton.launch import Launcher, TritonKernel, cdiv, dense_like, fuses, row_shape, strided_rows, supported

# The longest rows that are held in registers, forward and backward (two tensors), and the tile of longer ones.
WIDEST, WIDEST_BACKWARD, TILE = 32768, 16384, 4096


def softmax(x: Tensor) -> Tensor:
    supported(x)
    result: Tensor = _softmax(x)
    return result


def _allocate(x: Tensor) -> Outputs:
    return (dense_like(x),)


def _launch(y: Tensor, /, x: Tensor) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    if width > WIDEST:
        wide_forward_launch((rows,), x, y, x_stride, width, EVEN=width % TILE == 0, BLOCK=TILE, num_warps=8)
        return
    block, several, warps = _shape(width)
    forward_launch((cdiv(rows, several),), x, y, x_stride, rows, width, ROWS=several, BLOCK=block, num_warps=warps)


def _allocate_backward(grad_y: Tensor, y: Tensor, needs: list[bool]) -> Outputs:
    return (dense_like(y),)


def _launch_backward(grad_x: Tensor, /, grad_y: Tensor, y: Tensor, needs: list[bool]) -> None:
    if y.numel() == 0:
        return
    width = y.shape[-1]
    rows = y.numel() // width
    grad_y, grad_stride = strided_rows(grad_y)
    if width > WIDEST_BACKWARD:
        wide_backward_launch((rows,), grad_y, y, grad_x, grad_stride, width, EVEN=width % TILE == 0, BLOCK=TILE, num_warps=8)
        return
    block, several, warps = _shape(width)
    backward_launch(
        (cdiv(rows, several),), grad_y, y, grad_x, grad_stride, rows, width,
        ROWS=several, BLOCK=block, num_warps=warps, enable_fp_fusion=fuses(block),
    )  # fmt: skip


def _shape(width: int) -> tuple[int, int, int]:
    return row_shape(width, 2048, lambda block: min(32, block // 1024))


_softmax = differentiable(
    TritonKernel("softmax", _allocate, _launch),
    TritonKernel("softmax_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def forward_kernel(x, y, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes ROWS rows, each in one block."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    # The last row again for the lanes behind it: rows of nothing but minus infinity would make them NaN.
    read = tl.minimum(row, rows - 1)
    value = tl.load(x + read[:, None] * x_stride + column[None, :], mask=(column < width)[None, :], other=float("-inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 1)[:, None])
    power = power / tl.sum(power, 1)[:, None]
    tl.store(y + row[:, None] * width + column[None, :], power.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(grad_y, y, grad_x, grad_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """grad_x = y · (grad_y - Σ grad_y · y) of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.load(y + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = value * (grad - tl.sum(grad * value, 1)[:, None])
    tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def wide_forward_kernel(x, y, x_stride, width, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes one row: every lane keeps the maximum and the sum of what it reads, then all are merged."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    x += row * x_stride
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = None if EVEN else column < width
        value = tl.load(x + column, mask=mask, other=None if EVEN else float("-inf"), eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(top, value)
        # Without a finite maximum there is nothing to scale yet, and nothing to add.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(value - base)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(tl.where(top == float("-inf"), float("-inf"), top - highest)), 0)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = None if EVEN else column < width
        value = tl.load(x + column, mask=mask, other=None if EVEN else 0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(y + row * width + column, (tl.exp(value - highest) / total).to(y.dtype.element_ty), mask=mask)


@triton.jit
def wide_backward_kernel(grad_y, y, grad_x, grad_stride, width, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of one row in two passes over its tiles."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    grad_y += row * grad_stride
    y += row * width
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = None if EVEN else column < width
        grad = tl.load(grad_y + column, mask=mask, other=None if EVEN else 0.0, eviction_policy="evict_last").to(tl.float32)
        products += grad * tl.load(y + column, mask=mask, other=None if EVEN else 0.0, eviction_policy="evict_last").to(tl.float32)
    product = tl.sum(products, 0)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = None if EVEN else column < width
        grad = tl.load(grad_y + column, mask=mask, other=None if EVEN else 0.0, eviction_policy="evict_first").to(tl.float32)
        value = tl.load(y + column, mask=mask, other=None if EVEN else 0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(grad_x + row * width + column, (value * (grad - product)).to(grad_x.dtype.element_ty), mask=mask)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
wide_forward_launch = Launcher(wide_forward_kernel)
wide_backward_launch = Launcher(wide_backward_kernel)
