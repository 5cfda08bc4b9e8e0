# SPDX-License-Identifier: Apache-2.0
"""embedding in Triton: rows are copied, and their gradients are summed in the order of the sorted indices."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.kernels import Outputs
from liger_triton.launch import Launcher, cdiv, differentiable_kernels, power_of_two, rows_of, supported, wait

# Sorted indices that one program sums. A second kernel adds the parts of sums that continue in later spans.
SPAN = 16
# Columns and warps of a program that sums, and its pipeline stages.
SUM_TILE, SUM_WARPS, STAGES = 1024, 2, 4
# Rows, columns and warps of a program that copies: .75 to .85 of copy bandwidth on one H100, a row at a time .70.
COPIED, COPIED_TILE, COPY_WARPS = 8, 256, 2
# The most indices that are sorted by comparing each with all others, in one kernel instead of ten; indices of a
# program, and others at a time.
COMPARED, RANKED, OTHERS = 8192, 16, 128
# Zeros that a program writes while others compare: .41 ms instead of .56 for 16384 indices into 262144 x 2560 (H200).
ZEROS = 8192


def embedding(index: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    supported(weight)
    return _embedding(index, weight, -1 if padding_idx is None else padding_idx)


def _allocate(index: Tensor, weight: Tensor, padding: int) -> Outputs:
    return (torch.empty((*index.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device),)


def _launch(y: Tensor, /, index: Tensor, weight: Tensor, padding: int) -> None:
    index, weight = index.contiguous(), rows_of(weight)
    (rows, width), count = weight.shape, index.numel()
    tiles, block = _tiles(width, COPIED_TILE)
    if count * width:
        grid = (cdiv(count, COPIED) * tiles,)
        rows_launch(
            grid, index, weight, y, weight.stride(0), count, rows, width, ROWS=COPIED, BLOCK=block, num_warps=COPY_WARPS
        )


def _allocate_backward(grad_y: Tensor, index: Tensor, weight: Tensor, padding: int, needs: list[bool]) -> Outputs:
    return (torch.empty(weight.shape, dtype=weight.dtype, device=weight.device),)


def _launch_backward(
    grad_weight: Tensor, /, grad_y: Tensor, index: Tensor, weight: Tensor, padding: int, needs: list[bool]
) -> None:  # fmt: skip
    (rows, width), count = weight.shape, index.numel()
    if not count * width:
        grad_weight.zero_()
        return
    grad_y = rows_of(grad_y)
    sorted_index, order = _prepared(index.contiguous().view(-1), grad_weight)
    tiles, block = _tiles(width, SUM_TILE)
    spans = cdiv(count, SPAN)
    # The sums that continue from an earlier span, and those that continue in a later one.
    parts = torch.empty(2, spans, width, dtype=torch.float32, device=grad_y.device)
    grid = (spans * tiles,)
    shape = (count, rows, width, tiles, padding)
    spans_launch.after(
        grid, grad_y, sorted_index, order, grad_weight, parts[0], parts[1], grad_y.stride(0), *shape, SPAN=SPAN,
        BLOCK=block, STAGES=STAGES, num_warps=SUM_WARPS,
    )  # fmt: skip
    if spans > 1:
        crossing_launch.after(
            grid, sorted_index, grad_weight, parts[0], parts[1], spans, *shape, SPAN=SPAN, BLOCK=block
        )


def _prepared(index: Tensor, grad_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted indices and their former positions, equal ones in order, and fill the gradient with zeros."""
    count, rows, size = index.numel(), grad_weight.shape[0], grad_weight.numel()
    narrow = rows < 2**31 - 1
    if not narrow or (count > COMPARED and count**2 > size):
        grad_weight.zero_()
        # Sorting 32 bits takes half the time.
        sorted_index, order = torch.sort(index.to(torch.int32) if narrow else index, stable=True)
        return sorted_index, order
    sorted_index, order = (torch.empty(count, dtype=torch.int32, device=index.device) for _ in range(2))
    ranks = cdiv(count, RANKED)
    prepare_launch(
        (ranks + cdiv(size, ZEROS),), index, sorted_index, order, grad_weight, count, rows, ranks, size, ROWS=RANKED,
        OTHERS=OTHERS, BLOCK=ZEROS
    )  # fmt: skip
    return sorted_index, order


def _tiles(width: int, most: int) -> tuple[int, int]:
    """Return (tiles per row, block)."""
    block = min(most, power_of_two(max(1, width)))
    return cdiv(width, block), block


