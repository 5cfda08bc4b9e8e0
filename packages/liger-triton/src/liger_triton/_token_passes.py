# SPDX-License-Identifier: Apache-2.0
"""The row passes of per-token results in Triton: sums over a block of classes, and the gradient of the logits from four
numbers a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.ops._token_passes import LEAST, RowOptions, Slopes, Sums
from liger_triton._constants import LN2, LOG2E, LOWEST
from liger_triton._logits import GRADIENT, STATISTICS, bend, capped, exponentials_shape, grown, met, through_cap
from liger_triton.launch import VECTOR, Launcher, cdiv, contiguous, fuses, power_of_two, rows_of

LEAST_EXPONENT = tl.constexpr(LEAST)
# Chosen classes, of whatever row, that a program takes.
CHOSEN_BLOCK = 256


class TritonTokenPasses:
    """One program a row, or a block of one."""

    def statistics(self, logits: Tensor, counted: Tensor, options: RowOptions, sums: Sums, first: int) -> None:
        rows, width = logits.shape
        logits, weight = rows_of(logits), contiguous(options.class_weight)
        block = min(STATISTICS.block, power_of_two(width))
        plain = options.softcap is None and options.logit_scale == 1.0 and options.inverse_temperature is None
        statistics_launch(
            (rows,), logits, counted, options.inverse_temperature, weight, sums.moments, sums.prediction,
            logits.stride(0), width, first, options.logit_scale, options.softcap or 1.0,
            HAS_SOFTCAP=options.softcap is not None, KEEPS_LOWEST=plain, CONTINUES=first > 0,
            ENTROPY=sums.extras.with_entropy, MEAN=sums.extras.with_mean, COLLISION=sums.extras.with_collision,
            BLOCK=block, VECTOR=min(VECTOR, block), num_warps=STATISTICS.warps, enable_fp_fusion=fuses(block),
        )  # fmt: skip

    def selected(self, logits: Tensor, index: Tensor, options: RowOptions, out: Tensor, first: int) -> None:
        logits, index = rows_of(logits), index.contiguous()
        entries, block = index.numel(), min(CHOSEN_BLOCK, power_of_two(index.numel()))
        selected_launch(
            (cdiv(entries, block),), logits, index, options.inverse_temperature, out, logits.stride(0), logits.shape[1],
            first, index.shape[1], entries, options.logit_scale, options.softcap or 1.0,
            HAS_SOFTCAP=options.softcap is not None, BLOCK=block,
        )  # fmt: skip

    def derivative(self, logits: Tensor, slopes: Slopes, options: RowOptions, out: Tensor, first: int) -> None:
        rows, width = logits.shape
        logits, weight = rows_of(logits), contiguous(options.class_weight)
        common = (options.inverse_temperature, weight, slopes.moments, slopes.terms)
        scalars = (width, options.logit_scale, options.softcap or 1.0)
        classes, gradient = slopes.classes.contiguous(), slopes.gradient.contiguous()
        # What is written at the chosen classes is made of logits that the gradient of all others may overwrite.
        values = torch.empty_like(gradient)
        entries, block = classes.numel(), min(CHOSEN_BLOCK, power_of_two(classes.numel()))
        chosen_launch(
            (cdiv(entries, block),), logits, classes, gradient, *common, values, logits.stride(0), first,
            classes.shape[1], entries, *scalars, HAS_SOFTCAP=options.softcap is not None, BLOCK=block,
        )  # fmt: skip
        columns = min(GRADIENT.block, power_of_two(width))
        derivative_launch(
            (rows, cdiv(width, columns)), logits, slopes.counted, *common, out, logits.stride(0), out.stride(0),
            *scalars, HAS_SOFTCAP=options.softcap is not None, BLOCK=columns, num_warps=GRADIENT.warps,
        )  # fmt: skip
        sizes = out.stride(0), first, classes.shape[1], entries, width
        scatter_launch((cdiv(entries, block),), classes, values, out, *sizes, BLOCK=block)

    def exponentials(
        self, logits: Tensor, counted: Tensor, options: RowOptions, moments: Tensor, total: Tensor, first: int
    ) -> None:
        rows, width = logits.shape
        shape = exponentials_shape(width)
        block = min(shape.block, power_of_two(width))
        exponentials_launch(
            (rows,), logits, counted, options.inverse_temperature, moments, total, logits.stride(0),
            total.stride(0), width, total.shape[1], options.logit_scale, options.softcap or 1.0,
            HAS_SOFTCAP=options.softcap is not None, CONTINUES=first > 0, BLOCK=block,
            num_warps=shape.warps, enable_fp_fusion=fuses(block),
        )  # fmt: skip

    def combined(
        self, out: Tensor, total: Tensor, factor: Tensor, weight: Tensor, index: Tensor, slope: Tensor
    ) -> None:
        rows, width = total.shape
        block = min(GRADIENT.block, power_of_two(width))
        combined_launch(
            (rows, cdiv(width, block)), out, total, factor, weight, index.contiguous(), slope.contiguous(),
            out.stride(0), total.stride(0), weight.stride(0), weight.stride(1), width, weight.shape[0],
            index.shape[1], BLOCK=block, num_warps=GRADIENT.warps,
        )  # fmt: skip


@triton.jit
def over_temperature(logit_scale, softcap, inverse_temperature, row, mask):
    """Return scale and cap divided by the temperature of the row, if rows have one."""
    if inverse_temperature is not None:
        inverse = tl.load(inverse_temperature + row, mask=mask, other=1.0)
        logit_scale = logit_scale * inverse
        softcap = softcap * inverse
    return logit_scale, softcap


@triton.jit
def slope_at(below, exp_sum, terms, row, class_weight, column, mask, row_mask):
    """(a + b · (x - m) + q · p) · p + c · w, given x - m."""
    a = tl.load(terms + 4 * row, mask=row_mask)
    b = tl.load(terms + 4 * row + 1, mask=row_mask)
    q = tl.load(terms + 4 * row + 2, mask=row_mask)
    c = tl.load(terms + 4 * row + 3, mask=row_mask)
    p = tl.exp2(below * LOG2E) * (1.0 / exp_sum)
    # Not a maximum, which may drop a NaN.
    below = tl.where(below < LEAST_EXPONENT, LEAST_EXPONENT, below)
    d = (a + b * below + q * p) * p
    if class_weight is None:
        d += c
    else:
        d += c * tl.load(class_weight + column, mask=mask, other=0.0).to(tl.float32)
    return d


@triton.jit
def statistics_kernel(
    logits, counted, inverse_temperature, class_weight, moments, prediction, row_stride, width, first, logit_scale,
    softcap, HAS_SOFTCAP: tl.constexpr, KEEPS_LOWEST: tl.constexpr, CONTINUES: tl.constexpr, ENTROPY: tl.constexpr,
    MEAN: tl.constexpr, COLLISION: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program adds one row of a block of classes to the row's sums; CONTINUES: to those of the blocks before.

    KEEPS_LOWEST: x is the logit itself, so a masked lane is -∞. Otherwise x is a product, and masking it stops the
    compiler from fusing it, unrounded, into x - m, where m is already rounded.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    moments += 6 * row
    if tl.load(counted + row) == 0:
        number = tl.arange(0, 8)
        tl.store(moments + number, tl.where(number == 1, 1.0, 0.0), mask=number < 6)
        return
    logit_scale, softcap = over_temperature(logit_scale, softcap, inverse_temperature, row, True)
    lanes: tl.constexpr = BLOCK // VECTOR
    lane = tl.arange(0, lanes)
    zeros = tl.zeros((lanes,), dtype=tl.float32)
    m = zeros + LOWEST
    d = zeros
    distance = zeros
    squares = zeros
    apart = zeros
    best = tl.zeros((lanes,), dtype=tl.int64)
    anchor = 0.0
    if CONTINUES:
        # The first lane continues where the block before ended.
        m = tl.where(lane == 0, tl.load(moments), m)
        d = tl.where(lane == 0, tl.load(moments + 1), d)
        if ENTROPY:
            distance = tl.where(lane == 0, tl.load(moments + 2) * LOG2E, distance)
        if MEAN:
            apart = tl.where(lane == 0, tl.load(moments + 3), apart)
            anchor = tl.load(moments + 5)
        if COLLISION:
            squares = tl.where(lane == 0, tl.load(moments + 4), squares)
        if prediction is not None:
            best = tl.where(lane == 0, tl.load(prediction + row), best)
    elif MEAN:
        # The median of three: the first alone may be far from the others, so that their sum would cancel.
        a = tl.load(base)
        b = tl.load(base + tl.minimum(1, width - 1))
        c = tl.load(base + tl.minimum(2, width - 1))
        median = tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))
        anchor = capped(median, logit_scale, softcap, HAS_SOFTCAP)
        # Twice a number so large would be infinite.
        anchor = tl.where(tl.abs(anchor) < 1e30, anchor, 0.0)
    offset = lane[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in range(0, width, BLOCK):
        column = start + offset
        mask = column < width
        x = capped(tl.load(base + column, mask=mask, other=float("-inf")), logit_scale, softcap, HAS_SOFTCAP)
        if MEAN:
            around = tl.where(mask, x - anchor, 0.0)
            if class_weight is not None:
                around = around * tl.load(class_weight + column, mask=mask, other=0.0).to(tl.float32)
            apart += tl.sum(around, 1)
        if not KEEPS_LOWEST:
            x = tl.where(mask, x, float("-inf"))
        before = m
        m, d, distance, squares = grown(m, d, distance, squares, x, ENTROPY, COLLISION)
        if prediction is not None:
            best = tl.where(m > before, first + start + lane * VECTOR + tl.argmax(x, 1), best)
    top, exp_sum, distance, squares = met(m, d, distance, squares, ENTROPY, COLLISION)
    tl.store(moments, top)
    tl.store(moments + 1, exp_sum)
    tl.store(moments + 2, distance * LN2 if ENTROPY else 0.0)
    tl.store(moments + 3, tl.sum(apart, 0) if MEAN else 0.0)
    tl.store(moments + 4, squares if COLLISION else 0.0)
    tl.store(moments + 5, anchor if MEAN else 0.0)
    if prediction is not None:
        tl.store(prediction + row, tl.min(tl.where(m == top, best, first + width), 0))


@triton.jit
def selected_kernel(
    logits, index, inverse_temperature, out, row_stride, width, first, count, entries, logit_scale, softcap,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program takes a block of the chosen classes of all rows, and stores x of those in the block of classes."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = entry // count
    column = tl.load(index + entry, mask=entry < entries, other=-1) - first
    inside = (entry < entries) & (column >= 0) & (column < width)
    logit_scale, softcap = over_temperature(logit_scale, softcap, inverse_temperature, row, inside)
    x = capped(tl.load(logits + row * row_stride + column, mask=inside, other=0.0), logit_scale, softcap, HAS_SOFTCAP)
    tl.store(out + entry, x, mask=inside)


@triton.jit
def derivative_kernel(
    logits, counted, inverse_temperature, class_weight, moments, terms, out, row_stride, out_stride, width, logit_scale,
    softcap, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one block of one row's gradient but for its chosen classes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    out += row * out_stride
    if tl.load(counted + row) == 0:
        tl.store(out + column, tl.zeros((BLOCK,), dtype=out.dtype.element_ty), mask=mask)
        return
    logit_scale, softcap = over_temperature(logit_scale, softcap, inverse_temperature, row, True)
    loaded = tl.load(logits + row * row_stride + column, mask=mask, other=0.0)
    # The mask keeps the product that x may be from being fused into x - m, where m is a rounded one.
    x = tl.where(mask, capped(loaded, logit_scale, softcap, HAS_SOFTCAP), 0.0)
    d = slope_at(
        x - tl.load(moments + 6 * row), tl.load(moments + 6 * row + 1), terms, row, class_weight, column, mask, True
    )
    d = through_cap(d, loaded, logit_scale, softcap, HAS_SOFTCAP)
    tl.store(out + column, d.to(out.dtype.element_ty), mask=mask)


@triton.jit
def chosen_kernel(
    logits, index, gradient, inverse_temperature, class_weight, moments, terms, values, row_stride, first, count,
    entries, width, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes the gradient at a block of the chosen classes of all rows, of those in the block of classes.

    Where a class is chosen several times each gets the sum of all its upstream gradients, so that they write the same.
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = entry // count
    column = tl.load(index + entry, mask=entry < entries, other=-1) - first
    inside = (entry < entries) & (column >= 0) & (column < width)
    upstream = tl.zeros((BLOCK,), dtype=tl.float32)
    for other in range(0, count):
        theirs = tl.load(index + row * count + other, mask=inside, other=-1) - first
        grad = tl.load(gradient + row * count + other, mask=inside, other=0.0)
        upstream += tl.where(theirs == column, grad, 0.0)
    logit_scale, softcap = over_temperature(logit_scale, softcap, inverse_temperature, row, inside)
    loaded = tl.load(logits + row * row_stride + column, mask=inside, other=0.0)
    x = tl.where(inside, capped(loaded, logit_scale, softcap, HAS_SOFTCAP), 0.0)
    below = x - tl.load(moments + 6 * row, mask=inside, other=0.0)
    exp_sum = tl.load(moments + 6 * row + 1, mask=inside, other=1.0)
    d = upstream + slope_at(below, exp_sum, terms, row, class_weight, column, inside, inside)
    tl.store(values + entry, through_cap(d, loaded, logit_scale, softcap, HAS_SOFTCAP), mask=inside)


@triton.jit
def scatter_kernel(index, values, out, out_stride, first, count, entries, width, BLOCK: tl.constexpr):
    """One program writes a block of these values to their classes, rounded once."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(index + entry, mask=entry < entries, other=-1) - first
    inside = (entry < entries) & (column >= 0) & (column < width)
    value = tl.load(values + entry, mask=inside, other=0.0)
    tl.store(out + (entry // count) * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def exponentials_kernel(
    logits, counted, inverse_temperature, moments, total, row_stride, total_stride, width, hidden, logit_scale, softcap,
    HAS_SOFTCAP: tl.constexpr, CONTINUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one row of a block of classes for its largest x, and again from the cache to overwrite it."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    moments += 6 * row
    lane = tl.arange(0, BLOCK)
    if tl.load(counted + row) == 0:
        number = tl.arange(0, 8)
        tl.store(moments + number, tl.where(number == 1, 1.0, 0.0), mask=number < 6)
        for start in range(0, width, BLOCK):
            tl.store(base + start + lane, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=start + lane < width)
        return
    logit_scale, softcap = over_temperature(logit_scale, softcap, inverse_temperature, row, True)
    highest = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = column < width
        loaded = tl.load(base + column, mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.where(mask, capped(loaded, logit_scale, softcap, HAS_SOFTCAP), float("-inf"))
        highest = tl.maximum(highest, x)
    top = tl.max(highest, 0)
    exp_sum = 0.0
    if CONTINUES:
        before = tl.load(moments)
        exp_sum = tl.load(moments + 1)
        if top > before:
            factor = tl.exp2((before - top) * LOG2E)
            exp_sum *= factor
            for start in range(0, hidden, BLOCK):
                inside = start + lane < hidden
                at = total + row * total_stride + start + lane
                tl.store(at, tl.load(at, mask=inside) * factor, mask=inside)
        top = tl.maximum(before, top)
    else:
        number = tl.arange(0, 8)
        tl.store(moments + number, tl.zeros((8,), dtype=tl.float32), mask=(number > 1) & (number < 6))
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        mask = column < width
        loaded = tl.load(base + column, mask=mask, other=0.0, eviction_policy="evict_first")
        # The mask keeps the product that x may be from being fused into x - m, where m is a rounded one.
        x = tl.where(mask, capped(loaded, logit_scale, softcap, HAS_SOFTCAP), float("-inf"))
        e = tl.exp2((x - top) * LOG2E)
        sums += e
        if HAS_SOFTCAP:
            e = e * bend(loaded, logit_scale, softcap)
        tl.store(base + column, e.to(logits.dtype.element_ty), mask=mask)
    tl.store(moments, top)
    tl.store(moments + 1, exp_sum + tl.sum(sums, 0))


@triton.jit
def combined_kernel(
    out, total, factor, weight, index, slope, out_stride, total_stride, weight_row, weight_column, width, classes,
    count, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(total + row * total_stride + column, mask=mask, other=0.0).to(tl.float32)
    value *= tl.load(factor + row)
    for k in range(0, count):
        chosen = tl.load(index + row * count + k)
        if (chosen >= 0) & (chosen < classes):
            chosen_weight = tl.load(weight + chosen * weight_row + column * weight_column, mask=mask, other=0.0)
            value += tl.load(slope + row * count + k) * chosen_weight.to(tl.float32)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=mask)


statistics_launch = Launcher(statistics_kernel)
selected_launch = Launcher(selected_kernel)
derivative_launch = Launcher(derivative_kernel)
chosen_launch = Launcher(chosen_kernel)
scatter_launch = Launcher(scatter_kernel)
exponentials_launch = Launcher(exponentials_kernel)
combined_launch = Launcher(combined_kernel)
