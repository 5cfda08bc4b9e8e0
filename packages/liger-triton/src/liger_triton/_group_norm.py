# SPDX-License-Identifier: Apache-2.0
"""The kernels of group_norm."""

import triton
import triton.language as tl

from liger_triton._group_held import NEAR, write_tile
from liger_triton._norm import read
from liger_triton.launch import Launcher, wait


@triton.jit
def moments(x, start, stop, BLOCK: tl.constexpr):
    """Return count, mean and sum of squared deviations of x[start:stop], each thread's NEAR neighbors first."""
    begin = tl.arange(0, BLOCK // NEAR) * NEAR
    near = begin[:, None] + tl.arange(0, NEAR)[None, :]
    average = tl.zeros((BLOCK // NEAR,), dtype=tl.float32)
    squares = tl.zeros((BLOCK // NEAR,), dtype=tl.float32)
    tiles = (stop - start) // BLOCK
    for tile in range(tiles):
        value = read(x + start + tile * BLOCK + near, None, "evict_last")
        near_mean = tl.sum(value, 1) * (1.0 / NEAR)
        deviation = value - near_mean[:, None]
        step = near_mean - average
        # In a whole tile, every thread has seen equally many elements.
        share = 1.0 / (tile + 1.0)
        average += step * share
        # In this order, nothing overflows if there are no values yet.
        squares += tl.sum(deviation * deviation, 1) + step * (step * (share * tile * NEAR))
    seen = tl.full((BLOCK // NEAR,), NEAR, dtype=tl.float32) * tiles
    last = start + tiles * BLOCK
    if last < stop:
        mask = last + near < stop
        value = read(x + last + near, mask, "evict_last")
        count = tl.minimum(tl.maximum(stop - last - begin, 0), NEAR).to(tl.float32)
        near_mean = tl.sum(value, 1) / tl.maximum(count, 1.0)
        deviation = tl.where(mask, value - near_mean[:, None], 0.0)
        step = near_mean - average
        share = count / tl.maximum(seen + count, 1.0)
        average += step * share
        squares += tl.sum(deviation * deviation, 1) + step * (step * (share * seen))
        seen += count
    return merged(seen, average, squares)


@triton.jit
def merged(count, average, squares):
    """Return the moments of the union of several sets."""
    total = tl.sum(count, 0)
    mean = tl.div_rn(tl.sum(average * count, 0), total)
    deviation = average - mean
    return total, mean, tl.sum(squares + deviation * deviation * count, 0)


@triton.jit
def forward_kernel(
    x, weight, bias, y, mean, inverse, part_moments, groups, channels, space, part_size, eps,
    EARLY: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, p) processes part p of group r.

    FIRST: it writes the moments of its part; otherwise it normalizes the part by the moments of all.
    """
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    parts = tl.num_programs(1)
    size = channels * space
    start = tl.program_id(1) * part_size
    stop = start + tl.minimum(part_size, size - start)
    x += row * size
    if FIRST:
        count, average, squares = moments(x, start, stop, BLOCK)
        target = part_moments + row * parts + tl.program_id(1)
        tl.store(target, count)
        tl.store(target + rows * parts, average)
        tl.store(target + 2 * rows * parts, squares)
    else:
        if part_moments is None:
            count, average, squares = moments(x, start, stop, BLOCK)
        else:
            number = tl.arange(0, PARTS)
            source = part_moments + row * parts + number
            count, average, squares = merged(
                tl.load(source, mask=number < parts, other=0.0),
                tl.load(source + rows * parts, mask=number < parts, other=0.0),
                tl.load(source + 2 * rows * parts, mask=number < parts, other=0.0),
            )
        scale = tl.rsqrt(squares / count + eps)
        if tl.program_id(1) == 0:
            tl.store(mean + row, average)
            tl.store(inverse + row, scale)
        channel = (row % groups) * channels
        y += row * size
        # The last tiles come first, because they are still in the caches.
        tiles = (stop - start) // BLOCK
        last = start + tiles * BLOCK
        if last < stop:
            normalize(x, weight, bias, y, average, scale, channel, last, space, stop, TOGETHER, BLOCK)
        for passed in range(tiles):
            first = start + (tiles - 1 - passed) * BLOCK
            normalize(x, weight, bias, y, average, scale, channel, first, space, None, TOGETHER, BLOCK)


@triton.jit
def normalize(
    x, weight, bias, y, average, scale, channel, first, space, stop, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):
    """Read a tile of x, and write it by `write_tile`."""
    offset = first + (tl.arange(0, BLOCK // NEAR) * NEAR)[:, None] + tl.arange(0, NEAR)[None, :]
    value = read(x + offset, None if stop is None else offset < stop, "evict_first")
    write_tile(y, value, weight, bias, average, scale, channel, first, space, stop, TOGETHER, BLOCK)


@triton.jit
def sum_kernel(
    grad_y, x, mean, inverse, sums, rows, channels, per_group, space, part_size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (r, p) sums grad_y · n and grad_y of part p of ROWS channels. WHOLE: no tile needs a mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    average = tl.load(mean + row // per_group, mask=inside, other=0.0)[:, None]
    scale = tl.load(inverse + row // per_group, mask=inside, other=0.0)[:, None]
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    totals = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    start = tl.program_id(1) * part_size
    for first in tl.range(start, start + tl.minimum(part_size, space - start), BLOCK, num_stages=3):
        column = first + tl.arange(0, BLOCK)
        mask = None if WHOLE else inside[:, None] & (column < space)[None, :]
        grad = read(grad_y + row[:, None] * space + column[None, :], mask, "evict_last")
        value = read(x + row[:, None] * space + column[None, :], mask, "evict_last")
        products += grad * ((value - average) * scale)
        totals += grad
    parts = tl.num_programs(1).to(tl.int64)
    target = sums + (row // channels * parts + tl.program_id(1)) * channels + row % channels
    tl.store(target, tl.sum(products, 1), mask=inside)
    tl.store(target + rows * parts, tl.sum(totals, 1), mask=inside)


@triton.jit
def mean_kernel(
    weight, sums, means, grad_weight, grad_bias, first, samples, channels, per_group, space, parts,
    EARLY: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Program r < first writes the means of g · n and g over group r; the others, strips of the sums over samples."""
    wait(EARLY)
    totals = sums + tl.cast(samples * parts, tl.int64) * channels
    program = tl.program_id(0)
    if program >= first:
        column = (program - first) * STRIP + tl.arange(0, STRIP)
        add_rows(sums, grad_weight, samples * parts, channels, column, ROWS, STRIP)
        add_rows(totals, grad_bias, samples * parts, channels, column, ROWS, STRIP)
    elif means is not None:
        groups = channels // per_group
        sample = (program // groups).to(tl.int64)
        product = tl.zeros((GROUP,), dtype=tl.float32)
        total = tl.zeros((GROUP,), dtype=tl.float32)
        for start in range(0, per_group * parts, GROUP):
            member = start + tl.arange(0, GROUP)
            mask = member < per_group * parts
            channel = program % groups * per_group + member % per_group
            offset = (sample * parts + member // per_group) * channels + channel
            factor = 1.0 if weight is None else read(weight + channel, mask)
            product += read(sums + offset, mask) * factor
            total += read(totals + offset, mask) * factor
        size = per_group * space
        tl.store(means + program, tl.sum(product, 0) / size)
        tl.store(means + first + program, tl.sum(total, 0) / size)


@triton.jit
def add_rows(sums, gradient, count, channels, column, ROWS: tl.constexpr, STRIP: tl.constexpr):
    """Write the sum of all rows, if it is requested."""
    if gradient is not None:
        mask = column < channels
        row = tl.arange(0, ROWS)
        total = tl.zeros((ROWS, STRIP), dtype=tl.float32)
        for start in range(0, count, ROWS):
            offset = (start + row).to(tl.int64)[:, None] * channels + column[None, :]
            total += read(sums + offset, (start + row < count)[:, None] & mask[None, :])
        tl.store(gradient + column, tl.sum(total, 0).to(gradient.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, weight, mean, inverse, means, grad_x, rows, channels, per_group, space, part_size,
    EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute grad_x = inverse · (g - mean(g) - n · mean(g · n)), with g = grad_y · weight and means over a group."""
    wait(EARLY)
    # From the end to the begin of sum_kernel's reads, because the last ones are still in the caches.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    group = row // per_group
    average = tl.load(mean + group, mask=inside, other=0.0)[:, None]
    scale = tl.load(inverse + group, mask=inside, other=0.0)[:, None]
    product = tl.load(means + group, mask=inside, other=0.0)[:, None]
    total = tl.load(means + rows // per_group + group, mask=inside, other=0.0)[:, None]
    factor = 1.0 if weight is None else read(weight + row % channels, inside)[:, None]
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * part_size
    tiles = tl.cdiv(tl.minimum(part_size, space - start), BLOCK)
    for passed in tl.range(0, tiles, num_stages=3):
        column = start + (tiles - 1 - passed) * BLOCK + tl.arange(0, BLOCK)
        mask = None if WHOLE else inside[:, None] & (column < space)[None, :]
        grad = read(grad_y + row[:, None] * space + column[None, :], mask, "evict_first")
        value = read(x + row[:, None] * space + column[None, :], mask, "evict_first")
        value = (value - average) * scale
        result = (grad * factor - total - value * product) * scale
        tl.store(
            grad_x + row[:, None] * space + column[None, :],
            result.to(grad_x.dtype.element_ty),
            mask=mask,
            eviction_policy="evict_first",
        )


forward_launch = Launcher(forward_kernel)
sum_launch = Launcher(sum_kernel)
mean_launch = Launcher(mean_kernel)
backward_launch = Launcher(backward_kernel)
