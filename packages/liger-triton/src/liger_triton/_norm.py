# SPDX-License-Identifier: Apache-2.0
"""The kernels of rms_norm, add_rms_norm and layer_norm: the same rows, summed with a residual or not, centred or not."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton import _norm_wide
from liger_triton.launch import Launcher, cdiv, power_of_two, processors, rows_of

# Wider rows are walked in tiles: past this, one row in float32 no longer fits the registers of a program beside its gradient.
WIDEST_BLOCK = 16384


class Shape(NamedTuple):
    """How a launch covers (rows, width): block of columns, rows per program, warps, pipeline stages, programs per processor."""

    block: int
    rows: int
    warps: int
    stages: int = 1
    programs: int = 0


# Share of copy bandwidth on one H200 (bf16, kernels alone) for the shapes below and their neighbours in rows, warps, stages and grid.


@cache
def forward_shape(width: int, centred: bool) -> Shape:
    """Two rows a program up to 8192 columns: .85 at 1024, .95 at 4096 and 8192 (one row: .83, .94, .94); one row on 32 warps at 16384."""
    block = power_of_two(width)
    if block <= 2048:
        rows = max(2, min(64, 2048 // block))
        return Shape(block, rows, 4)
    if block <= 8192:
        return Shape(block, 1 if centred and block == 8192 else 2, 8)
    return Shape(block, 1, 16 if centred else 32)


@cache
def backward_shape(width: int) -> Shape:
    """Loads of the next rows overlap the current ones (3 stages): .75 at 1024 (1 stage .66), .91 at 4096, .93 at 8192; 16384 spills with more than 1."""
    block = power_of_two(width)
    if block <= 2048:
        return Shape(block, max(1, min(32, 4096 // block)), 4, 3, 2)
    if block <= 4096:
        return Shape(block, 1, 8, 3, 2)
    if block <= 8192:
        return Shape(block, 1, 8, 3, 1)
    return Shape(block, 1, 16, 1, 1)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    summed: Tensor | None, y: Tensor, mean: Tensor | None, inverse: Tensor, eps: float, offset: float, cast_input: bool,
) -> None:  # fmt: skip
    """Launch the forward pass. With a residual, x + residual goes to summed and is what is normalised; mean is None for rms_norm."""
    x = rows_of(x)
    count, width = x.shape
    if count == 0:
        return
    residual = None if residual is None else rows_of(residual)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    args = (x, residual, weight, bias, summed, y, mean, inverse, *strides)
    if width > WIDEST_BLOCK:
        _norm_wide.forward(count, *args, width, eps, offset, cast_input)
        return
    shape = forward_shape(width, mean is not None)
    grid = (cdiv(count, shape.rows),)
    forward_launch(grid, *args, count, width, eps, offset, CAST_INPUT=cast_input, ROWS=shape.rows, BLOCK=shape.block, num_warps=shape.warps)


def backward(
    grad_y: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, inverse: Tensor, offset: float,
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
) -> None:  # fmt: skip
    """Launch the backward pass: grad_x row by row, and float32 partial sums of grad_weight and grad_bias that a second kernel adds.

    x is what was normalised; grad_summed is what else arrives at it.
    """
    x, grad_y = rows_of(x), rows_of(grad_y)
    count, width = x.shape
    if count == 0:
        for grad in (grad_weight, grad_bias):
            if grad is not None:
                grad.zero_()
        return
    grad_summed = None if grad_summed is None else rows_of(grad_summed)
    weight = None if weight is None else weight.contiguous()
    wide = width > WIDEST_BLOCK
    sums = grad_weight is not None or grad_bias is not None
    args = (grad_y, grad_summed, x, weight, mean, inverse)
    strides = (grad_y.stride(0), 0 if grad_summed is None else grad_summed.stride(0), x.stride(0))
    shape = backward_shape(min(width, WIDEST_BLOCK))
    groups = cdiv(count, 1 if wide else shape.rows)
    programs = min(groups, _norm_wide.PARTS) if wide else min(groups, shape.programs * processors(x.device)) if sums else groups
    part_weight, part_bias = (None if g is None else x.new_empty(programs, width, dtype=torch.float32) for g in (grad_weight, grad_bias))
    if wide:
        _norm_wide.backward(count, *args, grad_x, part_weight, part_bias, *strides, width, offset, programs)
    else:
        backward_launch(
            (programs,), *args, grad_x, part_weight, part_bias, *strides, count, width, offset,
            ROWS=shape.rows, BLOCK=shape.block, STAGES=shape.stages, num_warps=shape.warps,
        )  # fmt: skip
    for part, grad in ((part_weight, grad_weight), (part_bias, grad_bias)):
        if part is not None and grad is not None:
            # Narrow strips fill the device at usual widths (8 µs against 13 with 64 columns, 264 rows); wide rows have strips enough.
            strip = 256 if wide else 16
            column_sum_launch((cdiv(width, strip),), part, grad, programs, width, ROWS=16 if wide else 128, BLOCK=strip)


@triton.jit
def forward_kernel(
    x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride, rows, width, eps, offset,
    CAST_INPUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program normalises ROWS rows, each in one block of columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_mask = row < rows
    mask = row_mask[:, None] & (column < width)[None, :]
    out = row[:, None] * width + column[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        # What is normalised is the sum that the next layer sees, rounded.
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + out, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if mean is not None:
        average = tl.sum(value, 1) / width
        tl.store(mean + row, average, mask=row_mask)
        value = tl.where(mask, value - average[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(inverse + row, scale, mask=row_mask)
    value = value * scale[:, None]
    if CAST_INPUT:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    if weight is not None:
        value = value * (tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset)[None, :]
    if bias is not None:
        value = value + tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y + out, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, grad_summed, x, weight, mean, inverse, grad_x, part_weight, part_bias, grad_stride, summed_stride, x_stride, rows, width, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p walks the row groups p, p + programs, … and writes partial row p.

    With n = (x - mean) · inverse and g = grad_y · weight:  grad_x = inverse · (g - mean(g) - n · mean(g · n)) + grad_summed,
    without mean(g) if not centred.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    column_mask = column < width
    if weight is not None:
        factor = (tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32) + offset)[None, :]
    sum_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask[None, :]
        grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row, mask=row_mask, other=0.0)[:, None]
        if mean is not None:
            value = tl.where(mask, value - tl.load(mean + row, mask=row_mask, other=0.0)[:, None], 0.0)
        value = value * scale
        if part_weight is not None:
            sum_weight += tl.sum(grad * value, 0)
        if part_bias is not None:
            sum_bias += tl.sum(grad, 0)
        if grad_x is not None:
            if weight is not None:
                grad = grad * factor
            result = grad - value * (tl.sum(grad * value, 1) / width)[:, None]
            if mean is not None:
                result = result - (tl.sum(grad, 1) / width)[:, None]
            result = result * scale
            if grad_summed is not None:
                result += tl.load(grad_summed + row[:, None] * summed_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
    if part_weight is not None:
        tl.store(part_weight + program.to(tl.int64) * width + column, sum_weight, mask=column_mask)
    if part_bias is not None:
        tl.store(part_bias + program.to(tl.int64) * width + column, sum_bias, mask=column_mask)


@triton.jit
def column_sum_kernel(part, total, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds all partial rows of BLOCK columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column < width
    accumulated = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        accumulated += tl.load(
            part + row.to(tl.int64)[:, None] * width + column[None, :], mask=(row < count)[:, None] & column_mask[None, :], other=0.0
        )
    tl.store(total + column, tl.sum(accumulated, 0).to(total.dtype.element_ty), mask=column_mask)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
column_sum_launch = Launcher(column_sum_kernel)
