# SPDX-License-Identifier: Apache-2.0
"""dyt in Triton: one pass forward, one backward that also sums the gradients of the weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.kernels import Outputs, differentiable
from liger_triton._logits import tanh
from liger_triton._norm_sum import column_sum_launch, read, store_sums
from liger_triton.launch import Launcher, TritonKernel, cdiv, contiguous, dense_like, power_of_two, processors, strided_rows, supported

# Rows and columns of a tile, and programs per multiprocessor of the backward pass.
ROWS, COLUMNS, PROGRAMS = 4, 512, 8


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    supported(x, alpha, weight, bias)
    result: Tensor = _dyt(x, alpha, weight, bias)
    return result


def _allocate(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Outputs:
    return (dense_like(x),)


def _launch(y: Tensor, /, x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    block = min(COLUMNS, power_of_two(width))
    grid = (cdiv(width, block), cdiv(rows, ROWS))
    forward_launch(grid, x, alpha, contiguous(weight), contiguous(bias), y, x_stride, rows, width, ROWS=ROWS, BLOCK=block)


def _allocate_backward(grad_y: Tensor, x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None, needs: list[bool]) -> Outputs:
    return tuple(dense_like(t) if need and t is not None else None for need, t in zip(needs, (x, alpha, weight, bias), strict=True))


def _launch_backward(
    grad_x: Tensor | None, grad_alpha: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /, grad_y: Tensor, x: Tensor,
    alpha: Tensor, weight: Tensor | None, bias: Tensor | None, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0:
        for grad in (grad_alpha, grad_weight, grad_bias):
            if grad is not None:
                grad.zero_()
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    grad_y, grad_stride = strided_rows(grad_y)
    block = min(COLUMNS, power_of_two(width))
    tiles = cdiv(width, block)
    programs = min(cdiv(rows, ROWS), max(1, PROGRAMS * processors(x.device) // tiles))
    sums = (grad_weight is not None) + (grad_bias is not None)
    part = x.new_empty((sums, programs, width), dtype=torch.float32) if sums else None
    total = None if grad_alpha is None else x.new_empty((1, tiles * programs), dtype=torch.float32)
    backward_launch(
        (tiles, programs), grad_y, x, alpha, contiguous(weight), grad_x, grad_weight, grad_bias, part, total, grad_stride, x_stride,
        rows, width, ROWS=ROWS, BLOCK=block,
    )  # fmt: skip
    if sums:
        column_sum_launch((cdiv(width, 16), sums), part, grad_weight, grad_bias, programs, width, ROWS=128, BLOCK=16)
    if total is not None:
        # One column: the sums of all programs.
        column_sum_launch((1, 1), total, grad_alpha, None, total.numel(), 1, ROWS=1024, BLOCK=1)


_dyt = differentiable(
    TritonKernel("dyt", _allocate, _launch),
    TritonKernel("dyt_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def forward_kernel(x, alpha, weight, bias, y, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes a tile of ROWS rows."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    value = tanh(read(x + row[:, None] * x_stride + column[None, :], mask) * tl.load(alpha).to(tl.float32))
    if weight is not None:
        value = value * read(weight + column, column < width)[None, :]
    if bias is not None:
        value = value + read(bias + column, column < width)[None, :]
    tl.store(y + row[:, None] * width + column[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, alpha, weight, grad_x, grad_weight, grad_bias, part, total, grad_stride, x_stride, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (c, p) walks every programs-th group of ROWS rows of column tile c, from the p-th on.

    With t = tanh(alpha · x) and g = grad_y · weight · (1 - t²): grad_x = alpha · g, grad_alpha = Σ g · x.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    slope = tl.load(alpha).to(tl.float32)
    sum_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sum_alpha = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        grad = read(grad_y + row[:, None] * grad_stride + column[None, :], mask)
        value = read(x + row[:, None] * x_stride + column[None, :], mask)
        if grad_weight is not None:
            sum_weight += grad * tanh(value * slope)
        sum_bias += grad
        if weight is not None:
            grad = grad * read(weight + column, column < width)[None, :]
        # 1 - tanh² by the exponential, which unlike that difference does not cancel.
        decay = tl.exp(-2.0 * tl.abs(value * slope))
        share = 1.0 / (1.0 + decay)
        grad = grad * (4.0 * decay * share * share)
        sum_alpha += grad * value
        if grad_x is not None:
            tl.store(grad_x + row[:, None] * width + column[None, :], (grad * slope).to(grad_x.dtype.element_ty), mask=mask)
    if part is not None:
        store_sums(tl.sum(sum_weight, 0), tl.sum(sum_bias, 0), part, grad_weight, grad_bias, program, programs, column, width)
    if total is not None:
        tl.store(total + program * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(sum_alpha, 0), 0))


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
