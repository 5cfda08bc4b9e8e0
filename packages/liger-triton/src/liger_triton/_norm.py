# SPDX-License-Identifier: Apache-2.0
"""The kernels of rms_norm and layer_norm: the same rows, centred or not."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton.launch import Launcher, cdiv, power_of_two, processors, rows_of

# Wider rows are walked in tiles: past this, one row in float32 no longer fits the registers of a program beside its gradient.
WIDEST_BLOCK = 16384
TILE = 4096


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
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    mean: Tensor | None,
    inverse: Tensor,
    eps: float,
    offset: float,
    cast_input: bool,
) -> None:
    """Launch the forward pass; mean is None for rms_norm."""
    x = rows_of(x)
    count, width = x.shape
    if count == 0:
        return
    centred = mean is not None
    flags = {"CENTRED": centred, "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "CAST_INPUT": cast_input}
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    args = (x, weight, bias, y, mean, inverse, x.stride(0))
    if width > WIDEST_BLOCK:
        wide_forward_launch((count,), *args, width, eps, offset, **flags, BLOCK=TILE, num_warps=8)
        return
    shape = forward_shape(width, centred)
    grid = (cdiv(count, shape.rows),)
    forward_launch(grid, *args, count, width, eps, offset, **flags, ROWS=shape.rows, BLOCK=shape.block, num_warps=shape.warps)


def backward(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, inverse: Tensor, offset: float,
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
) -> None:  # fmt: skip
    """Launch the backward pass: grad_x row by row, and float32 partial sums of grad_weight and grad_bias that a second kernel adds."""
    x, grad_y = rows_of(x), rows_of(grad_y)
    count, width = x.shape
    if count == 0:
        for grad in (grad_weight, grad_bias):
            if grad is not None:
                grad.zero_()
        return
    weight = None if weight is None else weight.contiguous()
    wide = width > WIDEST_BLOCK
    shape = backward_shape(TILE if wide else width)
    sums = grad_weight is not None or grad_bias is not None
    groups = cdiv(count, 1 if wide else shape.rows)
    grid = min(groups, 16) if wide else min(groups, shape.programs * processors(x.device)) if sums else groups
    part_weight, part_bias = (None if g is None else x.new_empty(grid, width, dtype=torch.float32) for g in (grad_weight, grad_bias))
    flags = {"CENTRED": mean is not None, "HAS_WEIGHT": weight is not None}
    args = (grad_y, x, weight, mean, inverse)
    strides = (grad_y.stride(0), x.stride(0))
    needs = {"NEEDS_WEIGHT": grad_weight is not None, "NEEDS_BIAS": grad_bias is not None}
    if wide:
        if grad_x is not None:
            wide_backward_launch((count,), *args, grad_x, *strides, width, offset, **flags, BLOCK=TILE, num_warps=8)
        if sums:
            tiles = (cdiv(width, 512), grid)
            wide_partial_launch(
                tiles,
                grad_y,
                x,
                mean,
                inverse,
                part_weight,
                part_bias,
                *strides,
                count,
                width,
                CENTRED=flags["CENTRED"],
                **needs,
                ROWS=8,
                BLOCK=512,
            )
    else:
        backward_launch(
            (grid,), *args, grad_x, part_weight, part_bias, *strides, count, width, offset,
            **flags, **needs, NEEDS_X=grad_x is not None, ROWS=shape.rows, BLOCK=shape.block, STAGES=shape.stages, num_warps=shape.warps,
        )  # fmt: skip
    for part, grad in ((part_weight, grad_weight), (part_bias, grad_bias)):
        if part is not None and grad is not None:
            # Narrow strips fill the device at usual widths (8 µs against 13 with 64 columns, 264 rows); wide rows have strips enough.
            strip = 256 if wide else 16
            column_sum_launch((cdiv(width, strip),), part, grad, grid, width, ROWS=16 if wide else 128, BLOCK=strip)


@triton.jit
def forward_kernel(
    x, weight, bias, y, mean, inverse, x_stride, rows, width, eps, offset,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CAST_INPUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program normalises ROWS rows, each in one block of columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_mask = row < rows
    mask = row_mask[:, None] & (column < width)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        average = tl.sum(value, 1) / width
        tl.store(mean + row, average, mask=row_mask)
        value = tl.where(mask, value - average[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(inverse + row, scale, mask=row_mask)
    value = value * scale[:, None]
    if CAST_INPUT:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        value = value * (tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset)[None, :]
    if HAS_BIAS:
        value = value + tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * width + column[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, weight, mean, inverse, grad_x, part_weight, part_bias, grad_stride, x_stride, rows, width, offset,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, NEEDS_BIAS: tl.constexpr, NEEDS_X: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p walks the row groups p, p + programs, … and writes partial row p.

    With n = (x - mean) · inverse and g = grad_y · weight:  grad_x = inverse · (g - mean(g) - n · mean(g · n)), without mean(g) if not centred.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    column_mask = column < width
    if HAS_WEIGHT:
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
        if CENTRED:
            value = tl.where(mask, value - tl.load(mean + row, mask=row_mask, other=0.0)[:, None], 0.0)
        value = value * scale
        if NEEDS_WEIGHT:
            sum_weight += tl.sum(grad * value, 0)
        if NEEDS_BIAS:
            sum_bias += tl.sum(grad, 0)
        if NEEDS_X:
            if HAS_WEIGHT:
                grad = grad * factor
            result = grad - value * (tl.sum(grad * value, 1) / width)[:, None]
            if CENTRED:
                result = result - (tl.sum(grad, 1) / width)[:, None]
            tl.store(grad_x + row[:, None] * width + column[None, :], (result * scale).to(grad_x.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        tl.store(part_weight + program.to(tl.int64) * width + column, sum_weight, mask=column_mask)
    if NEEDS_BIAS:
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


@triton.jit
def wide_forward_kernel(
    x, weight, bias, y, mean, inverse, x_stride, width, eps, offset,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CAST_INPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program normalises one row tile by tile; later passes over the row are served by the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    average = 0.0
    if CENTRED:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + lane
            total += tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
        average = tl.sum(total, 0) / width
        tl.store(mean + row, average)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
        value = tl.where(column < width, value - average, 0.0)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    tl.store(inverse + row, scale)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = column < width
        value = (tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) - average) * scale
        if CAST_INPUT:
            value = value.to(y.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            value = value * (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)
        if HAS_BIAS:
            value = value + tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def wide_backward_kernel(
    grad_y, x, weight, mean, inverse, grad_x, grad_stride, x_stride, width, offset,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes grad_x of one row in two passes over its tiles."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    scale = tl.load(inverse + row)
    average = 0.0
    if CENTRED:
        average = tl.load(mean + row)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = column < width
        grad = tl.load(grad_y + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) - average) * scale
        if HAS_WEIGHT:
            grad = grad * (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)
        products += grad * value
        sums += grad
    product = tl.sum(products, 0) / width
    shift = 0.0
    if CENTRED:
        shift = tl.sum(sums, 0) / width
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = column < width
        grad = tl.load(grad_y + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) - average) * scale
        if HAS_WEIGHT:
            grad = grad * (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)
        result = (grad - shift - value * product) * scale
        tl.store(grad_x + row * width + column, result.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def wide_partial_kernel(
    grad_y, x, mean, inverse, part_weight, part_bias, grad_stride, x_stride, rows, width,
    CENTRED: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, NEEDS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (c, p) sums every programs-th group of ROWS rows, from the p-th on, of column tile c into partial row p."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    sum_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = row < rows
        tile = row_mask[:, None] & mask[None, :]
        grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=tile, other=0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=tile, other=0.0).to(tl.float32)
        if CENTRED:
            value = value - tl.load(mean + row, mask=row_mask, other=0.0)[:, None]
        sum_weight += tl.sum(grad * value * tl.load(inverse + row, mask=row_mask, other=0.0)[:, None], 0)
        sum_bias += tl.sum(grad, 0)
    if NEEDS_WEIGHT:
        tl.store(part_weight + tl.program_id(1).to(tl.int64) * width + column, sum_weight, mask=mask)
    if NEEDS_BIAS:
        tl.store(part_bias + tl.program_id(1).to(tl.int64) * width + column, sum_bias, mask=mask)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
column_sum_launch = Launcher(column_sum_kernel)
wide_forward_launch = Launcher(wide_forward_kernel)
wide_backward_launch = Launcher(wide_backward_kernel)
wide_partial_launch = Launcher(wide_partial_kernel)
