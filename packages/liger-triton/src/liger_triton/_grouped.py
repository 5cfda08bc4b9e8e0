# SPDX-License-Identifier: Apache-2.0
"""Matmuls of groups of rows: torch's grouped matmul on the GPUs that it is made for, elsewhere two Triton kernels."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from liger_core.private_torch import grouped_mm
from liger_triton.launch import Launcher, cdiv, power_of_two, shared_memory

# Tiles of rows and columns, and the inner size of a step. On an H200, 262 144 rows of 2048 by 128 matrices of 1536
# columns reach 624 TFLOP/s with LARGE, 571 with MEDIUM.
LARGE = {"ROWS": 128, "COLUMNS": 256, "INNER": 64, "num_warps": 8, "num_stages": 3}
MEDIUM = {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
SMALL = {"ROWS": 64, "COLUMNS": 64, "INNER": 32, "num_warps": 4, "num_stages": 2}
# For the few inner columns of an adapter, which take one step. On one H200, adding a product of rank 16 to 131 072 rows
# of 2048 columns takes .37 ms, .51 with LARGE. Reading and writing them takes .25.
THIN, THIN_INNER = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4, "num_stages": 1}, 64
# The shared memory of the LARGE tiles: three stages in 16 bits.
LARGE_BYTES = 3 * 2 * 64 * (128 + 256)


def grouped_matmul(
    rows: Tensor, matrices: Tensor, ends: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Multiply each group of rows (n, inner) by its own matrix of (groups, inner, columns); others are not written.

    dtype  of the result; that of rows by default
    onto   the dense tensor (n, columns) to which the matmul adds before it rounds, and which is returned
    """
    if onto is None and dtype in (None, rows.dtype) and _in_torch(rows, matrices):
        return _torch_grouped_mm(rows, matrices, ends)
    count, inner = rows.shape
    groups, _, columns = matrices.shape
    out = rows.new_empty(count, columns, dtype=dtype) if onto is None else onto
    if out.numel():
        tiles = _tiles(rows, columns, inner)
        # As many tiles of rows as there can be; those that no group needs end at once.
        grid = ((cdiv(count, tiles["ROWS"]) + groups) * cdiv(columns, tiles["COLUMNS"]),)
        rows_launch(
            grid, rows, matrices, ends, out, *rows.stride(), *matrices.stride(), groups, columns, inner,
            GROUPS=power_of_two(groups), EXACT=_exact(rows), ADDS=onto is not None, **tiles,
        )  # fmt: skip
    return out


def grouped_sum(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return left (n, outer)ᵀ @ right (n, columns) of each group of rows: (groups, outer, columns)."""
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


def _tiles(x: Tensor, columns: int, inner: int | None = None) -> dict[str, int]:
    """Return one of few tile shapes, since a kernel is compiled for each."""
    if x.itemsize != 2 or columns <= SMALL["COLUMNS"]:
        return SMALL
    if inner is not None and inner <= THIN_INNER:
        return THIN | {"INNER": max(16, power_of_two(inner))}
    return LARGE if shared_memory(x.device) >= LARGE_BYTES else MEDIUM


def _in_torch(first: Tensor, second: Tensor) -> bool:
    """Whether torch multiplies these without a synchronization: aligned bfloat16 on Hopper and later."""
    if not first.is_cuda or first.dtype != torch.bfloat16 or not first.numel() or not _has_kernels(first.device):
        return False
    return all(_aligned(t) for t in (first, second))


@cache
def _has_kernels(device: torch.device) -> bool:
    return grouped_mm is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def _aligned(x: Tensor) -> bool:
    """Whether matrices have adjacent rows or columns at multiples of 16 bytes.

    Sizes must be multiples of 16 bytes, too: torch pads the rows of other results.
    """
    (height, width), (down, right) = x.shape[-2:], x.stride()[-2:]
    packed = (right == 1 and down >= width) or (down == 1 and right >= height)
    sizes = (*x.shape[1:], *(stride for stride in x.stride() if stride != 1))
    return packed and all(size * x.itemsize % 16 == 0 for size in sizes) and x.data_ptr() % 16 == 0


def _torch_grouped_mm(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm(first, second, offs=ends)


def _exact(x: Tensor) -> bool:
    """Whether to multiply in float32: for float32, and in the interpreter, which reads bfloat16 as integers (3.6)."""
    return x.dtype == torch.float32 or bool(knobs.runtime.interpret)


@triton.jit
def multiplied(a, b, total, EXACT: tl.constexpr):
    """Return total + a @ b."""
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
        is_group = lane == group
        first = tl.sum(tl.where(is_group, start + (tile - behind + tiles) * ROWS, 0), 0)
        last = tl.sum(tl.where(is_group, end, 0), 0)
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
            k = begin + step
            a = tl.load(left + k[None, :] * inner_stride, mask=row_mask & (k < inner)[None, :], other=0.0)
            b = tl.load(
                right + k.to(tl.int64)[:, None] * matrix_inner, mask=(k < inner)[:, None] & column_mask, other=0.0
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
        k = begin + step
        inside = k < end
        k = k.to(tl.int64)
        a = tl.load(
            left + k[None, :] * left_row + row[:, None] * left_column, mask=row_mask & inside[None, :], other=0.0
        )
        b = tl.load(
            right + k[:, None] * right_row + column[None, :] * right_column,
            mask=inside[:, None] & column_mask,
            other=0.0,
        )
        total = multiplied(a, b, total, EXACT)
    target = out + (group.to(tl.int64) * outer + row[:, None]) * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask & column_mask)


rows_launch: Any = Launcher(rows_kernel)
sum_launch: Any = Launcher(sum_kernel)
