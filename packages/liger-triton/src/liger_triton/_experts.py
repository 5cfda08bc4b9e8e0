# SPDX-License-Identifier: Apache-2.0
"""The kernels of experts."""

import triton
import triton.language as tl

from liger_triton._gated import activated, limited
from liger_triton.launch import Launcher


@triton.jit
def spread_kernel(x, slot_rows, rows, stride, width, tiles, K: tl.constexpr, BLOCK: tl.constexpr):
    """One program reads one tile of a token's row and writes it to the rows of all its slots."""
    token = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + token * stride + column, mask=mask)
    for k in tl.static_range(K):
        row = tl.load(slot_rows + token * K + k)
        tl.store(rows + row * width + column, value, mask=mask)


@triton.jit
def combine_kernel(
    rows, slot_rows, ends, weight, bias, index, y, width, tiles, groups,
    WEIGHTED: tl.constexpr, HAS_BIAS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program sums one tile of the rows of one token."""
    token = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    last = tl.load(ends + groups - 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        slot = token * K + k
        row = tl.load(slot_rows + slot)
        mask = inside & (row < last)
        value = tl.load(rows + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            group = tl.load(index + slot).to(tl.int64)
            value += tl.load(bias + group * width + column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weight + slot, mask=row < last, other=0.0).to(tl.float32)
        total += value
    tl.store(y + token * width + column, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def joined_at(row, column, width, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return a tile's offsets of gate and up in the outputs of the first matmul."""
    if GATED:
        if INTERLEAVED:
            first = row[:, None] * (2 * width) + 2 * column[None, :]
            second = first + 1
        else:
            first = row[:, None] * (2 * width) + column[None, :]
            second = first + width
    else:
        first = row[:, None] * width + column[None, :]
        second = first
    return first, second


@triton.jit
def joined_values(
    joined, bias, group, row, column, mask, width, limit, alpha, shift,
    ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the activated gate and of the factor that multiplies it.

    Returns the activation, its derivative, a mask where it is flat, the factor, and a mask where the factor is flat.
    """
    first, second = joined_at(row, column, width, GATED, INTERLEAVED)
    gate = tl.load(joined + first, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias_first, bias_second = joined_at(group, column, width, GATED, INTERLEAVED)
        gate += tl.load(bias + bias_first, mask=mask, other=0.0).to(tl.float32)
    value, slope, flat = activated(gate, limit, alpha, ACTIVATION, LIMITED)
    factor = tl.full(gate.shape, 1.0, dtype=tl.float32)
    factor_flat = flat
    if GATED:
        up = tl.load(joined + second, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(bias + bias_second, mask=mask, other=0.0).to(tl.float32)
        factor, factor_flat = limited(up, limit, shift, LIMITED)
    return value, slope, flat, factor, factor_flat


@triton.jit
def group_of(order, index, row, mask, HAS_BIAS: tl.constexpr):
    """Return the experts of some rows if there is a bias to look up, else the rows."""
    group = row
    if HAS_BIAS:
        group = tl.load(index + tl.load(order + row, mask=mask, other=0), mask=mask, other=0).to(tl.int64)
    return group


@triton.jit
def activate_kernel(
    joined, bias, order, index, ends, active, rows, width, tiles, groups, limit, alpha, shift,
    ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program activates one tile of ROWS rows."""
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < tl.load(ends + groups - 1)
    mask = inside[:, None] & (column < width)[None, :]
    group = group_of(order, index, row, inside, HAS_BIAS)
    value, _, _, factor, _ = joined_values(
        joined, bias, group, row, column, mask, width, limit, alpha, shift, ACTIVATION, LIMITED, GATED, INTERLEAVED,
        HAS_BIAS,
    )  # fmt: skip
    tl.store(active + row[:, None] * width + column[None, :], (value * factor).to(active.dtype.element_ty), mask=mask)


@triton.jit
def activate_backward_kernel(
    joined, bias, order, index, ends, weight, along, pulled, active, grad_joined, grad_weight, rows, width, groups,
    limit, alpha, shift,
    NEEDS_JOINED: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, HAS_ALONG: tl.constexpr, NEEDS_ACTIVE: tl.constexpr,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS rows back through the router weight w and the activation a.

    `pulled` holds Wᵀ g, and `active` gets w · a, or a: grad_w = Wᵀ g · a, grad_a = w · Wᵀ g.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < tl.load(ends + groups - 1)
    slot = tl.load(order + row, mask=row < rows, other=0)
    group = group_of(order, index, row, inside, HAS_BIAS)
    scale = tl.load(weight + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        value, slope, flat, factor, factor_flat = joined_values(
            joined, bias, group, row, column, mask, width, limit, alpha, shift, ACTIVATION, LIMITED, GATED,
            INTERLEAVED, HAS_BIAS,
        )  # fmt: skip
        if NEEDS_JOINED or NEEDS_WEIGHT:
            grad = tl.load(pulled + offset, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(grad * value * factor, 1)
            grad = grad * scale
        if NEEDS_JOINED:
            first, second = joined_at(row, column, width, GATED, INTERLEAVED)
            grad_gate = tl.where(flat, 0.0, grad * factor * slope)
            tl.store(grad_joined + first, grad_gate.to(grad_joined.dtype.element_ty), mask=mask)
            if GATED:
                grad_up = tl.where(factor_flat, 0.0, grad * value)
                tl.store(grad_joined + second, grad_up.to(grad_joined.dtype.element_ty), mask=mask)
        if NEEDS_ACTIVE:
            activation = value * factor
            if WEIGHTED:
                activation = activation * scale
            tl.store(active + offset, activation.to(active.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        if HAS_ALONG:
            total += tl.load(along + slot, mask=inside, other=0.0)
        tl.store(grad_weight + slot, total.to(grad_weight.dtype.element_ty), mask=row < rows)


@triton.jit
def along_kernel(
    grad_y, bias, index, slot_rows, ends, along, stride, width, groups, K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program multiplies the upstream gradient of one slot's token by its expert's bias."""
    slot = tl.program_id(0).to(tl.int64)
    inside = tl.load(slot_rows + slot) < tl.load(ends + groups - 1)
    group = tl.load(index + slot).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = inside & (column < width)
        grad = tl.load(grad_y + (slot // K) * stride + column, mask=mask, other=0.0).to(tl.float32)
        total += grad * tl.load(bias + group * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(along + slot, tl.sum(total, 0))


@triton.jit
def sum_rows_kernel(
    rows, order, weight, ends, sums, width, tiles, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program sums one tile of columns over the rows of one group."""
    group = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for begin in range(start, end, ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        inside = row < end
        mask = inside[:, None] & (column < width)[None, :]
        value = tl.load(rows + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            slot = tl.load(order + row, mask=inside, other=0)
            value = value * tl.load(weight + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(value, 0)
    tl.store(sums + group.to(tl.int64) * width + column, total.to(sums.dtype.element_ty), mask=column < width)


spread_launch = Launcher(spread_kernel)
combine_launch = Launcher(combine_kernel)
activate_launch = Launcher(activate_kernel)
activate_backward_launch = Launcher(activate_backward_kernel)
along_launch = Launcher(along_kernel)
sum_rows_launch = Launcher(sum_rows_kernel)
