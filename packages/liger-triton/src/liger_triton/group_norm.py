# SPDX-License-Identifier: Apache-2.0
"""group_norm in Triton.

Enough groups for the device: one program walks a group twice, the second time mostly through the L2 cache. Fewer: each is split over
programs, whose statistics a second kernel merges. The backward pass sums every channel first, so that its programs are many in any case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs, differentiable
from liger_triton._norm_sum import column_sum_launch, zero
from liger_triton.launch import Launcher, TritonKernel, cdiv, contiguous, dense_like, power_of_two, processors, supported

NEIGHBORS = 8
# Numbers of a group, which are counted in 32 bits, as far as the last tile goes.
MOST = 2**31 - 2**16


class Shape(NamedTuple):
    """Columns of a tile, and its warps."""

    tile: int
    warps: int


# Tiles of large groups, of groups that these would fit badly, of the backward pass, and of its pass over few channels.
FORWARD, SMALL, BACKWARD, FEW = Shape(4096, 8), Shape(2048, 4), Shape(1024, 4), Shape(8192, 16)


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
    x = x.contiguous()
    rows, channels = mean.numel(), x.shape[1] // num_groups
    space = x.shape[2:].numel()
    size = channels * space
    shape = SMALL if size < 4 * FORWARD.tile and size % FORWARD.tile else FORWARD
    tile = max(NEIGHBORS, min(shape.tile, power_of_two(size)))
    warps = warps_of(tile, shape.warps)
    parts = min(64, cdiv(size, tile), cdiv(4 * processors(x.device), rows)) if rows < processors(x.device) else 1
    # Parts are whole tiles.
    part = cdiv(cdiv(size, tile), parts) * tile
    parts = cdiv(size, part)
    found = None if parts == 1 else x.new_empty((3, rows, parts), dtype=torch.float32)
    options = {
        "PARTS": max(power_of_two(parts), 32 * warps), "TOGETHER": space % NEIGHBORS == 0, "BLOCK": tile, "NEAR": NEIGHBORS, "num_warps": warps,
    }  # fmt: skip
    args = (x, contiguous(weight), contiguous(bias), y, mean, inverse, found, num_groups, channels, space, part, eps)
    if found is not None:
        forward_launch((rows, parts), *args, FIRST=True, **options)
    forward_launch((rows, parts), *args, FIRST=False, **options)


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
    space, per_group = x.shape[2:].numel(), channels // num_groups
    sums = x.new_empty((2, samples, channels), dtype=torch.float32)
    shape = FEW if samples * channels < 4 * processors(x.device) else BACKWARD
    columns = min(shape.tile, power_of_two(space))
    # Small channels share a program.
    several = max(1, min(64, BACKWARD.tile // columns))
    warps = warps_of(several * columns, shape.warps)
    sum_launch(
        (cdiv(samples * channels, several),), grad_y, x, mean, inverse, sums, samples * channels, per_group, space,
        ROWS=several, BLOCK=columns, num_warps=warps,
    )  # fmt: skip
    if grad_x is not None:
        backward_launch(
            (cdiv(samples * channels, several), cdiv(space, columns)), grad_y, x, weight, mean, inverse, sums, grad_x,
            samples * channels, channels, per_group, space,
            ROWS=several, BLOCK=columns, GROUP=max(power_of_two(per_group), 32 * warps // several), num_warps=warps,
        )  # fmt: skip
    for number, gradient in enumerate((grad_weight, grad_bias)):
        if gradient is not None:
            column_sum_launch((cdiv(channels, 16), 1), sums[number : number + 1], gradient, None, samples, channels, ROWS=128, BLOCK=16)


def warps_of(elements: int, most: int) -> int:
    """At most one for so many elements that each thread has NEIGHBORS: of fewer, several threads would write one and the same sum."""
    return max(1, min(most, elements // (32 * NEIGHBORS)))


_group_norm = differentiable(
    TritonKernel("group_norm", _allocate, _launch),
    TritonKernel("group_norm_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def moments(x, start, stop, BLOCK: tl.constexpr, NEAR: tl.constexpr):
    """Count, mean and squares around it of x[start:stop], each thread's NEAR neighbors first."""
    near = tl.arange(0, BLOCK // NEAR)[:, None] * NEAR + tl.arange(0, NEAR)[None, :]
    average = tl.zeros((BLOCK // NEAR,), dtype=tl.float32)
    squares = tl.zeros((BLOCK // NEAR,), dtype=tl.float32)
    seen = tl.zeros((BLOCK // NEAR,), dtype=tl.float32)
    for first in range(start, stop, BLOCK):
        place = first + near
        mask = place < stop
        value = tl.load(x + place, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        count = tl.sum(mask.to(tl.float32), 1)
        middle = tl.sum(value, 1) / tl.maximum(count, 1.0)
        around = tl.where(mask, value - middle[:, None], 0.0)
        share = count / tl.maximum(seen + count, 1.0)
        step = middle - average
        average += step * share
        # In this order, nothing overflows if there are no values yet.
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
    FIRST: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Program (r, p) takes part p of group r. FIRST: it writes the moments of its part; else it normalizes it, by the moments of all."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    parts = tl.num_programs(1)
    size = channels * space
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, size)
    x += row * size
    if FIRST:
        count, average, squares = moments(x, start, stop, BLOCK, NEAR)
        place = found + row * parts + tl.program_id(1)
        tl.store(place, count)
        tl.store(place + rows * parts, average)
        tl.store(place + 2 * rows * parts, squares)
    else:
        if found is None:
            count, average, squares = moments(x, start, stop, BLOCK, NEAR)
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
        for first in range(start, stop, BLOCK):
            begin = first + tl.arange(0, BLOCK // NEAR) * NEAR
            place = begin[:, None] + tl.arange(0, NEAR)[None, :]
            mask = place < stop
            value = (tl.load(x + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) - average) * scale
            # TOGETHER: neighbors have one channel, so that one division serves them.
            if weight is not None:
                if TOGETHER:
                    value = value * tl.load(weight + channel + begin // space, mask=begin < stop, other=0.0).to(tl.float32)[:, None]
                else:
                    value = value * tl.load(weight + channel + place // space, mask=mask, other=0.0).to(tl.float32)
            if bias is not None:
                if TOGETHER:
                    value = value + tl.load(bias + channel + begin // space, mask=begin < stop, other=0.0).to(tl.float32)[:, None]
                else:
                    value = value + tl.load(bias + channel + place // space, mask=mask, other=0.0).to(tl.float32)
            tl.store(y + row * size + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(grad_y, x, mean, inverse, sums, rows, per_group, space, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program sums grad_y · n and grad_y of ROWS channels, n the normalized x."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    average = tl.load(mean + row // per_group, mask=inside, other=0.0)[:, None]
    scale = tl.load(inverse + row // per_group, mask=inside, other=0.0)[:, None]
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    totals = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, space, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (place < space)[None, :]
        grad = tl.load(grad_y + row[:, None] * space + place[None, :], mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        value = tl.load(x + row[:, None] * space + place[None, :], mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        products += grad * ((value - average) * scale)
        totals += grad
    tl.store(sums + row, tl.sum(products, 1), mask=inside)
    tl.store(sums + rows + row, tl.sum(totals, 1), mask=inside)


@triton.jit
def backward_kernel(
    grad_y, x, weight, mean, inverse, sums, grad_x, rows, channels, per_group, space,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """grad_x = inverse · (g - mean(g) - n · mean(g · n)) of a tile of ROWS channels, with g = grad_y · weight and the means over a group."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    group = row // per_group
    member = tl.arange(0, GROUP)
    beside = group[:, None] * per_group + member[None, :]
    held = inside[:, None] & (member < per_group)[None, :]
    products = tl.load(sums + beside, mask=held, other=0.0)
    totals = tl.load(sums + rows + beside, mask=held, other=0.0)
    if weight is not None:
        factors = tl.load(weight + beside % channels, mask=held, other=0.0).to(tl.float32)
        products = products * factors
        totals = totals * factors
    size = per_group * space
    product = (tl.sum(products, 1) / size)[:, None]
    total = (tl.sum(totals, 1) / size)[:, None]
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = inside[:, None] & (place < space)[None, :]
    grad = tl.load(grad_y + row[:, None] * space + place[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row[:, None] * space + place[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(inverse + group, mask=inside, other=0.0)[:, None]
    value = (value - tl.load(mean + group, mask=inside, other=0.0)[:, None]) * scale
    if weight is not None:
        grad = grad * tl.load(weight + row % channels, mask=inside, other=0.0).to(tl.float32)[:, None]
    result = (grad - total - value * product) * scale
    tl.store(grad_x + row[:, None] * space + place[None, :], result.to(grad_x.dtype.element_ty), mask=mask)


forward_launch = Launcher(forward_kernel)
sum_launch = Launcher(sum_kernel)
backward_launch = Launcher(backward_kernel)
