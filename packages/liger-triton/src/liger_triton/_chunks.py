# SPDX-License-Identifier: Apache-2.0
"""Rows in registers as tuples of chunks, of which only the last needs a mask: at any width, few lanes are idle.

A chunk is CHUNK adjacent columns, 16 bytes of bf16 for each thread. The last one may be shorter.
"""

import triton
import triton.language as tl

from liger_triton._norm import ANY, read
from liger_triton.launch import VECTOR, cdiv, power_of_two

LANES = 32


def chunks_of(width: int, warps: int, centered: bool = False) -> dict[str, int | bool]:
    """Return the compile-time arguments for rows in `warps` warps; centered rows subtract a mean."""
    chunk = min(LANES * VECTOR * warps, power_of_two(width))
    # See `fuses`: with a short chunk behind it, a thread does not add its neighbors first. Around a mean, a fused
    # product would leave its round-off, which is large beside that of a constant row.
    short = chunk < LANES * VECTOR * warps or (chunk < width < 2 * chunk and size_of(1, width, chunk) < chunk)
    return {"CHUNK": chunk, "num_warps": warps, "enable_fp_fusion": not short and not centered}


@triton.constexpr_function
def size_of(c, width, chunk):
    """Return the number of columns of chunk c; the last chunk has at least a quarter of the others' columns."""
    return min(chunk, max(chunk // 4, triton.next_power_of_2(width - c * chunk)))


@triton.constexpr_function
def is_full(c, width, chunk):
    """Whether a row has all columns of chunk c."""
    return c * chunk + size_of(c, width, chunk) <= width


def warps_for(width: int, most: int) -> int:
    """Return the fewest warps, up to 16, with which a row has at most `most` chunks."""
    return min(16, power_of_two(cdiv(width, LANES * VECTOR * most)))


def registers_for(warps: int) -> int:
    """Return the most registers per thread with which so many warps fit on a multiprocessor."""
    return 65536 // LANES // warps // 8 * 8


@triton.jit
def no_chunks():
    """Return the empty tuple, to which chunks are added."""
    return ()


@triton.jit
def columns_of(c: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return the columns of chunk c."""
    return c * CHUNK + tl.arange(0, size_of(c, WIDTH, CHUNK))


@triton.jit
def read_chunk(row, c: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Load chunk c of a row in float32, zero where the row has no columns."""
    column = columns_of(c, WIDTH, CHUNK)
    return read(row + column, None if is_full(c, WIDTH, CHUNK) else column < WIDTH)


@triton.jit
def write_chunk(row, value, c: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CACHE: tl.constexpr = ANY):
    """Store chunk c of a row."""
    column = columns_of(c, WIDTH, CHUNK)
    mask = None if is_full(c, WIDTH, CHUNK) else column < WIDTH
    tl.store(row + column, value.to(row.dtype.element_ty), mask=mask, cache_modifier=CACHE)


@triton.jit
def read_chunks(row, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Load all chunks of a row."""
    values = no_chunks()
    for c in tl.static_range(triton.cdiv(WIDTH, CHUNK)):
        values += (read_chunk(row, c, WIDTH, CHUNK),)
    return values


@triton.jit
def write_chunks(row, values, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Store all chunks of a row."""
    for c in tl.static_range(len(values)):
        write_chunk(row, values[c], c, WIDTH, CHUNK)


@triton.jit
def cast(values, DTYPE: tl.constexpr):
    """Convert all chunks to another dtype."""
    result = no_chunks()
    for c in tl.static_range(len(values)):
        result += (values[c].to(DTYPE),)
    return result


@triton.jit
def no_sums(WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return the sums over no rows: zeros."""
    values = no_chunks()
    for c in tl.static_range(triton.cdiv(WIDTH, CHUNK)):
        values += (tl.zeros((size_of(c, WIDTH, CHUNK),), dtype=tl.float32),)
    return values


@triton.jit
def multiplied(a, b):
    """Return a · b for each column."""
    values = no_chunks()
    for c in tl.static_range(len(a)):
        values += (a[c] * b[c],)
    return values


@triton.jit
def plus(a, b):
    """Return a + b for each column."""
    values = no_chunks()
    for c in tl.static_range(len(a)):
        values += (a[c] + b[c],)
    return values


@triton.jit
def plus_scaled(a, b, factor):
    """Return a + factor · b for each column."""
    values = no_chunks()
    for c in tl.static_range(len(a)):
        values += (a[c] + factor * b[c],)
    return values


@triton.jit
def plus_product(a, b, other):
    """Return a + b · other for each column, in one instruction, which a separate product would prevent."""
    values = no_chunks()
    for c in tl.static_range(len(a)):
        values += (a[c] + b[c] * other[c],)
    return values


@triton.jit
def product_sum(a, b):
    """Return Σ a · b over a row."""
    return row_sum(multiplied(a, b))


@triton.jit
def row_sum(a):
    """Return Σ a over a row."""
    LAST: tl.constexpr = len(a) - 1
    total = a[0]
    for c in tl.static_range(1, LAST):
        total += a[c]
    if LAST > 0:
        SHORT: tl.constexpr = a[LAST].shape[0]
        if a[0].shape[0] > SHORT:
            # Each thread adds its own neighbors.
            total = tl.sum(tl.reshape(total, (SHORT, a[0].shape[0] // SHORT)), 1)
        total += a[LAST]
    return tl.sum(total, 0)


@triton.jit
def centered(a, average, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return a - average, zero where the row has no columns."""
    values = no_chunks()
    for c in tl.static_range(len(a)):
        deviation = a[c] - average
        if not is_full(c, WIDTH, CHUNK):
            deviation = tl.where(columns_of(c, WIDTH, CHUNK) < WIDTH, deviation, 0.0)
        values += (deviation,)
    return values