@triton.jit
def rows_kernel(index, weight, y, weight_stride, count, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program copies one tile of columns of ROWS rows; NaN for a row that does not exist."""
    program = tl.program_id(0)
    # All rows of one tile come one after the other, so the cache still has the tile of a frequent row.
    parts = tl.cdiv(count, ROWS)
    position = (program % parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program // parts * BLOCK + tl.arange(0, BLOCK))[None, :]
    valid = position < count
    row = tl.load(index + position, mask=valid, other=0).to(tl.int64)
    inside = ((row >= 0) & (row < rows))[:, None]
    mask = valid[:, None] & (column < width)
    value = tl.load(weight + row[:, None] * weight_stride + column, mask=mask & inside, other=float("nan"))
    tl.store(y + position[:, None] * width + column, value, mask=mask)


@triton.jit
def prepare_kernel(
    index, sorted_index, order, grad_weight, count, rows, ranks, size, ROWS: tl.constexpr, OTHERS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Each of the first `ranks` programs sorts ROWS indices; the others write BLOCK zeros each meanwhile."""
    program = tl.program_id(0)
    if program < ranks:
        rank(program, index, sorted_index, order, count, rows, ROWS, OTHERS)
    else:
        offset = (program - ranks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(grad_weight + offset, tl.zeros((BLOCK,), dtype=grad_weight.dtype.element_ty), mask=offset < size)


@triton.jit
def rank(program, index, sorted_index, order, count, rows, ROWS: tl.constexpr, OTHERS: tl.constexpr):
    """Store ROWS indices at their sorted positions: after all smaller ones and after earlier equal ones."""
    entry = program * ROWS + tl.arange(0, ROWS)
    inside = entry < count
    key = narrowed(tl.load(index + entry, mask=inside, other=0), rows)
    before = tl.zeros((ROWS, OTHERS), dtype=tl.int32)
    for start in range(0, count, OTHERS):
        others = start + tl.arange(0, OTHERS)
        other = narrowed(tl.load(index + others, mask=others < count, other=0), rows)
        # The largest number comes after all indices.
        other = tl.where(others < count, other, 2147483647)[None, :]
        before += ((other < key[:, None]) | ((other == key[:, None]) & (others[None, :] < entry[:, None]))).to(tl.int32)
    position = tl.sum(before, 1)
    tl.store(sorted_index + position, key, mask=inside)
    tl.store(order + position, entry, mask=inside)


@triton.jit
def narrowed(index, rows):
    """Convert to 32 bits; an index without a row stays one."""
    return tl.minimum(tl.maximum(index, -1), rows).to(tl.int32)


@triton.jit
def spans_kernel(
    grad_y, sorted_index, order, grad_weight, heads, tails, grad_stride, count, rows, width, tiles, padding,
    EARLY: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program sums one tile of columns over one span of the sorted indices, run by run of equal indices.

    Runs within the span go to grad_weight; a run that began before it goes to heads, and one that began in it and
    continues after it to tails.
    """
    wait(EARLY)
    program = tl.program_id(0)
    span = (program // tiles).to(tl.int64)
    column = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    first = span * SPAN
    last = tl.minimum(first + SPAN, count)
    before = tl.load(sorted_index + first - 1, mask=first > 0, other=-1).to(tl.int64)
    behind = tl.load(sorted_index + last, mask=last < count, other=-1).to(tl.int64)
    row = tl.load(sorted_index + first).to(tl.int64)
    continued = (first > 0) & (row == before)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for position in tl.range(first, last, num_stages=STAGES):
        following = tl.load(sorted_index + position).to(tl.int64)
        source = tl.load(order + position).to(tl.int64)
        value = tl.load(grad_y + source * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        ends = following != row
        counted = (row != padding) & (row >= 0) & (row < rows)
        tl.store(heads + span * width + column, total, mask=mask & ends & continued)
        target = grad_weight + tl.where(counted, row, 0) * width + column
        tl.store(target, total.to(grad_weight.dtype.element_ty), mask=mask & ends & (continued == 0) & counted)
        continued = continued & (ends == 0)
        total = tl.where(ends, value, total + value)
        row = following
    counted = (row != padding) & (row >= 0) & (row < rows)
    continues = (last < count) & (row == behind)
    tl.store(heads + span * width + column, total, mask=mask & continued)
    tl.store(tails + span * width + column, total, mask=mask & continues & (continued == 0))
    target = grad_weight + tl.where(counted, row, 0) * width + column
    alone = (continued == 0) & (continues == 0) & counted
    tl.store(target, total.to(grad_weight.dtype.element_ty), mask=mask & alone)


@triton.jit
def crossing_kernel(
    sorted_index, grad_weight, heads, tails, spans, count, rows, width, tiles, padding, EARLY: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program sums one tile of columns of the run that begins in its span and ends in a later one, if any."""
    wait(EARLY)
    program = tl.program_id(0)
    span = (program // tiles).to(tl.int64)
    column = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    first = span * SPAN
    last = tl.minimum(first + SPAN, count)
    row = tl.load(sorted_index + last - 1).to(tl.int64)
    before = tl.load(sorted_index + first - 1, mask=first > 0, other=-1).to(tl.int64)
    behind = tl.load(sorted_index + last, mask=last < count, other=-1).to(tl.int64)
    counted = (row != padding) & (row >= 0) & (row < rows)
    # The indices are sorted: a span whose last index is the one before it has no other.
    begins = (last < count) & (row == behind) & ((first == 0) | (row != before)) & counted
    if begins:
        total = tl.load(tails + span * width + column, mask=mask, other=0.0)
        span += 1
        more = True
        while more:
            total += tl.load(heads + span * width + column, mask=mask, other=0.0)
            span += 1
            # The run continues in the next span if that begins with its index.
            more = (span < spans) & (tl.load(sorted_index + tl.minimum(span * SPAN, count - 1)).to(tl.int64) == row)
        tl.store(grad_weight + row * width + column, total.to(grad_weight.dtype.element_ty), mask=mask)


rows_launch = Launcher(rows_kernel)
prepare_launch = Launcher(prepare_kernel)
spans_launch = Launcher(spans_kernel)
crossing_launch = Launcher(crossing_kernel)
_embedding = differentiable_kernels("embedding", _allocate, _launch, _launch_backward, _allocate_backward)
