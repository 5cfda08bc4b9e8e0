# SPDX-License-Identifier: Apache-2.0
"""sparsemax in Triton, without a sort: candidates below the threshold are dropped until the support remains.

The search starts with the largest of every few neighbors, and their threshold is the start for the whole row. Elements
of the support are rarely neighbors, so the search of the whole row usually ends after one pass.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_triton._chunks import registers_for
from liger_triton.launch import (
    Launcher,
    cdiv,
    differentiable_kernels,
    first_like,
    power_of_two,
    registers,
    row_shape,
    strided_rows,
    supported,
)

WIDEST = 32768
# The number of neighbors whose largest is taken.
NEIGHBORS = 8
# Longer rows are read again in every pass, mostly from the cache: then one program computes while another reads.
LONGEST_HELD = 8192


def sparsemax(x: Tensor) -> Tensor:
    supported(x)
    if x.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {x.shape[-1]} columns, more than {WIDEST}")
    return _sparsemax(x)


def _launch(y: Tensor, /, x: Tensor) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    if width > LONGEST_HELD and x.element_size() == 2:
        block = 8192 if width > 16384 else 4096
        wide_forward_launch(
            (rows,), x, y, x_stride, width, BLOCK=block, NEIGHBORS=NEIGHBORS, EVEN=width % block == 0, num_warps=16,
            **registers(registers_for(32), x),
        )  # fmt: skip
        return
    block, several, warps = forward_shape(width)
    forward_launch(
        (cdiv(rows, several),), x, y, x_stride, rows, width,
        ROWS=several, BLOCK=block, NEIGHBORS=min(NEIGHBORS, block), EVEN=block == width, num_warps=warps,
    )  # fmt: skip


def _launch_backward(grad_x: Tensor, /, grad_y: Tensor, y: Tensor, needs: list[bool]) -> None:
    if y.numel() == 0:
        return
    width = y.shape[-1]
    rows = y.numel() // width
    grad_y, grad_stride = strided_rows(grad_y)
    block, several, warps = backward_shape(width)
    backward_launch(
        (cdiv(rows, several),), grad_y, y, grad_x, grad_stride, rows, width, ROWS=several, BLOCK=block, num_warps=warps
    )


# Share of copy bandwidth on one H100 (bfloat16): .97 at 4096 and 8192 columns, .91 at 16384, .89 at 32768.
def forward_shape(width: int) -> tuple[int, int, int]:
    """Return the columns of a block, the rows of a program and its warps."""
    block = power_of_two(width)
    return block, max(1, min(64, 1024 // block)), max(1, block // 2048)


def backward_shape(width: int) -> tuple[int, int, int]:
    """Return the columns of a block, the rows of a program and its warps."""
    return row_shape(width, 1024, lambda block: min(32, max(4, block // 1024)))


_sparsemax = differentiable_kernels("sparsemax", first_like, _launch, _launch_backward, first_like)


@triton.jit
def forward_kernel(
    x, y, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, NEIGHBORS: tl.constexpr, EVEN: tl.constexpr
):
    """One program computes ROWS rows, each in one block.

    The threshold of a set that contains the support is at most the exact one, so no element of the support is lost
    (Michelot 1986). The exact threshold of a subset of a row is not higher than the row's either.
    """
    column = neighbors(BLOCK, NEIGHBORS)
    inside = tl.full((1, BLOCK // NEIGHBORS, NEIGHBORS), 1, dtype=tl.int1) if EVEN else column < width
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    # Lanes after the last row repeat it.
    value = tl.load(x + tl.minimum(row, rows - 1) * x_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(value, 2)[:, :, None]
    highest = tl.max(largest, 1)[:, :, None]
    value = candidates(value, highest)
    threshold = risen(candidates(largest, highest), tl.full((ROWS,), -1.0, dtype=tl.float32))
    threshold = risen(value, threshold)
    result = tl.maximum(value - threshold[:, None, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=(row < rows) & inside)


@triton.jit
def wide_forward_kernel(x, y, x_stride, width, BLOCK: tl.constexpr, NEIGHBORS: tl.constexpr, EVEN: tl.constexpr):
    """One program computes one row in passes over its blocks.

    The first threshold is that of the largest neighbors in all blocks.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y += row * width
    largest = tl.full((1, BLOCK // NEIGHBORS), float("-inf"), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        largest = tl.maximum(
            largest, tl.max(block_of(x, first, width, BLOCK, NEIGHBORS, EVEN), 2), propagate_nan=tl.PropagateNan.ALL
        )
    highest = tl.max(largest, 1)[:, None, None]
    threshold = risen(candidates(largest[:, :, None], highest), tl.full((1,), -1.0, dtype=tl.float32))
    threshold, rising = tried(x, y, highest, threshold, width, BLOCK, NEIGHBORS, EVEN)
    if rising > 0:
        while rising > 0:
            threshold, rising = tried(x, None, highest, threshold, width, BLOCK, NEIGHBORS, EVEN)
        tried(x, y, highest, threshold, width, BLOCK, NEIGHBORS, EVEN)


@triton.jit
def tried(x, y, highest, threshold, width, BLOCK: tl.constexpr, NEIGHBORS: tl.constexpr, EVEN: tl.constexpr):
    """Return `raised` for a row's elements above the threshold; store the row's result for it in y unless None."""
    sizes = tl.zeros((1, BLOCK // NEIGHBORS), dtype=tl.float32)
    totals = tl.zeros((1, BLOCK // NEIGHBORS), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + neighbors(BLOCK, NEIGHBORS)
        value = candidates(block_of(x, first, width, BLOCK, NEIGHBORS, EVEN), highest)
        more, added = above(value, threshold)
        sizes += more
        totals += added
        if y is not None:
            result = tl.maximum(value - threshold[:, None, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
            tl.store(y + column, result.to(y.dtype.element_ty), mask=None if EVEN else column < width)
    return raised(sizes, totals, threshold)


@triton.jit
def neighbors(BLOCK: tl.constexpr, NEIGHBORS: tl.constexpr):
    """Return the columns of a block as (1, groups, neighbors); a thread has whole groups."""
    return ((tl.arange(0, BLOCK // NEIGHBORS) * NEIGHBORS)[:, None] + tl.arange(0, NEIGHBORS)[None, :])[None, :, :]


@triton.jit
def block_of(x, first, width, BLOCK: tl.constexpr, NEIGHBORS: tl.constexpr, EVEN: tl.constexpr):
    """Load a block of a row in float32."""
    column = first + neighbors(BLOCK, NEIGHBORS)
    if EVEN:
        return tl.load(x + column).to(tl.float32)
    else:
        return tl.load(x + column, mask=column < width, other=float("-inf")).to(tl.float32)


@triton.jit
def candidates(value, highest):
    """Return the values relative to the highest, clamped to -2; a value of -1 or less is never in the support."""
    return tl.maximum(value - highest, -2.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def risen(value, threshold):
    """Raise the threshold to that of the elements above it until no row's rises.

    It takes at most as many steps as a row has elements.
    """
    rising = 1
    while rising > 0:
        sizes, totals = above(value, threshold)
        threshold, rising = raised(sizes, totals, threshold)
    return threshold


@triton.jit
def above(value, threshold):
    """Return the number of neighbors of each group above the threshold, and their sum."""
    # Use the sign bit of the difference: LLVM packs comparisons of many elements into a bitmap and unpacks it again.
    sign = (threshold[:, None, None] - value).to(tl.int32, bitcast=True) >> 31
    inside = (sign & 0x3F800000).to(tl.float32, bitcast=True)
    return tl.reduce((inside, inside * value), 2, add_both)


@triton.jit
def raised(sizes, totals, threshold):
    """Return the threshold of a set from the sizes and sums of its groups, and whether any row's threshold rises."""
    size, total = tl.reduce((sizes, totals), 1, add_both)
    # Correctly rounded: a threshold that x can represent is computed exactly. NaN in a row without a finite value.
    higher = tl.div_rn(total - 1.0, size)
    rising = tl.max((higher > threshold).to(tl.int32), 0)
    # Rounding must not lower it, or rows that share a program would wait for each other forever.
    return tl.where(higher < threshold, threshold, higher), rising


@triton.jit
def add_both(size, total, other_size, other_total):
    return size + other_size, total + other_total


@triton.jit
def backward_kernel(grad_y, y, grad_x, grad_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient minus its mean on the support; one program computes ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inside = tl.load(y + row[:, None] * width + column[None, :], mask=mask, other=0.0) > 0.0
    size = tl.maximum(tl.sum(inside.to(tl.float32), 1), 1.0)
    mean = tl.sum(tl.where(inside, grad, 0.0), 1) / size
    result = tl.where(inside, grad - mean[:, None], 0.0)
    tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)


forward_launch = Launcher(forward_kernel)
wide_forward_launch = Launcher(wide_forward_kernel)
backward_launch = Launcher(backward_kernel)
