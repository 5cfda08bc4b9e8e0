# SPDX-License-Identifier: Apache-2.0
"""The kernels of softmax."""

import triton
import triton.language as tl

from liger_triton._constants import LOG2E
from liger_triton._norm import ANY, read
from liger_triton.launch import Launcher


@triton.jit
def power(x, EXACT: tl.constexpr):
    """Return e^x for x ≤ 0. EXACT: to the last digits, although the product of a large x with log₂ e is rounded."""
    if EXACT:
        # Below, e^x is 0 in float32. A select, because NaN must stay NaN.
        x = tl.where(x < -200.0, -200.0, x)
        whole = tl.floor(x * LOG2E + 0.5)
        # The product with the first part of log 2 is exact.
        rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
        return tl.exp2(whole) * tl.exp2(rest * LOG2E)
    else:
        return tl.exp2(x * LOG2E)


@triton.jit
def forward_kernel(x, y, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Program p takes every programs-th group of ROWS rows, from the p-th on, each row in one block."""
    column = tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        # Lanes after the last row repeat it: rows of nothing but minus infinity would give NaN.
        source = tl.minimum(row, rows - 1)
        value = read(x + source[:, None] * x_stride + column[None, :], inside, ANY, float("-inf"))
        share = power(value - tl.max(value, 1)[:, None], x.dtype.element_ty == tl.float32)
        share = (
            share * (1.0 / tl.sum(share, 1))[:, None]
            if y.dtype.element_ty != tl.float32
            else share / tl.sum(share, 1)[:, None]
        )
        tl.store(
            y + row[:, None] * width + column[None, :],
            share.to(y.dtype.element_ty),
            mask=(row < rows)[:, None] & inside,
        )


@triton.jit
def backward_kernel(
    grad_y, y, grad_x, grad_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Compute grad_x = y · (grad_y - Σ grad_y · y) of every programs-th group of ROWS rows."""
    column = tl.arange(0, BLOCK)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        grad = read(grad_y + row[:, None] * grad_stride + column[None, :], mask)
        value = read(y + row[:, None] * width + column[None, :], mask)
        result = value * (grad - tl.sum(grad * value, 1)[:, None])
        tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def wait_for(done, PARTS: tl.constexpr):
    """Signal that this program's results are stored, and wait for the other programs of its row.

    Programs take rows in the order in which they start, so every row but the newest has all its programs: each wait
    ends.
    """
    tl.debug_barrier()
    tl.atomic_add(done, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(done, 0, sem="acq_rel", scope="gpu") < PARTS:
        pass
    tl.debug_barrier()


@triton.jit
def split_forward_kernel(
    x, y, started, moments, x_stride, rows, width, PARTS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr
):
    """One program computes one block of a row, and waits for the maxima and sums of the others."""
    turn = tl.atomic_add(started, 1, sem="relaxed", scope="gpu")
    row = (turn // PARTS).to(tl.int64)
    block = turn % PARTS
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    value = read(x + row * x_stride + column, mask, "evict_first", float("-inf"))
    top = tl.max(value, 0)
    value = power(value - tl.where(top == float("-inf"), 0.0, top), EXACT)
    row_moments = moments + row * (2 * PARTS)
    tl.store(row_moments + block, top)
    tl.store(row_moments + PARTS + block, tl.sum(value, 0))
    wait_for(started + 1 + row, PARTS)
    blocks = tl.arange(0, PLACES)
    tops = tl.load(row_moments + blocks, mask=blocks < PARTS, other=float("-inf"), volatile=True)
    totals = tl.load(row_moments + PARTS + blocks, mask=blocks < PARTS, other=0.0, volatile=True)
    highest = tl.max(tops, 0)
    # A row of nothing but minus infinity gives NaN, as in one block.
    total = tl.sum(totals * power(tops - highest, EXACT), 0)
    value = value * (power(top - highest, EXACT) / total)
    tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def split_backward_kernel(
    grad_y, y, grad_x, started, moments, grad_stride, rows, width,
    PARTS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes the gradient of one block of a row, whose sum all its programs add in one order."""
    turn = tl.atomic_add(started, 1, sem="relaxed", scope="gpu")
    row = (turn // PARTS).to(tl.int64)
    block = turn % PARTS
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    grad = read(grad_y + row * grad_stride + column, mask, "evict_first")
    value = read(y + row * width + column, mask, "evict_first")
    row_products = moments + row * PARTS
    tl.store(row_products + block, tl.sum(grad * value, 0))
    wait_for(started + 1 + row, PARTS)
    blocks = tl.arange(0, PLACES)
    product = tl.sum(tl.load(row_products + blocks, mask=blocks < PARTS, other=0.0, volatile=True), 0)
    tl.store(
        grad_x + row * width + column,
        (value * (grad - product)).to(grad_x.dtype.element_ty),
        mask=mask,
        eviction_policy="evict_first",
    )


@triton.jit
def wide_forward_kernel(x, y, x_stride, rows, width, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Program p computes every programs-th row: each lane has a running maximum and sum, merged at the end."""
    lane = tl.arange(0, BLOCK)
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    tiles = tl.cdiv(width, BLOCK)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        source = x + row * x_stride
        top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + lane
            mask = None if EVEN else column < width
            value = read(source + column, mask, "evict_last", float("-inf"))
            higher = tl.maximum(top, value)
            # Without a finite maximum, there is nothing to scale or to add yet.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * power(top - base, EXACT) + power(value - base, EXACT)
            top = higher
        highest = tl.max(top, 0)
        total = tl.sum(total * power(tl.where(top == float("-inf"), float("-inf"), top - highest), EXACT), 0)
        for tile in range(0, tiles):
            column = (tiles - 1 - tile) * BLOCK + lane
            mask = None if EVEN else column < width
            value = power(read(source + column, mask, "evict_first") - highest, EXACT) / total
            tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def wide_backward_kernel(grad_y, y, grad_x, grad_stride, rows, width, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient of every programs-th row in two passes over its tiles, the second in reverse."""
    lane = tl.arange(0, BLOCK)
    tiles = tl.cdiv(width, BLOCK)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        products = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + lane
            mask = None if EVEN else column < width
            grad = read(grad_y + row * grad_stride + column, mask, "evict_last")
            products += grad * read(y + row * width + column, mask, "evict_last")
        product = tl.sum(products, 0)
        for tile in range(0, tiles):
            column = (tiles - 1 - tile) * BLOCK + lane
            mask = None if EVEN else column < width
            grad = read(grad_y + row * grad_stride + column, mask, "evict_first")
            result = read(y + row * width + column, mask, "evict_first") * (grad - product)
            tl.store(
                grad_x + row * width + column, result.to(grad_x.dtype.element_ty), mask=mask,
                eviction_policy="evict_first",
            )  # fmt: skip


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
split_forward_launch = Launcher(split_forward_kernel)
split_backward_launch = Launcher(split_backward_kernel)
wide_forward_launch = Launcher(wide_forward_kernel)
wide_backward_launch = Launcher(wide_backward_kernel)
