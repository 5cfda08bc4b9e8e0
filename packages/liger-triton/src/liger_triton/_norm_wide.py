# SPDX-License-Identifier: Apache-2.0
"""Norms of rows in tiles, read a second time where necessary, because registers hold such rows badly or not at all."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton._norm import read, store_sums, sum_columns, summands
from liger_triton.launch import VECTOR, Launcher, cdiv

TILE = 4096
# The partial rows of column sums, and the rows and columns of their tiles.
PARTS, SUM_ROWS, SUM_TILE = 16, 8, 512


def forward_tile(width: int, centered: bool) -> tuple[int, int]:
    """Return the columns and warps of a tile: the longest tile, up to 4096, that fills the row at least twice.

    Centered rows of 6144 columns reach .86 of copy bandwidth with 4 warps, .82 with 8.
    """
    for tile, warps in ((4096, 16), (2048, 4 if centered else 8), (1024, 4)):
        if width % tile == 0 and width >= 2 * tile:
            return tile, warps
    return TILE, 16


def forward_options(width: int, centered: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of forward_launch, which runs one program per row."""
    tile, warps = forward_tile(width, centered)
    return {"EVEN": width % tile == 0, "BLOCK": tile, "VECTOR": VECTOR, "num_warps": warps}


def backward(
    rows: int, grad_y: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None,
    inverse: Tensor, grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, grad_stride: int,
    summed_stride: int, x_stride: int, width: int, offset: float,
) -> None:  # fmt: skip
    """Launch one program per row for grad_x, then column tiles for grad_weight and grad_bias."""
    if grad_x is not None:
        backward_launch(
            (rows,), grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_stride, summed_stride, x_stride, width,
            offset, BLOCK=TILE, num_warps=8,
        )  # fmt: skip
    sums = (grad_weight is not None) + (grad_bias is not None)
    if not sums:
        return
    programs = min(rows, PARTS)
    partials = x.new_empty((sums, programs, width), dtype=torch.float32)
    sum_launch(
        (cdiv(width, SUM_TILE), programs), grad_y, x, mean, inverse, grad_weight, grad_bias, partials, grad_stride,
        x_stride, rows, width, ROWS=SUM_ROWS, BLOCK=SUM_TILE,
    )  # fmt: skip
    sum_columns(partials, grad_weight, grad_bias)


@triton.jit
def summand(x, residual, column, mask, POLICY: tl.constexpr, DTYPE: tl.constexpr):
    """Load a tile of the row that is normalized: x, or x + residual rounded."""
    value = read(x + column, mask, POLICY)
    if residual is not None:
        value = (value + read(residual + column, mask, POLICY)).to(DTYPE).to(tl.float32)
    return value


@triton.jit
def wide_forward_kernel(
    x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride, width, eps, offset,
    CAST_INPUT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program normalizes one row in two passes over its tiles, the second one from the L2 cache.

    EVEN: tiles fill the row, so no lane is masked. For the variance, a thread takes the mean of VECTOR neighbors and
    their squared deviations at a time, and merges both into its running values.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = y.dtype.element_ty
    x += row * x_stride
    if residual is not None:
        residual += row * residual_stride
    if mean is None:
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + lane
            value = summand(x, residual, column, None if EVEN else column < width, "evict_last", DTYPE)
            squares += value * value
        square = tl.sum(squares, 0)
    else:
        group = tl.arange(0, BLOCK // VECTOR)
        near = group[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        average = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
        squares = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
        # The number of values so far: the same for every thread if no lane is masked.
        seen = 0.0 if EVEN else tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + near
            mask = None if EVEN else column < width
            value = summand(x, residual, column, mask, "evict_last", DTYPE)
            count = 1.0 * VECTOR if EVEN else tl.sum((column < width).to(tl.float32), 1)
            near_mean = tl.sum(value, 1) / (count if EVEN else tl.maximum(count, 1.0))
            deviation = value - near_mean[:, None]
            if not EVEN:
                deviation = tl.where(mask, deviation, 0.0)
            share = count / (seen + count if EVEN else tl.maximum(seen + count, 1.0))
            step = near_mean - average
            average += step * share
            # In this order, nothing overflows if there are no values yet.
            squares += tl.sum(deviation * deviation, 1) + step * (step * (share * seen))
            seen += count
        total = tl.div_rn(tl.sum(average * seen, 0), 1.0 * width)
        tl.store(mean + row, total)
        average = average - total
        square = tl.sum(squares + average * average * seen, 0)
    scale = tl.rsqrt(square / width + eps)
    tl.store(inverse + row, scale)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = None if EVEN else column < width
        value = summand(x, residual, column, mask, "evict_first", DTYPE)
        if residual is not None:
            tl.store(summed + row * width + column, value.to(DTYPE), mask=mask)
        if mean is not None:
            value = value - total
        value = value * scale
        if CAST_INPUT:
            value = value.to(DTYPE).to(tl.float32)
        if weight is not None:
            value = value * (read(weight + column, mask, "evict_last") + offset)
        if bias is not None:
            value = value + read(bias + column, mask, "evict_last")
        tl.store(y + row * width + column, value.to(DTYPE), mask=mask, eviction_policy="evict_first")


@triton.jit
def wide_backward_kernel(
    grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_stride, summed_stride, x_stride, width, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes grad_x of one row in two passes over its tiles."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    scale = tl.load(inverse + row)
    average = 0.0
    if mean is not None:
        average = tl.load(mean + row)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = column < width
        grad = tl.load(grad_y + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) - average) * scale
        if weight is not None:
            grad = grad * (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)
        products += grad * value
        sums += grad
    product = tl.sum(products, 0) / width
    shift = 0.0
    if mean is not None:
        shift = tl.sum(sums, 0) / width
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = column < width
        grad = tl.load(grad_y + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) - average) * scale
        if weight is not None:
            grad = grad * (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)
        result = (grad - shift - value * product) * scale
        if grad_summed is not None:
            result += tl.load(grad_summed + row * summed_stride + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + row * width + column, result.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def wide_sum_kernel(
    grad_y, x, mean, inverse, grad_weight, grad_bias, partials, grad_stride, x_stride, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (c, p) adds every programs-th group of ROWS rows of column tile c, from the p-th, to partial row p."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.program_id(1)
    sum_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        product, grad = summands(grad_y, x, mean, inverse, grad_stride, x_stride, row, column, rows, width)
        sum_weight += product
        sum_bias += grad
    store_sums(
        tl.sum(sum_weight, 0), tl.sum(sum_bias, 0), partials, grad_weight, grad_bias, program, tl.num_programs(1),
        column, width,
    )  # fmt: skip


forward_launch = Launcher(wide_forward_kernel)
backward_launch = Launcher(wide_backward_kernel)
sum_launch = Launcher(wide_sum_kernel)
