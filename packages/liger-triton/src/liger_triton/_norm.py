# SPDX-License-Identifier: Apache-2.0
"""The kernels of rms_norm, add_rms_norm and layer_norm: rows, with a residual or without, centered or not."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton import _norm_chunks, _norm_wide
from liger_triton._chunks import stages_of
from liger_triton._norm_sum import DIRECT_ROWS, STRIP, add_columns, read, store_sums, sum_columns, zero
from liger_triton.launch import Launcher, cdiv, contiguous, fuses, power_of_two, processors, strided_rows

# Wider rows are processed in tiles: beyond this, a row in float32 and its gradient no longer fit in the registers of a
# program.
WIDEST_BLOCK = 16384
# Rows up to this width share a program backward; of few rows, up to 2048 columns.
SHORT = 512


class Shape(NamedTuple):
    """How a launch covers (rows, width): block of columns, rows per program, warps."""

    block: int
    rows: int
    warps: int


# Share of copy bandwidth on one H200 (bf16, kernels alone) for the shapes below and their neighbors in rows, warps,
# stages and grid.


@cache
def forward_shape(width: int, centered: bool) -> Shape:
    """Several rows per program if they are short; see `chunked` and `tiled` for the widths that are not handled here.

    rms_norm: .85 at 1024, .95 at 16384 (32 warps .94). layer_norm: .94 to .95 at 4096, .94 at 8192, .91 at 16384.
    Masked lanes cost up to .04.
    """
    block = power_of_two(width)
    if block <= 2048:
        rows = max(2, min(64, 2048 // block))
        return Shape(block, rows, 4)
    if block <= 4096:
        return Shape(block, 2 if centered else 1, 8)
    return Shape(block, 1, 8 if block <= 8192 else 16)


def tiled(width: int, centered: bool, summed: bool) -> bool:
    """Whether a row is processed in tiles although registers would hold it.

    Rows of 4096 and 8192 columns that are not centered: .97 (in blocks .94), .96 (.95); add_rms_norm .98 (.96), .98
    (.96). Long rows that leave a quarter of a block idle, as 10240 does: rms_norm .94 (.77), layer_norm .87 (.71), but
    add_rms_norm is best in blocks there.
    """
    if width > WIDEST_BLOCK:
        return True
    block = power_of_two(width)
    if width == block:
        return 4096 <= width <= 8192 and not centered
    return 8192 < width <= 3 * block // 4 and width % 1024 == 0 and not summed


def chunked(width: int) -> bool:
    """Whether a row is processed in chunks: rms_norm .86 at 2560 columns, .93 at 5120, .92 at 6144, layer_norm .87 at
    3072, .91 at 5120 (in blocks .80, .75, .76, .79, .75).
    """
    return 2048 < width < 8192 and width != power_of_two(width)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    summed: Tensor | None, y: Tensor, mean: Tensor | None, inverse: Tensor, eps: float, offset: float, cast_input: bool,
) -> None:  # fmt: skip
    """Launch the forward pass.

    With a residual, x + residual goes to summed and is what is normalized; mean is None for rms_norm.
    """
    width = x.shape[-1]
    count = inverse.numel()
    if count == 0:
        return
    x, x_stride = strided_rows(x)
    residual, residual_stride = (None, 0) if residual is None else strided_rows(residual)
    weight, bias = contiguous(weight), contiguous(bias)
    args = (x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride)
    if chunked(width) or tiled(width, mean is not None, residual is not None):
        longer = _norm_chunks if chunked(width) else _norm_wide
        longer.forward_launch(
            (count,), *args, width, eps, offset, CAST_INPUT=cast_input,
            **longer.forward_options(width, mean is not None)
        )  # fmt: skip
        return
    shape = forward_shape(width, mean is not None)
    grid = (cdiv(count, shape.rows),)
    forward_launch(
        grid, *args, count, width, eps, offset,
        CAST_INPUT=cast_input, WHOLE=width == shape.block and count % shape.rows == 0, ROWS=shape.rows,
        BLOCK=shape.block,
        num_warps=shape.warps, enable_fp_fusion=fuses(shape.block),
    )  # fmt: skip


def backward(
    grad_y: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, inverse: Tensor,
    offset: float,
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
) -> None:  # fmt: skip
    """Launch the backward pass: grad_x row by row; grad_weight and grad_bias by float32 partial sums that a second
    kernel adds.

    x is what was normalized; grad_summed is what else arrives at it.
    """
    width = x.shape[-1]
    count = inverse.numel()
    sums = (grad_weight is not None) + (grad_bias is not None)
    if count == 0:
        zero(grad_weight, grad_bias)
        return
    x, x_stride = strided_rows(x)
    grad_y, grad_stride = strided_rows(grad_y)
    grad_summed, summed_stride = (None, 0) if grad_summed is None else strided_rows(grad_summed)
    args = (grad_y, grad_summed, x, contiguous(weight), mean, inverse, grad_x, grad_weight, grad_bias)
    direct = count <= DIRECT_ROWS
    if width > (2048 if direct else SHORT):
        # Several short rows share a program; longer ones are walked one by one, and if registers do not hold them,
        # twice.
        longer = _norm_wide if width > WIDEST_BLOCK else _norm_chunks
        longer.backward(count, *args, grad_stride, summed_stride, x_stride, width, offset)
        return
    block = power_of_two(width)
    several = max(2, min(32, 4096 // block))
    groups = cdiv(count, several)
    size = (2 if grad_summed is None else 3) * x.element_size() * several * block
    programs = groups if direct or not sums else min(groups, 2 * processors(x.device))
    part = None if direct or not sums else x.new_empty((sums, programs, width), dtype=torch.float32)
    # A product fused into its distance from the mean would leave its round-off, which inverse makes large where a row
    # is constant.
    backward_launch(
        (programs + cdiv(width, STRIP) if direct and sums else programs,), *args, part, grad_stride, summed_stride,
        x_stride, count, width,
        programs, offset, ROWS=several, BLOCK=block, STAGES=stages_of(size, x), num_warps=4,
        enable_fp_fusion=mean is None,
    )  # fmt: skip
    if part is not None:
        sum_columns(part, grad_weight, grad_bias)


@triton.jit
def forward_kernel(
    x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride, rows, width, eps, offset,
    CAST_INPUT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program normalizes ROWS rows, each in one block of columns.

    WHOLE: rows and blocks are full, so that no lane is masked.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_mask = None if WHOLE else row < rows
    column_mask = None if WHOLE else column < width
    mask = None if WHOLE else (row < rows)[:, None] & (column < width)[None, :]
    out = row[:, None] * width + column[None, :]
    value = read(x + row[:, None] * x_stride + column[None, :], mask)
    if residual is not None:
        value += read(residual + row[:, None] * residual_stride + column[None, :], mask)
        # The rounded sum is normalized: the one that the next layer sees.
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + out, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if mean is not None:
        # Correctly rounded, so that a constant row becomes exactly zero.
        average = tl.div_rn(tl.sum(value, 1), 1.0 * width)
        tl.store(mean + row, average, mask=row_mask)
        value = value - average[:, None]
        if not WHOLE:
            value = tl.where(mask, value, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(inverse + row, scale, mask=row_mask)
    value = value * scale[:, None]
    if CAST_INPUT:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    if weight is not None:
        value = value * (read(weight + column, column_mask) + offset)[None, :]
    if bias is not None:
        value = value + read(bias + column, column_mask)[None, :]
    tl.store(y + out, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_weight, grad_bias, part,
    grad_stride, summed_stride, x_stride, rows, width, programs, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p walks the groups p, p + programs, … of ROWS rows; its column sums go to row p of part, or later
    programs add columns.

    With n = (x - mean) · inverse and g = grad_y · weight:  grad_x = inverse · (g - mean(g) - n · mean(g · n)) +
                                                            grad_summed,
    without mean(g) if not centered. Masked lanes need no care while their gradient is zero.
    """
    program = tl.program_id(0)
    if part is None and program >= programs:
        add_columns(
            program - programs, grad_y, x, mean, inverse, grad_weight, grad_bias, grad_stride, x_stride, rows, width
        )
        return
    column = tl.arange(0, BLOCK)
    column_mask = column < width
    if weight is not None:
        factor = (tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32) + offset)[None, :]
    # Tiles, added up once at the end: all threads that know a sum of a column know the same bits.
    sum_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask[None, :]
        grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row, mask=row_mask, other=0.0)[:, None]
        if mean is not None:
            value = value - tl.load(mean + row, mask=row_mask, other=0.0)[:, None]
        value = value * scale
        if part is not None:
            sum_weight += grad * value
            sum_bias += grad
        if grad_x is not None:
            if weight is not None:
                grad = grad * factor
            if mean is not None:
                # Centered first: of two columns nothing but round-off would be left of a larger product.
                grad = tl.where(mask, grad - (tl.sum(grad, 1) / width)[:, None], 0.0)
            result = (grad - value * (tl.sum(grad * value, 1) / width)[:, None]) * scale
            if grad_summed is not None:
                result += tl.load(
                    grad_summed + row[:, None] * summed_stride + column[None, :], mask=mask, other=0.0
                ).to(tl.float32)
            tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
    if part is not None:
        store_sums(
            tl.sum(sum_weight, 0), tl.sum(sum_bias, 0), part, grad_weight, grad_bias, program, programs, column, width
        )


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
