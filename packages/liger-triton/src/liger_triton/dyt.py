# SPDX-License-Identifier: Apache-2.0
"""dyt in Triton: one pass forward, one backward that also sums the gradients of the weights."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton._constants import LOG2E
from liger_triton._norm import read, store_sums, sum_columns, zero
from liger_triton.launch import (
    Launcher,
    cdiv,
    contiguous,
    differentiable_kernels,
    first_like,
    power_of_two,
    processors,
    strided_rows,
    supported,
)


class Shape(NamedTuple):
    """Rows, columns and warps of a tile; for the backward pass also pipeline stages and programs per multiprocessor."""

    rows: int
    columns: int
    warps: int
    stages: int = 1
    programs: int = 0


# Share of copy bandwidth on one H200 (bfloat16) at 4096 columns: forward .95, backward .93 (without stages .70).
FORWARD = Shape(4, 1024, 4)
BACKWARD = Shape(2, 512, 2, 3, 8)


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    supported(x, alpha, weight, bias)
    return _dyt(x, alpha, weight, bias)


def _launch(y: Tensor, /, x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    block = min(FORWARD.columns, power_of_two(width))
    tiles = cdiv(width, block)
    # With few numbers, tiles have fewer rows, so that there are enough programs.
    several = min(FORWARD.rows, 1 << max(0, (tiles * rows // (16 * processors(x.device))).bit_length() - 1))
    forward_launch(
        (tiles * cdiv(rows, several),), x, alpha, contiguous(weight), contiguous(bias), y, x_stride, rows, width, tiles,
        ROWS=several, BLOCK=block, num_warps=FORWARD.warps,
    )  # fmt: skip


def _launch_backward(
    grad_x: Tensor | None, grad_alpha: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /,
    grad_y: Tensor, x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0:
        zero(grad_alpha, grad_weight, grad_bias)
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    grad_y, grad_stride = strided_rows(grad_y)
    block = min(BACKWARD.columns, power_of_two(width))
    tiles = cdiv(width, block)
    programs = min(cdiv(rows, BACKWARD.rows), max(1, BACKWARD.programs * processors(x.device) // tiles))
    sums = (grad_weight is not None) + (grad_bias is not None)
    partials = x.new_empty((sums, programs, width), dtype=torch.float32) if sums else None
    total = None if grad_alpha is None else x.new_empty((1, tiles * programs, 1), dtype=torch.float32)
    backward_launch(
        (tiles, programs), grad_y, x, alpha, contiguous(weight), grad_x, grad_weight, grad_bias, partials, total,
        grad_stride, x_stride,
        rows, width, ROWS=BACKWARD.rows, BLOCK=block, STAGES=BACKWARD.stages, num_warps=BACKWARD.warps,
    )  # fmt: skip
    if partials is not None:
        sum_columns(partials, grad_weight, grad_bias)
    if total is not None:
        # The sums of all programs are one column.
        sum_columns(total, grad_alpha, None)


_dyt = differentiable_kernels("dyt", first_like, _launch, _launch_backward)


@triton.jit
def curve(u, EXACT: tl.constexpr):
    """Return tanh(u) and 1 - tanh(u)², which would cancel as a difference. EXACT: to the last digits of float32."""
    size = tl.abs(u)
    decay = tl.exp2(size * (-2.0 * LOG2E))
    square = u * u
    if EXACT:
        share = 1.0 / (1.0 + decay)
        far = (1.0 - decay) * share
        far = tl.where(u < 0, -far, far)
        series = 1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 - square * 0.05396825396825397))
        value = tl.where(size < 0.1, u * series, far)
    else:
        # Two instructions for a reciprocal; a division has eight.
        root = tl.rsqrt(1.0 + decay)
        share = root * root
        far = tl.where(u < 0, decay - 1.0, 1.0 - decay) * share
        # The error is at most 2e-5, below the precision of 16 bits.
        value = tl.where(size < 0.05, u - u * (square * 0.3333333333333333), far)
    return value, (4.0 * decay) * (share * share)


@triton.jit
def forward_kernel(x, alpha, weight, bias, y, x_stride, rows, width, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes a tile of ROWS rows."""
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    value = read(x + row[:, None] * x_stride + column[None, :], mask) * tl.load(alpha).to(tl.float32)
    value, _ = curve(value, y.dtype.element_ty == tl.float32)
    if weight is not None:
        value = value * read(weight + column, column < width)[None, :]
    if bias is not None:
        value = value + read(bias + column, column < width)[None, :]
    tl.store(y + row[:, None] * width + column[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, alpha, weight, grad_x, grad_weight, grad_bias, partials, total, grad_stride, x_stride, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (c, p) walks every programs-th group of ROWS rows of column tile c, from the p-th on.

    With t = tanh(alpha · x) and g = grad_y · weight · (1 - t²): grad_x = alpha · g, grad_alpha = Σ g · x.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    slope = tl.load(alpha).to(tl.float32)
    sum_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_alpha = tl.zeros((BLOCK,), dtype=tl.float32)
    if weight is not None:
        factor = read(weight + column, column < width)[None, :]
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        grad = read(grad_y + row[:, None] * grad_stride + column[None, :], mask)
        value = read(x + row[:, None] * x_stride + column[None, :], mask)
        bent, steep = curve(value * slope, x.dtype.element_ty == tl.float32)
        if grad_weight is not None:
            sum_weight += tl.sum(grad * bent, 0)
        sum_bias += tl.sum(grad, 0)
        if weight is not None:
            grad = grad * factor
        grad = grad * steep
        sum_alpha += tl.sum(grad * value, 0)
        if grad_x is not None:
            tl.store(
                grad_x + row[:, None] * width + column[None, :], (grad * slope).to(grad_x.dtype.element_ty), mask=mask
            )
    if partials is not None:
        store_sums(sum_weight, sum_bias, partials, grad_weight, grad_bias, program, programs, column, width)
    if total is not None:
        tl.store(total + program * tl.num_programs(0) + tl.program_id(0), tl.sum(sum_alpha, 0))


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
