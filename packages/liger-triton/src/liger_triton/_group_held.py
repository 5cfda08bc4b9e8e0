# SPDX-License-Identifier: Apache-2.0
"""Groups that one program holds, for group_norm: in registers forward, and in its multiprocessor's cache backward.

On one H100 (bfloat16), 16 x 320 x 64 x 64 takes 33 µs forward, as a copy does, and 63 µs backward (a copy 47).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton._chunks import no_chunks
from liger_triton._norm import read
from liger_triton.launch import VECTOR, Launcher, cdiv, power_of_two, processors

# The neighboring elements of a thread.
NEAR = tl.constexpr(VECTOR)
# Numbers of a group that registers hold, bytes that are read again, and the most tiles of a group.
HELD, CACHED, TILES = 49152, 2**18, 32
# The most numbers of a tile, forward and backward.
TILE, TILE_BACKWARD = 4096, 2048


def holds(size: int, groups: int, like: Tensor) -> bool:
    """Whether each program holds a group of this size; few large groups are shared among programs instead."""
    return size <= TILE or (size <= HELD and groups >= processors(like.device))


class Tiles(NamedTuple):
    """The channels and columns of a tile, the tiles across a group's channels, and those along a channel's columns."""

    rows: int
    block: int
    across: int
    along: int


def cached_tiles(channels: int, space: int, groups: int, like: Tensor) -> Tiles | None:
    """Return the tiles, or None if programs would not find groups of this size in the cache again."""
    size = channels * space
    if (size > TILE and groups < processors(like.device)) or 2 * size * like.element_size() > CACHED:
        return None
    block = min(TILE_BACKWARD, power_of_two(space))
    rows = min(TILE_BACKWARD // block, power_of_two(channels))
    # Prefer channels that fill their tiles, if the tiles do not get too small.
    exact = channels & -channels
    if exact < rows and 2 * exact * block >= TILE_BACKWARD:
        rows = exact
    tiles = Tiles(rows, block, cdiv(channels, rows), cdiv(space, block))
    return tiles if tiles.across * tiles.along <= TILES else None


def warps_of(elements: int, most: int = 16) -> int:
    """Return the most warps whose threads have eight elements each: with fewer, several would write the same sum."""
    return max(1, min(most, elements // (32 * VECTOR)))


def together(space: int, tile: int) -> int:
    """Return how many adjacent elements are sure to have one channel: a tile's, a thread's, or one."""
    return next(count for count in (tile, VECTOR, 1) if space % count == 0)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, mean: Tensor, inverse: Tensor, groups: int,
    channels: int, space: int, eps: float,
) -> None:  # fmt: skip
    """Launch the forward pass; groups are those of a sample, channels those of a group."""
    size = channels * space
    tile = max(VECTOR, min(TILE if size > 4 * TILE else TILE // 2, power_of_two(size)))
    tiles = cdiv(size, tile)
    forward_launch(
        (mean.numel(),), x, weight, bias, y, mean, inverse, groups, channels, space, eps,
        TILES=tiles, EVEN=size % tile == 0, TOGETHER=together(space, tile), BLOCK=tile, num_warps=warps_of(tile),
        # Products may be fused only if a thread adds several squares first: see `fuses`.
        enable_fp_fusion=tiles > 1,
    )  # fmt: skip


def backward(
    tiles: Tiles, grad_y: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor,
    grad_x: Tensor | None, groups: int,
) -> Tensor:  # fmt: skip
    """Launch the backward pass, and return the sums (2, samples, 1, channels) of grad_y · n and of grad_y."""
    samples, channels, space = x.shape[0], x.shape[1] // groups, x.shape[2:].numel()
    sums = x.new_empty((2, samples, 1, x.shape[1]), dtype=torch.float32)
    backward_launch(
        (samples * groups,), grad_y, x, weight, mean, inverse, grad_x, sums, groups, channels, space,
        ACROSS=tiles.across, ALONG=tiles.along, ROWS=tiles.rows, BLOCK=tiles.block,
        WHOLE=channels % tiles.rows == 0 and space % tiles.block == 0, num_warps=warps_of(tiles.rows * tiles.block),
    )  # fmt: skip
    return sums


@triton.jit
def forward_kernel(
    x, weight, bias, y, mean, inverse, groups, channels, space, eps,
    TILES: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r normalizes group r. EVEN: the last tile is full, like the others."""
    row = tl.program_id(0).to(tl.int64)
    size = channels * space
    x += row * size
    y += row * size
    near = (tl.arange(0, BLOCK // NEAR) * NEAR)[:, None] + tl.arange(0, NEAR)[None, :]
    total = tl.zeros((BLOCK // NEAR, NEAR), dtype=tl.float32)
    values = no_chunks()
    for t in tl.static_range(TILES):
        offset = t * BLOCK + near
        values += (read(x + offset, None if EVEN or t < TILES - 1 else offset < size),)
        total += values[t]
    average = tl.div_rn(tl.sum(tl.sum(total, 1), 0), tl.cast(size, tl.float32))
    squares = tl.zeros((BLOCK // NEAR, NEAR), dtype=tl.float32)
    for t in tl.static_range(TILES):
        deviation = values[t] - average
        if not EVEN and t == TILES - 1:
            deviation = tl.where(t * BLOCK + near < size, deviation, 0.0)
        squares += deviation * deviation
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / size + eps)
    tl.store(mean + row, average)
    tl.store(inverse + row, scale)
    channel = (row % groups) * channels
    for t in tl.static_range(TILES):
        stop = None if EVEN or t < TILES - 1 else size
        write_tile(y, values[t], weight, bias, average, scale, channel, t * BLOCK, space, stop, TOGETHER, BLOCK)


@triton.jit
def write_tile(
    y, value, weight, bias, average, scale, channel, first, space, stop, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a tile of y up to stop, or all of it if stop is None."""
    begin = first + tl.arange(0, BLOCK // NEAR) * NEAR
    offset = begin[:, None] + tl.arange(0, NEAR)[None, :]
    mask = None if stop is None else offset < stop
    value = (value - average) * scale
    # TOGETHER adjacent elements have one channel, so one division serves them.
    if TOGETHER == BLOCK:
        number = first // space
        held = None
    elif TOGETHER == NEAR:
        number = (begin // space)[:, None]
        held = None if stop is None else (begin < stop)[:, None]
    else:
        number = offset // space
        held = mask
    if weight is not None:
        value = value * read(weight + channel + number, held)
    if bias is not None:
        value = value + read(bias + channel + number, held)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def backward_kernel(
    grad_y, x, weight, mean, inverse, grad_x, sums, groups, channels, space,
    ACROSS: tl.constexpr, ALONG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program r sums over group r, then reads it again for grad_x.

    With g = grad_y · weight and n the normalized x, grad_x = inverse · (g - mean(g) - n · mean(g · n)). A tile has ROWS
    channels. WHOLE: no tile needs a mask.
    """
    row = tl.program_id(0).to(tl.int64)
    average = tl.load(mean + row)
    scale = tl.load(inverse + row)
    start = row * channels * space
    first = row % groups * channels
    products = no_chunks()
    totals = no_chunks()
    for a in tl.static_range(ACROSS):
        member = a * ROWS + tl.arange(0, ROWS)
        product = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for s in tl.static_range(ALONG):
            column = s * BLOCK + tl.arange(0, BLOCK)
            offset = member[:, None] * space + column[None, :]
            mask = None if WHOLE else (member < channels)[:, None] & (column < space)[None, :]
            grad = read(grad_y + start + offset, mask)
            value = read(x + start + offset, mask)
            product += grad * ((value - average) * scale)
            total += grad
        # Only the neighbors of each thread are added here: threads wait for each other once, after all reads.
        products += (of_threads(product),)
        totals += (of_threads(total),)
    product = of_channels(products)
    total = of_channels(totals)
    member = tl.arange(0, product.shape[1])[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    inside = member < channels
    sums += row * channels
    tl.store(sums + member, product, mask=inside)
    tl.store(sums + tl.num_programs(0).to(tl.int64) * channels + member, total, mask=inside)
    if grad_x is not None:
        if weight is not None:
            factor = read(weight + first + member, inside)
            # The select prevents fusing the products into the sum: see `fuses`.
            product = tl.where(inside, product * factor, 0.0)
            total = tl.where(inside, total * factor, 0.0)
        size = tl.cast(channels * space, tl.float32)
        product_mean = tl.sum(tl.sum(product, 1), 0) / size
        mean_grad = tl.sum(tl.sum(total, 1), 0) / size
        # The last tiles come first, because they are most likely still in the cache.
        for passed in tl.static_range(ACROSS):
            member = (ACROSS - 1 - passed) * ROWS + tl.arange(0, ROWS)
            for s in tl.static_range(ALONG):
                column = (ALONG - 1 - s) * BLOCK + tl.arange(0, BLOCK)
                offset = member[:, None] * space + column[None, :]
                mask = None if WHOLE else (member < channels)[:, None] & (column < space)[None, :]
                grad = read(grad_y + start + offset, mask, "evict_first")
                value = read(x + start + offset, mask, "evict_first")
                if weight is not None:
                    grad *= read(weight + first + member, None if WHOLE else member < channels)[:, None]
                result = (grad - mean_grad - (value - average) * scale * product_mean) * scale
                tl.store(grad_x + start + offset, result.to(grad_x.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def of_threads(tile):
    """Return the sums over the neighbors of each thread."""
    SIZE: tl.constexpr = min(NEAR, tile.shape[1])
    return tl.sum(tl.reshape(tile, (tile.shape[0], tile.shape[1] // SIZE, SIZE)), 2)


@triton.constexpr_function
def levels_of(count):
    """Return the logarithm of a power of two."""
    return count.bit_length() - 1


@triton.jit
def of_channels(values):
    """Return (ROWS, tiles): each tensor (ROWS, …) summed over its last dimension, and zeros up to a power of two."""
    COUNT: tl.constexpr = triton.next_power_of_2(len(values))
    for _ in tl.static_range(COUNT - len(values)):
        values += (tl.zeros(values[0].shape, dtype=tl.float32),)
    ROWS: tl.constexpr = values[0].shape[0]
    # One reduction adds them all; joining the first half with the second, repeatedly, keeps their order.
    for _ in tl.static_range(levels_of(COUNT)):
        pairs = no_chunks()
        for i in tl.static_range(len(values) // 2):
            pairs += (tl.join(values[i], values[i + len(values) // 2]),)
        values = pairs
    return tl.reshape(tl.sum(values[0], 1), (ROWS, COUNT))


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
