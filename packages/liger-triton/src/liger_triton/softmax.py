# SPDX-License-Identifier: Apache-2.0
"""softmax in Triton.

A row that fits in the registers of a program is read once. A longer one is split among programs that wait for each
other's sums, which also reads it once. Where these cannot all run at once, one program reads the row twice, the second
time in reverse, because caches still hold its end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_triton._softmax import (
    backward_launch,
    forward_launch,
    split_backward_launch,
    split_forward_launch,
    wide_backward_launch,
    wide_forward_launch,
)
from liger_triton.launch import (
    cdiv,
    differentiable_kernels,
    first_like,
    fuses,
    power_of_two,
    processors,
    shared_memory,
    strided_rows,
    supported,
)


class Shape(NamedTuple):
    """Columns of a block, rows of a program, warps, stages, and programs per multiprocessor (0: as many as rows).

    split  whether the blocks of a longer row belong to as many programs
    """

    block: int
    rows: int
    warps: int
    stages: int = 1
    programs: int = 0
    split: bool = False


# Share of copy bandwidth on one H200 (bfloat16), forward · backward: .96 · 1.03 at 4096 columns, .76 · .81 at 128256.
def forward_shape(width: int, size: int, shared: int) -> Shape:
    """Return the forward shape; size is the bytes of a column. At 32768 columns, stages help (.91, without .77)."""
    block = power_of_two(width)
    if block <= 2048:
        return Shape(block, max(1, min(64, 2048 // block)), 4)
    if block <= 16384:
        return Shape(block, 1, _warps(width, block))
    if block <= 32768:
        return Shape(block, 1, 32, 3, 1) if 3 * size * block < shared - 2048 else Shape(block, 1, 32)
    return Shape(8192, 1, 4, split=True)


def backward_shape(width: int) -> Shape:
    """Return the backward shape. At 32768 columns, a second read (.98) is better than a row in registers (.95)."""
    block = power_of_two(width)
    if block <= 2048:
        return Shape(block, max(1, min(64, 2048 // block)), 4)
    if block <= 16384:
        return Shape(block, 1, _warps(width, block))
    if block <= 32768:
        return Shape(8192, 1, 32)
    return Shape(8192, 1, 8, split=True)


def _warps(width: int, block: int) -> int:
    """Return the warps of a block: twice as many if no lane is idle; otherwise that would take .78 to .50 at 7000."""
    return 16 if width == 8192 else max(8, block // 1024)


def softmax(x: Tensor) -> Tensor:
    supported(x)
    return _softmax(x)


def _launch(y: Tensor, /, x: Tensor) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    shape = forward_shape(width, x.element_size(), shared_memory(x.device))
    if shape.block >= width:
        forward_launch(
            (_programs(rows, shape, x),), x, y, x_stride, rows, width,
            ROWS=shape.rows, BLOCK=shape.block, STAGES=shape.stages, num_warps=shape.warps,
        )  # fmt: skip
    elif shape.split and _meets(width, shape, x):
        parts = cdiv(width, shape.block)
        started, moments = _meeting(x, rows, parts, 2)
        split_forward_launch(
            (rows * parts,), x, y, started, moments, x_stride, rows, width,
            PARTS=parts, PLACES=power_of_two(parts), BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    else:
        wide_forward_launch(
            (_programs(rows, shape, x),), x, y, x_stride, rows, width,
            EVEN=width % shape.block == 0, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip


def _programs(rows: int, shape: Shape, x: Tensor) -> int:
    groups = cdiv(rows, shape.rows)
    return min(groups, shape.programs * processors(x.device)) if shape.programs else groups


def _meets(width: int, shape: Shape, x: Tensor) -> bool:
    """Whether all programs of a row can run at once, as those that wait for each other must."""
    # Kernels of other streams may hold the other processors, and wait for their own rows, too.
    return x.is_cuda and 4 * cdiv(width, shape.block) <= processors(x.device)


def _meeting(x: Tensor, rows: int, parts: int, numbers: int) -> tuple[Tensor, Tensor]:
    """Allocate the counters of started programs and of each row's finished parts, and memory for their results."""
    return x.new_zeros(rows + 1, dtype=torch.int32), x.new_empty(rows * parts * numbers, dtype=torch.float32)


def _launch_backward(grad_x: Tensor, /, grad_y: Tensor, y: Tensor, needs: list[bool]) -> None:
    if y.numel() == 0:
        return
    width = y.shape[-1]
    rows = y.numel() // width
    grad_y, grad_stride = strided_rows(grad_y)
    shape = backward_shape(width)
    if shape.block >= width:
        backward_launch(
            (_programs(rows, shape, y),), grad_y, y, grad_x, grad_stride, rows, width,
            ROWS=shape.rows, BLOCK=shape.block, STAGES=shape.stages, num_warps=shape.warps,
            enable_fp_fusion=fuses(shape.block),
        )  # fmt: skip
    elif shape.split and _meets(width, shape, y):
        parts = cdiv(width, shape.block)
        started, moments = _meeting(y, rows, parts, 1)
        split_backward_launch(
            (rows * parts,), grad_y, y, grad_x, started, moments, grad_stride, rows, width,
            PARTS=parts, PLACES=power_of_two(parts), BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    else:
        wide_backward_launch(
            (_programs(rows, shape, y),), grad_y, y, grad_x, grad_stride, rows, width,
            EVEN=width % shape.block == 0, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip


_softmax = differentiable_kernels("softmax", first_like, _launch, _launch_backward, first_like)
