# SPDX-License-Identifier: Apache-2.0
"""lora_linear in Triton: core's cuBLAS matmuls of the layer, and one pass over x or the upstream gradient for each that
meets the adapter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.ops._low_rank import TORCH_PASSES, RankPasses
from liger_core.ops.lora_linear import lora_linear as composed
from liger_triton.launch import Launcher, TritonKernel, cdiv, contiguous, power_of_two, processors, rows_of, supported

# Tensor cores multiply at least 16 columns; wider adapters are matmuls like any other.
LEAST_RANK, MOST_RANK = 16, 64
# Rows and columns of a tile; with few rows, smaller tiles fill the device. One H200, 32768 × 4096: .084 ms, 64 × 128
# takes .102.
PROJECT_ROWS, PROJECT_COLUMNS = 128, 64
REDUCE_ROWS, REDUCE_COLUMNS = 64, 64
# A tile of what a layer and its adapter give together.
COMBINE_ROWS, COMBINE_COLUMNS, COMBINE_INNER = 128, 128, 64
# A tile of a sum over rows of products.
DOT_ROWS, DOT_COLUMNS = 32, 128
# Elements of an adapter that one program splits.
RIGHT_BLOCK = 1024
# Programs of a sum over rows per multiprocessor: enough to fill the device, few enough that their partial sums are
# small.
SUM_PROGRAMS = 4


def _takes(rows: Tensor, adapter: torch.dtype, rank: int) -> bool:
    """A kernel multiplies bfloat16 rows; other dtypes have no second half, and few bits to lose."""
    return (
        rows.dtype == torch.bfloat16
        and adapter in (torch.bfloat16, torch.float32)
        and 0 < rank <= MOST_RANK
        and rows.numel() > 0
    )


def project(rows: Tensor, matrix: Tensor, scale: float, out: Tensor) -> None:
    rank, width = matrix.shape
    if not _takes(rows, matrix.dtype, rank):
        TORCH_PASSES.project(rows, matrix, scale, out)
        return
    rows = rows_of(rows)
    count = rows.shape[0]
    tile = PROJECT_ROWS if count >= PROJECT_ROWS * processors(rows.device) else PROJECT_ROWS // 2
    project_launch(
        (cdiv(count, tile),), rows, matrix, out, rows.stride(0), *matrix.stride(), out.stride(0), count, width, rank,
        scale,
        SPLIT=matrix.dtype == torch.float32, ROWS=tile, COLUMNS=PROJECT_COLUMNS,
        RANK=max(LEAST_RANK, power_of_two(rank)),
        num_warps=4, num_stages=4,
    )  # fmt: skip


def reduce(left: Tensor, rows: Tensor, out: Tensor) -> None:
    rank, width = out.shape
    if not _takes(rows, left.dtype, rank) or left.dtype != rows.dtype:
        TORCH_PASSES.reduce(left, rows, out)
        return
    rows, count = rows_of(rows), rows.shape[0]
    tiles, blocks = cdiv(width, REDUCE_COLUMNS), cdiv(count, REDUCE_ROWS)
    parts = min(blocks, cdiv(SUM_PROGRAMS * processors(rows.device), tiles))
    length = cdiv(blocks, parts) * REDUCE_ROWS
    parts = cdiv(count, length)
    sums = torch.empty(parts, width, rank, dtype=torch.float32, device=rows.device)
    reduce_launch(
        (tiles, parts), left, rows, sums, left.stride(0), rows.stride(0), count, length, width, rank, 1.0,
        SPLIT=left.shape[1] > rank, ROWS=REDUCE_ROWS, COLUMNS=REDUCE_COLUMNS, RANK=max(LEAST_RANK, power_of_two(rank)),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if out.dtype == torch.float32:
        torch.sum(sums, 0, out=out.t())
    else:
        out.t().copy_(sums.sum(0))


def combine(base: Tensor, columns: Tensor, bias: Tensor | None, left: Tensor, right: Tensor, out: Tensor) -> None:
    count, width = out.shape
    if (
        not (left.dtype == right.dtype == out.dtype == torch.bfloat16)
        or left.shape[1] > 4 * MOST_RANK
        or not out.numel()
    ):
        TORCH_PASSES.combine(base, columns, bias, left, right, out)
        return
    base, inner = rows_of(base), left.shape[1]
    columns, bias = columns.contiguous(), contiguous(bias)
    combine_launch(
        (cdiv(count, COMBINE_ROWS), cdiv(width, COMBINE_COLUMNS)), base, columns, bias, left, right, out,
        base.stride(0), left.stride(0), *right.stride(), out.stride(0), count, width, inner,
        HAS_BIAS=bias is not None, ROWS=COMBINE_ROWS, COLUMNS=COMBINE_COLUMNS, INNER=COMBINE_INNER, num_warps=8,
        num_stages=2,
    )  # fmt: skip


def dot(rows: Tensor, other: Tensor, out: Tensor) -> None:
    count, width = rows.shape
    if out.dtype != torch.float32 or not rows.numel():
        TORCH_PASSES.dot(rows, other, out)
        return
    rows, other = rows_of(rows), rows_of(other)
    tiles, blocks = cdiv(width, DOT_COLUMNS), cdiv(count, DOT_ROWS)
    length = cdiv(blocks, min(blocks, cdiv(SUM_PROGRAMS * processors(rows.device), tiles))) * DOT_ROWS
    parts = cdiv(count, length)
    sums = torch.empty(parts, width, dtype=torch.float32, device=rows.device)
    dot_launch(
        (tiles, parts), rows, other, sums, rows.stride(0), other.stride(0), count, length, width,
        ROWS=DOT_ROWS, COLUMNS=DOT_COLUMNS, num_warps=4,
    )  # fmt: skip
    torch.sum(sums, 0, out=out)


def right_factor(matrix: Tensor, rows: torch.dtype) -> Tensor:
    if rows != torch.bfloat16 or matrix.dtype != torch.float32:
        return TORCH_PASSES.right(matrix, rows)
    columns, rank = matrix.shape
    out = torch.empty(columns, 4 * rank, dtype=rows, device=matrix.device)
    if out.numel():
        right_launch(
            (cdiv(columns * rank, RIGHT_BLOCK),),
            matrix,
            out,
            *matrix.stride(),
            columns * rank,
            rank,
            BLOCK=RIGHT_BLOCK,
            num_warps=4,
        )
    return out


@triton.jit
def right_kernel(matrix, out, column_stride, rank_stride, size, rank, BLOCK: tl.constexpr):
    """Every element as its high third in three places, and its middle third behind them."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    column, r = (index // rank).to(tl.int64), index % rank
    value = tl.load(matrix + column * column_stride + r * rank_stride, mask=mask, other=0.0)
    high = value.to(out.dtype.element_ty)
    target = out + column * (4 * rank) + r
    tl.store(target, high, mask=mask)
    tl.store(target + rank, high, mask=mask)
    tl.store(target + 2 * rank, high, mask=mask)
    tl.store(target + 3 * rank, (value - high.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def project_kernel(
    rows, matrix, out, row_stride, rank_stride, column_stride, out_stride, count, width, rank, scale,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program multiplies a block of rows by the whole matrix, and writes the high, middle, low and again the high
    third of the result.

    Tensor cores cut off what they add (3e-5 after 14336 columns), so each tile is summed apart and added to the total
    with rounding; the factor between the two keeps the compiler from joining them.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, r = tl.arange(0, COLUMNS), tl.arange(0, RANK)
    total = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        inside = start + column < width
        mask = (row < count)[:, None] & inside[None, :]
        value = tl.load(rows + row[:, None] * row_stride + (start + column)[None, :], mask=mask, other=0.0)
        offset = (start + column).to(tl.int64)[:, None] * column_stride + r[None, :] * rank_stride
        factor = tl.load(matrix + offset, mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        high = factor.to(value.dtype)
        if SPLIT:
            rest = factor - high.to(tl.float32)
            middle = rest.to(value.dtype)
            product = tl.dot(value, (rest - middle.to(tl.float32)).to(value.dtype))
            product = tl.dot(value, high, tl.dot(value, middle, product))
        else:
            product = tl.dot(value, high)
        total += product * scale
    high = total.to(out.dtype.element_ty)
    target = out + row[:, None] * out_stride + r[None, :]
    mask = (row < count)[:, None] & (r < rank)[None, :]
    tl.store(target, high, mask=mask)
    if SPLIT:
        rest = total - high.to(tl.float32)
        middle = rest.to(out.dtype.element_ty)
        tl.store(target + rank, middle, mask=mask)
        tl.store(target + 2 * rank, (rest - middle.to(tl.float32)).to(out.dtype.element_ty), mask=mask)
        tl.store(target + 3 * rank, high, mask=mask)


@triton.jit
def reduce_kernel(
    left, rows, sums, left_stride, row_stride, count, length, width, rank, unit,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program sums rowsᵀ @ left over `length` rows for a block of columns, tile by tile as in project_kernel;
    `unit` is 1."""
    column, r = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    first = tl.program_id(1).to(tl.int64) * length
    total = tl.zeros((COLUMNS, RANK), dtype=tl.float32)
    for start in range(0, length, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = row < count
        mask = inside[:, None] & (column < width)[None, :]
        value = tl.trans(tl.load(rows + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0))
        source = left + row[:, None] * left_stride + r[None, :]
        mask = inside[:, None] & (r < rank)[None, :]
        high = tl.load(source, mask=mask, other=0.0)
        if SPLIT:
            product = tl.dot(value, tl.load(source + 2 * rank, mask=mask, other=0.0))
            product = tl.dot(value, tl.load(source + rank, mask=mask, other=0.0), product)
            product = tl.dot(value, high, product)
        else:
            product = tl.dot(value, high)
        total += product * unit
    offset = (tl.program_id(1).to(tl.int64) * width + column)[:, None] * rank + r[None, :]
    tl.store(sums + offset, total, mask=(column < width)[:, None] & (r < rank)[None, :])


@triton.jit
def combine_kernel(
    base, columns, bias, left, right, out, base_stride, left_stride, right_inner_stride, right_stride, out_stride,
    count, width, inner,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, INNER):
        inside = start + k < inner
        a = tl.load(
            left + row[:, None] * left_stride + (start + k)[None, :],
            mask=(row < count)[:, None] & inside[None, :],
            other=0.0,
        )
        offset = (start + k)[:, None] * right_inner_stride + column[None, :] * right_stride
        total = tl.dot(a, tl.load(right + offset, mask=inside[:, None] & (column < width)[None, :], other=0.0), total)
    mask = (row < count)[:, None] & (column < width)[None, :]
    value = tl.load(base + row[:, None] * base_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    total += value * tl.load(columns + column, mask=column < width, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_stride + column[None, :], total, mask=mask)


@triton.jit
def dot_kernel(
    rows, other, sums, row_stride, other_stride, count, length, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program sums rows · other over `length` rows for a block of columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * length
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, length, ROWS):
        row = first + start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < width)[None, :]
        a = tl.load(rows + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0)
        b = tl.load(other + row[:, None] * other_stride + column[None, :], mask=mask, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    tl.store(sums + tl.program_id(1).to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)


right_launch = Launcher(right_kernel)
project_launch = Launcher(project_kernel)
reduce_launch = Launcher(reduce_kernel)
combine_launch = Launcher(combine_kernel)
dot_launch = Launcher(dot_kernel)
PASSES = RankPasses(project, reduce, right_factor, combine, dot)
lora_linear = composed.implementation(PASSES, TritonKernel, supported)
