# SPDX-License-Identifier: Apache-2.0
"""Matmuls of groups of rows: torch's grouped matmul on the GPUs that it is made for, elsewhere two Triton kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from liger_core.private_torch import grouped_mm
from liger_triton.launch import Launcher, cdiv, power_of_two, shared_memory

# Tiles of rows and columns, and what a program multiplies at a time. 16-bit operands go through tensor cores; float32
# is multiplied exactly. On an H200, 262 144 rows of 2048 by 128 matrices of 1536 columns: 624 TFLOP/s with the first
# tiles, 571 with the second; sums 565 and 459.
LARGE = {"ROWS": 128, "COLUMNS": 256, "INNER": 64, "num_warps": 8, "num_stages": 3}
MEDIUM = {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
SMALL = {"ROWS": 64, "COLUMNS": 64, "INNER": 32, "num_warps": 4, "num_stages": 2}
# Bytes of shared memory that the first tiles take: of three stages, in 16 bits.
LARGE_BYTES = 3 * 2 * 64 * (128 + 256)


def grouped_matmul(
    rows: Tensor, matrices: Tensor, ends: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """rows (n, inner) @ matrices (groups, inner, columns), each group of rows with its own; rows behind the last end
    are not written.

    dtype  of the result; that of rows by default
    onto   what the matmul adds to, before it rounds, and returns: (n, columns), dense
    """
    if onto is None and dtype in (None, rows.dtype) and _in_torch(rows, matrices):
        return _torch_grouped_mm(rows, matrices, ends)
    count, inner = rows.shape
    groups, _, columns = matrices.shape
    out = rows.new_empty(count, columns, dtype=dtype) if onto is None else onto
    if out.numel():
        tiles = _tiles(rows, columns)
        # As many tiles of rows as there can be; those that no group needs end at once.
        grid = ((cdiv(count, tiles["ROWS"]) + groups) * cdiv(columns, tiles["COLUMNS"]),)
        rows_launch(
            grid, rows, matrices, ends, out, *rows.stride(), *matrices.stride(), groups, columns, inner,
            GROUPS=power_of_two(groups), EXACT=_exact(rows), ADDS=onto is not None, **tiles,
        )  # fmt: skip
    return out


def grouped_sum(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """For each group of rows, left (n, outer)ᵀ @ right (n, columns): (groups, outer, columns); 0 where a group has no
    rows."""
    if _in_torch(left, right):
        return _torch_grouped_mm(left.t(), right, ends)
    outer, columns, groups = left.shape[1], right.shape[1], ends.shape[0]
    out = left.new_empty(groups, outer, columns)
    if out.numel():
        tiles = _tiles(left, columns)
        grid = (groups * cdiv(outer, tiles["ROWS"]) * cdiv(columns, tiles["COLUMNS"]),)
        sum_launch(
            grid, left, right, ends, out, *left.stride(), *right.stride(), outer, columns,
            EXACT=_exact(left), **tiles,
        )  # fmt: skip
    return out


def _tiles(x: Tensor, columns: int) -> dict[str, int]:
    """Few kinds, since each is compiled."""
    if x.itemsize != 2 or columns <= SMALL["COLUMNS"]:
        return SMALL
    return LARGE if shared_memory(x.device) >= LARGE_BYTES else MEDIUM


def _in_torch(first: Tensor, second: Tensor) -> bool:
    """Whether torch multiplies these without waiting for the device: bfloat16 on Hopper and later, with rows at
    multiples of 16 bytes."""
    if not first.is_cuda or first.dtype != torch.bfloat16 or not first.numel() or not _has_kernels(first.device):
        return False
    return all(_aligned(t) for t in (first, second))


@cache
def _has_kernels(device: torch.device) -> bool:
    return grouped_mm is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def _aligned(x: Tensor) -> bool:
    """Matrices with adjacent rows or columns.

    Sizes are whole vectors, too: torch pads the rows of a result whose columns are not.
    """
    (height, width), (down, right) = x.shape[-2:], x.stride()[-2:]
    packed = (right == 1 and down >= width) or (down == 1 and right >= height)
    sizes = (*x.shape[1:], *(stride for stride in x.stride() if stride != 1))
    return packed and all(size * x.itemsize % 16 == 0 for size in sizes) and x.data_ptr() % 16 == 0


def _torch_grouped_mm(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    result: Tensor = grouped_mm(first, second, offs=ends)
    return result


def _exact(x: Tensor) -> bool:
    """Whether to multiply in float32. The interpreter of Triton 3.6 multiplies the bits of bfloat16 as integers."""
    return x.dtype == torch.float32 or bool(knobs.runtime.interpret)


@triton.jit
def multiplied(a, b, total, EXACT: tl.constexpr):
    """total + a @ b."""
    if EXACT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def rows_kernel(
    rows, matrices, ends, out, row_stride, inner_stride, matrix_stride, matrix_inner, matrix_column, groups, columns,
    inner,
    GROUPS: tl.constexpr, EXACT: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of the result of one group, which it finds among the ends of all of them."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // column_tiles
    lane = tl.arange(0, GROUPS)
    end = tl.load(ends + lane, mask=lane < groups, other=0)
    start = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < groups), other=0)
    tiles = tl.where(lane < groups, (end - start + ROWS - 1) // ROWS, 0)
    behind = tl.cumsum(tiles, 0)
    group = tl.sum((behind <= tile).to(tl.int32), 0)
    if group < groups:
        mine = lane == group
        first = tl.sum(tl.where(mine, start + (tile - behind + tiles) * ROWS, 0), 0)
        last = tl.sum(tl.where(mine, end, 0), 0)
        row = first + tl.arange(0, ROWS)
        column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        step = tl.arange(0, INNER)
        row_mask = (row < last)[:, None]
        column_mask = (column < columns)[None, :]
        left = rows + row.to(tl.int64)[:, None] * row_stride
        right = matrices + group.to(tl.int64) * matrix_stride + column.to(tl.int64)[None, :] * matrix_column
        target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if ADDS:
            total += tl.load(target, mask=row_mask & column_mask, other=0.0).to(tl.float32)
        for begin in range(0, inner, INNER):
            at = begin + step
            a = tl.load(left + at[None, :] * inner_stride, mask=row_mask & (at < inner)[None, :], other=0.0)
            b = tl.load(
                right + at.to(tl.int64)[:, None] * matrix_inner, mask=(at < inner)[:, None] & column_mask, other=0.0
            )
            total = multiplied(a, b, total, EXACT)
        tl.store(target, total.to(out.dtype.element_ty), mask=row_mask & column_mask)


@triton.jit
def sum_kernel(
    left, right, ends, out, left_row, left_column, right_row, right_column, outer, columns,
    EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of leftᵀ @ right of one group."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(outer, ROWS) * column_tiles
    group = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, INNER)
    row_mask = (row < outer)[:, None]
    column_mask = (column < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(start, end, INNER):
        at = begin + step
        inside = at < end
        at = at.to(tl.int64)
        a = tl.load(
            left + at[None, :] * left_row + row[:, None] * left_column, mask=row_mask & inside[None, :], other=0.0
        )
        b = tl.load(
            right + at[:, None] * right_row + column[None, :] * right_column,
            mask=inside[:, None] & column_mask,
            other=0.0,
        )
        total = multiplied(a, b, total, EXACT)
    target = out + (group.to(tl.int64) * outer + row[:, None]) * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask & column_mask)


rows_launch: Any = Launcher(rows_kernel)
sum_launch: Any = Launcher(sum_kernel)
