# SPDX-License-Identifier: Apache-2.0
"""group_norm in Triton.

Groups that a program can hold are read once (`_group_held`). If there are enough larger groups for the device, one
program walks each group twice, the second time mostly through the L2 cache. If there are fewer, each group is split
over programs, and a second kernel merges their statistics. The backward pass of split groups sums every channel, or
parts of it, then takes the means over groups and the sums over samples, then reads everything again in reverse order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._group_held import backward, cached_tiles, forward, holds, together, warps_of
from liger_triton._group_norm import backward_launch, forward_launch, mean_launch, sum_launch
from liger_triton._norm import zero
from liger_triton.launch import (
    cdiv,
    contiguous,
    dense_like,
    differentiable_kernels,
    power_of_two,
    processors,
    supported,
)

# The most numbers of a group: they are counted in 32 bits up to the end of the last tile.
MOST = 2**31 - 2**16
# Channels of a program that sums over samples.
STRIP = 16


class Shape(NamedTuple):
    """The elements and warps of a tile, and the programs per multiprocessor below which rows are split into parts."""

    tile: int
    warps: int
    programs: int


# SMALL is for groups that FORWARD fits badly. In FORWARD, a thread has 16 numbers of a tile, and so adds several before
# threads add theirs: see `fuses`.
FORWARD, SMALL, BACKWARD = Shape(8192, 16, 4), Shape(2048, 4, 4), Shape(2048, 4, 8)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    supported(x, weight, bias)
    if (size := x.shape[1:].numel() // num_groups) > MOST:
        raise Unsupported(f"groups of {size} numbers, more than {MOST}")
    return _group_norm(x, num_groups, weight, bias, eps)


def _allocate(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Outputs:
    rows = x.shape[0] * num_groups
    return dense_like(x), x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _launch(
    y: Tensor, mean: Tensor, inverse: Tensor, /, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None,
    eps: float,
) -> None:  # fmt: skip
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
    part_size, parts = parts_of(size, shape.tile, rows, shape.programs * processors(x.device)) if few else (size, 1)
    part_moments = None if parts == 1 else x.new_empty((3, rows, parts), dtype=torch.float32)
    options = {
        "PARTS": max(power_of_two(parts), 32 * shape.warps), "TOGETHER": together(space, shape.tile),
        "BLOCK": shape.tile,
        "num_warps": shape.warps,
    }  # fmt: skip
    args = (x, weight, bias, y, mean, inverse, part_moments, num_groups, channels, space, part_size, eps)
    if part_moments is None:
        forward_launch((rows, parts), *args, EARLY=False, FIRST=False, **options)
    else:
        forward_launch((rows, parts), *args, EARLY=False, FIRST=True, **options)
        forward_launch.after((rows, parts), *args, FIRST=False, **options)


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /, grad_y: Tensor, x: Tensor,
    num_groups: int, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, needs: list[bool],
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
    part_size, parts = parts_of(space, columns, cdiv(rows, several), BACKWARD.programs * processors(x.device))
    sums = x.new_empty((2, samples, parts, channels), dtype=torch.float32)
    means = None if grad_x is None else x.new_empty((2, groups), dtype=torch.float32)
    grid = cdiv(rows, several), parts
    options = {
        "ROWS": several,
        "BLOCK": columns,
        "WHOLE": space % columns == 0 and rows % several == 0,
        "num_warps": warps,
    }
    sum_launch(grid, grad_y, x, mean, inverse, sums, rows, channels, per_group, space, part_size, **options)
    finish(sums, means, weight, grad_weight, grad_bias, per_group, space)
    if grad_x is not None:
        backward_launch.after(
            grid, grad_y, x, weight, mean, inverse, means, grad_x, rows, channels, per_group, space, part_size,
            **options,
        )  # fmt: skip


def finish(
    sums: Tensor, means: Tensor | None, weight: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
    per_group: int, space: int,
) -> None:  # fmt: skip
    """Reduce the sums of parts of channels to means over groups and sums over samples."""
    samples, parts, channels = sums.shape[1:]
    strips = 0 if grad_weight is None and grad_bias is None else cdiv(channels, STRIP)
    first = 0 if means is None else means.shape[1]
    if first + strips:
        mean_launch.after(
            (first + strips,), weight, sums, means, grad_weight, grad_bias, first, samples, channels, per_group, space,
            parts,
            GROUP=max(128, min(1024, power_of_two(per_group * parts))), ROWS=64, STRIP=STRIP, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


def parts_of(size: int, tile: int, rows: int, programs: int) -> tuple[int, int]:
    """Return the size of a part, a multiple of the tile, and the parts per row that give about `programs` programs."""
    tiles = cdiv(size, tile)
    part_size = cdiv(tiles, min(64, tiles, cdiv(programs, rows))) * tile
    return part_size, cdiv(size, part_size)


_group_norm = differentiable_kernels("group_norm", _allocate, _launch, _launch_backward)
