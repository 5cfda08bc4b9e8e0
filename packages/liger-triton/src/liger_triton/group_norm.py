# SPDX-License-Identifier: Apache-2.0
"""group_norm in Triton.

Groups that a program can hold are read once (`_group_held`). Of larger ones, if there are enough for the device, one program walks a group twice,
the second time mostly through the L2 cache. Fewer: each is split over programs, whose statistics a second kernel merges. Their backward
pass sums every channel, or parts of it, then takes the means over groups and the sums over samples, then reads everything again, the other
way round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs, differentiable
from liger_triton._group_held import NEAR, backward, cached_tiles, forward, holds, together, warps_of, write_tile
from liger_triton._norm_sum import read, zero
from liger_triton.launch import Launcher, TritonKernel, cdiv, contiguous, dense_like, power_of_two, processors, supported, wait

# Numbers of a group, which are counted in 32 bits, as far as the last tile goes.
MOST = 2**31 - 2**16
# Channels of a program that adds their sums over the samples.
STRIP = 16


class Shape(NamedTuple):
    """Numbers of a tile, its warps, and the programs for each multiprocessor below which rows are split into parts."""

    tile: int
    warps: int
    programs: int


# Of large groups, of groups that these tiles would fit badly, and of the backward pass. Forward, a thread has 16 numbers of a tile, and so adds
# several before threads add theirs: see `fuses`.
FORWARD, SMALL, BACKWARD = Shape(8192, 16, 4), Shape(2048, 4, 4), Shape(2048, 4, 8)


def group_norm(x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    supported(x, weight, bias)
    if (size := x.shape[1:].numel() // num_groups) > MOST:
        raise Unsupported(f"groups of {size} numbers, more than {MOST}")
    result: Tensor = _group_norm(x, num_groups, weight, bias, eps)
    return result


def _allocate(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Outputs:
    rows = x.shape[0] * num_groups
    return dense_like(x), x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _launch(
    y: Tensor, mean: Tensor, inverse: Tensor, /, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    if x.numel() == 0:
        return
    x, weight, bias = x.contiguous(), contiguous(weight), contiguous(bias)
    rows, channels = mean.numel(), x.shape[1] // num_groups
    space = x.shape[2:].numel()
    size = channels * space
    if holds(size, rows, x):
        forward(x, weight, bias, y, mean, inverse, num_groups, channels, space, eps)
        return
    shape = SMALL if size < 4 * FORWARD.tile and size % FORWARD.tile else FORWARD
    few = rows < processors(x.device)
    part, parts = parts_of(size, shape.tile, rows, shape.programs * processors(x.device)) if few else (size, 1)
    found = None if parts == 1 else x.new_empty((3, rows, parts), dtype=torch.float32)
    options = {
        "PARTS": max(power_of_two(parts), 32 * shape.warps), "TOGETHER": together(space, shape.tile), "BLOCK": shape.tile,
        "num_warps": shape.warps,
    }  # fmt: skip
    args = (x, weight, bias, y, mean, inverse, found, num_groups, channels, space, part, eps)
    if found is None:
        forward_launch((rows, parts), *args, EARLY=False, FIRST=False, **options)
    else:
        forward_launch((rows, parts), *args, EARLY=False, FIRST=True, **options)
        forward_launch.after((rows, parts), *args, FIRST=False, **options)


def _allocate_backward(
    grad_y: Tensor, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor,
    needs: list[bool],
) -> Outputs:  # fmt: skip
    return tuple(dense_like(t) if need and t is not None else None for need, t in zip(needs, (x, weight, bias), strict=True))


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /, grad_y: Tensor, x: Tensor, num_groups: int,
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0:
        zero(grad_weight, grad_bias)
        return
    x, grad_y, weight = x.contiguous(), grad_y.contiguous(), contiguous(weight)
    samples, channels = x.shape[:2]
    rows, groups, per_group, space = samples * channels, mean.numel(), channels // num_groups, x.shape[2:].numel()
    tiles = cached_tiles(per_group, space, groups, x)
    if tiles is not None:
        sums = backward(tiles, grad_y, x, weight, mean, inverse, grad_x, num_groups)
        finish(sums, None, weight, grad_weight, grad_bias, per_group, space)
        return
    columns = min(BACKWARD.tile, power_of_two(space))
    # Small channels share a program.
    several = max(1, min(64, BACKWARD.tile // columns))
    warps = warps_of(several * columns, BACKWARD.warps)
    part, parts = parts_of(space, columns, cdiv(rows, several), BACKWARD.programs * processors(x.device))
    sums = x.new_empty((2, samples, parts, channels), dtype=torch.float32)
    means = None if grad_x is None else x.new_empty((2, groups), dtype=torch.float32)
    grid = cdiv(rows, several), parts
    options = {"ROWS": several, "BLOCK": columns, "WHOLE": space % columns == 0 and rows % several == 0, "num_warps": warps}
    sum_launch(grid, grad_y, x, mean, inverse, sums, rows, channels, per_group, space, part, **options)
    finish(sums, means, weight, grad_weight, grad_bias, per_group, space)
    if grad_x is not None:
        backward_launch.after(grid, grad_y, x, weight, mean, inverse, means, grad_x, rows, channels, per_group, space, part, **options)


def finish(
    sums: Tensor, means: Tensor | None, weight: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, per_group: int, space: int,
) -> None:  # fmt: skip
    """From the sums of parts of channels, the means over groups and the sums over samples."""
    samples, parts, channels = sums.shape[1:]
    strips = 0 if grad_weight is None and grad_bias is None else cdiv(channels, STRIP)
    first = 0 if means is None else means.shape[1]
    if first + strips:
        mean_launch.after(
            (first + strips,), weight, sums, means, grad_weight, grad_bias, first, samples, channels, per_group, space, parts,
            GROUP=max(128, min(1024, power_of_two(per_group * parts))), ROWS=64, STRIP=STRIP, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


def parts_of(size: int, tile: int, rows: int, programs: int) -> tuple[int, int]:
    """Numbers of a part, in whole tiles, and the parts of each row: so many that there are about as many programs as asked for."""
    tiles = cdiv(size, tile)
    part = cdiv(tiles, min(64, tiles, cdiv(programs, rows))) * tile
    return part, cdiv(size, part)


_group_norm = differentiable(
    TritonKernel("group_norm", _allocate, _launch),
    TritonKernel("group_norm_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def moments(x, start, stop, BLOCK: tl.constexpr):
    """Count, mean and squares around it of x[start:stop], each thread's NEAR neighbors first."""
    begin = tl.arange(0, BLOCK // NEAR) * NEAR
    near = begin[:, None] + tl.arange(0, NEAR)[None, :]
    average = tl.zeros((BLOCK // NEAR,), dtype=tl.float32)
    squares = tl.zeros((BLOCK // NEAR,), dtype=tl.float32)
    tiles = (stop - start) // BLOCK
    for tile in range(tiles):
        value = read(x + start + tile * BLOCK + near, None, "evict_last")
        middle = tl.sum(value, 1) * (1.0 / NEAR)
        around = value - middle[:, None]
        step = middle - average
        # In a whole tile, all see equally many.
        share = 1.0 / (tile + 1.0)
        average += step * share
        # In this order, nothing overflows if there are no values yet.
        squares += tl.sum(around * around, 1) + step * (step * (share * tile * NEAR))
    seen = tl.full((BLOCK // NEAR,), NEAR, dtype=tl.float32) * tiles
    last = start + tiles * BLOCK
    if last < stop:
        mask = last + near < stop
        value = read(x + last + near, mask, "evict_last")
        count = tl.minimum(tl.maximum(stop - last - begin, 0), NEAR).to(tl.float32)
        middle = tl.sum(value, 1) / tl.maximum(count, 1.0)
        around = tl.where(mask, value - middle[:, None], 0.0)
        step = middle - average
        share = count / tl.maximum(seen + count, 1.0)
        average += step * share
        squares += tl.sum(around * around, 1) + step * (step * (share * seen))
        seen += count
    return merged(seen, average, squares)


@triton.jit
def merged(count, average, squares):
    """The moments of the union of several sets."""
    total = tl.sum(count, 0)
    mean = tl.div_rn(tl.sum(average * count, 0), total)
    away = average - mean
    return total, mean, tl.sum(squares + away * away * count, 0)


@triton.jit
def forward_kernel(
    x, weight, bias, y, mean, inverse, found, groups, channels, space, part, eps,
    EARLY: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, p) takes part p of group r. FIRST: it writes the moments of its part; else it normalizes it, by the moments of all."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    parts = tl.num_programs(1)
    size = channels * space
    start = tl.program_id(1) * part
    stop = start + tl.minimum(part, size - start)
    x += row * size
    if FIRST:
        count, average, squares = moments(x, start, stop, BLOCK)
        place = found + row * parts + tl.program_id(1)
        tl.store(place, count)
        tl.store(place + rows * parts, average)
        tl.store(place + 2 * rows * parts, squares)
    else:
        if found is None:
            count, average, squares = moments(x, start, stop, BLOCK)
        else:
            number = tl.arange(0, PARTS)
            source = found + row * parts + number
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
        # Backward through the tiles, because the last ones are still in the caches.
        tiles = (stop - start) // BLOCK
        last = start + tiles * BLOCK
        if last < stop:
            normalize(x, weight, bias, y, average, scale, channel, last, space, stop, TOGETHER, BLOCK)
        for passed in range(tiles):
            first = start + (tiles - 1 - passed) * BLOCK
            normalize(x, weight, bias, y, average, scale, channel, first, space, None, TOGETHER, BLOCK)


@triton.jit
def normalize(x, weight, bias, y, average, scale, channel, first, space, stop, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Read a tile of x, and write it as `write_tile` does."""
    place = first + (tl.arange(0, BLOCK // NEAR) * NEAR)[:, None] + tl.arange(0, NEAR)[None, :]
    value = read(x + place, None if stop is None else place < stop, "evict_first")
    write_tile(y, value, weight, bias, average, scale, channel, first, space, stop, TOGETHER, BLOCK)


@triton.jit
def sum_kernel(
    grad_y, x, mean, inverse, sums, rows, channels, per_group, space, part,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (r, p) sums grad_y · n and grad_y of part p of ROWS channels, n the normalized x. WHOLE: no tile needs a mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    average = tl.load(mean + row // per_group, mask=inside, other=0.0)[:, None]
    scale = tl.load(inverse + row // per_group, mask=inside, other=0.0)[:, None]
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    totals = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    start = tl.program_id(1) * part
    for first in tl.range(start, start + tl.minimum(part, space - start), BLOCK, num_stages=3):
        place = first + tl.arange(0, BLOCK)
        mask = None if WHOLE else inside[:, None] & (place < space)[None, :]
        grad = read(grad_y + row[:, None] * space + place[None, :], mask, "evict_last")
        value = read(x + row[:, None] * space + place[None, :], mask, "evict_last")
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
    """Program r < first writes the means of g · n and g over group r, g = grad_y · weight; one beyond, a strip of the sums over samples."""
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
            place = (sample * parts + member // per_group) * channels + channel
            factor = 1.0 if weight is None else read(weight + channel, mask)
            product += read(sums + place, mask) * factor
            total += read(totals + place, mask) * factor
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
            place = (start + row).to(tl.int64)[:, None] * channels + column[None, :]
            total += read(sums + place, (start + row < count)[:, None] & mask[None, :])
        tl.store(gradient + column, tl.sum(total, 0).to(gradient.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, weight, mean, inverse, means, grad_x, rows, channels, per_group, space, part,
    EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """grad_x = inverse · (g - mean(g) - n · mean(g · n)), with g = grad_y · weight and the means over a group."""
    wait(EARLY)
    # From the end of what sum_kernel read to its begin: the last of it is still in the caches.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    group = row // per_group
    average = tl.load(mean + group, mask=inside, other=0.0)[:, None]
    scale = tl.load(inverse + group, mask=inside, other=0.0)[:, None]
    product = tl.load(means + group, mask=inside, other=0.0)[:, None]
    total = tl.load(means + rows // per_group + group, mask=inside, other=0.0)[:, None]
    factor = 1.0 if weight is None else read(weight + row % channels, inside)[:, None]
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * part
    tiles = tl.cdiv(tl.minimum(part, space - start), BLOCK)
    for passed in tl.range(0, tiles, num_stages=3):
        place = start + (tiles - 1 - passed) * BLOCK + tl.arange(0, BLOCK)
        mask = None if WHOLE else inside[:, None] & (place < space)[None, :]
        grad = read(grad_y + row[:, None] * space + place[None, :], mask, "evict_first")
        value = read(x + row[:, None] * space + place[None, :], mask, "evict_first")
        value = (value - average) * scale
        result = (grad * factor - total - value * product) * scale
        tl.store(
            grad_x + row[:, None] * space + place[None, :], result.to(grad_x.dtype.element_ty), mask=mask, eviction_policy="evict_first"
        )


forward_launch = Launcher(forward_kernel)
sum_launch = Launcher(sum_kernel)
mean_launch = Launcher(mean_kernel)
backward_launch = Launcher(backward_kernel)
