# SPDX-License-Identifier: Apache-2.0
"""Rows in registers as tuples of chunks: a width that is not a power of two leaves few lanes idle, and no chunk but the last needs a mask.

A chunk is CHUNK adjacent columns, 16 bytes of bf16 for each thread. A row has COUNT of them; EVEN: the last one is full, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liger_triton._norm_sum import ANY, read
from liger_triton.launch import VECTOR, cdiv, power_of_two, shared_memory

LANES = 32


def chunks_of(width: int, warps: int, centered: bool = False) -> dict[str, int | bool]:
    """How so many warps hold a row, as compile-time arguments; centered: their distances from a mean are taken."""
    chunk = min(LANES * VECTOR * warps, power_of_two(width))
    # A thread of a full chunk adds its neighbors first: see `fuses`. A product fused into its distance from the mean would leave its round-off,
    # which is large beside that of a constant row.
    fused = chunk == LANES * VECTOR * warps and not centered
    return {"COUNT": cdiv(width, chunk), "CHUNK": chunk, "EVEN": width % chunk == 0, "num_warps": warps, "enable_fp_fusion": fused}


def warps_for(width: int, most: int) -> int:
    """The fewest warps, up to 16, with which a row has at most so many chunks."""
    return min(16, power_of_two(cdiv(width, LANES * VECTOR * most)))


def stages_of(size: int, like: Tensor) -> int:
    """Rows on their way at once, up to 3, which wait in shared memory; size is the bytes of one row of every program of a multiprocessor."""
    # A kilobyte stays for the reductions.
    return max(1, min(3, (shared_memory(like.device) - 1024) // max(1, size)))


def registers_for(warps: int) -> int:
    """The most registers of a thread with which so many warps fit on a multiprocessor."""
    return 65536 // LANES // warps // 8 * 8


@triton.jit
def no_chunks():
    """The tuple that chunks are added to."""
    return ()


@triton.jit
def read_chunk(row, c: tl.constexpr, width, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """Chunk c of a row in float32, zero where the row has no columns."""
    column = c * CHUNK + tl.arange(0, CHUNK)
    return read(row + column, None if EVEN or c < COUNT - 1 else column < width)


@triton.jit
def write_chunk(
    row, value, c: tl.constexpr, width, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr, CACHE: tl.constexpr = ANY
):  # fmt: skip
    """Store chunk c of a row."""
    column = c * CHUNK + tl.arange(0, CHUNK)
    mask = None if EVEN or c < COUNT - 1 else column < width
    tl.store(row + column, value.to(row.dtype.element_ty), mask=mask, cache_modifier=CACHE)


@triton.jit
def read_chunks(row, width, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """All chunks of a row."""
    values = no_chunks()
    for c in tl.static_range(COUNT):
        values += (read_chunk(row, c, width, COUNT, CHUNK, EVEN),)
    return values


@triton.jit
def write_chunks(row, values, width, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """Store all chunks of a row."""
    for c in tl.static_range(COUNT):
        write_chunk(row, values[c], c, width, COUNT, CHUNK, EVEN)


@triton.jit
def no_sums(COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Sums over no rows."""
    values = no_chunks()
    for _ in tl.static_range(COUNT):
        values += (tl.zeros((CHUNK,), dtype=tl.float32),)
    return values


@triton.jit
def multiplied(a, b, COUNT: tl.constexpr):
    """a · b of each column."""
    values = no_chunks()
    for c in tl.static_range(COUNT):
        values += (a[c] * b[c],)
    return values


@triton.jit
def plus(a, b, factor, COUNT: tl.constexpr):
    """a + factor · b of each column."""
    values = no_chunks()
    for c in tl.static_range(COUNT):
        values += (a[c] + factor * b[c],)
    return values


@triton.jit
def product_sum(a, b, COUNT: tl.constexpr):
    """Σ a · b over a row."""
    total = a[0] * b[0]
    for c in tl.static_range(1, COUNT):
        total += a[c] * b[c]
    return tl.sum(total, 0)


@triton.jit
def row_sum(a, COUNT: tl.constexpr):
    """Σ a over a row."""
    total = a[0]
    for c in tl.static_range(1, COUNT):
        total += a[c]
    return tl.sum(total, 0)


@triton.jit
def centered(a, average, width, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """a - average, zero where the row has no columns."""
    values = no_chunks()
    for c in tl.static_range(COUNT):
        away = a[c] - average
        if not EVEN and c == COUNT - 1:
            away = tl.where(c * CHUNK + tl.arange(0, CHUNK) < width, away, 0.0)
        values += (away,)
    return values
