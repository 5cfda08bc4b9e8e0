# SPDX-License-Identifier: Apache-2.0
"""Column sums over all rows, for grad_weight and grad_bias of the norms.

Many rows: each program that walks rows adds its own, a second kernel adds what the programs have. Few rows: programs
beside them add whole columns, which reads the rows twice but spares memory, a launch and its wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from liger_triton.launch import Launcher, cdiv, power_of_two, wait

DIRECT_ROWS = 512
# Columns of a program that adds whole columns (in the interpreter a program costs milliseconds), and rows that it reads
# at once.
STRIP, STRIP_ROWS = 512 if knobs.runtime.interpret else 32, 128


# Numbers that a program which adds the sums of all programs reads at once, and its warps.
SUMMED, SUM_WARPS = 8192, 4

# No hint on how long the cache keeps what is read.
ANY = tl.constexpr("")


def zero(*gradients: Tensor | None) -> None:
    """The sums over no rows."""
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


@triton.jit
def read(pointer, mask, POLICY: tl.constexpr = ANY):
    """Values in float32, zero where masked; mask None: none is."""
    if mask is None:
        return tl.load(pointer, eviction_policy=POLICY).to(tl.float32)
    else:
        return tl.load(pointer, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def add_columns(
    strip, grad_y, x, mean, inverse, grad_weight, grad_bias, grad_stride, x_stride, rows, width,
    ROWS: tl.constexpr = STRIP_ROWS, BLOCK: tl.constexpr = STRIP,
):  # fmt: skip
    """Write one strip of the gradients."""
    column = strip * BLOCK + tl.arange(0, BLOCK)
    sum_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        product, grad = summands(grad_y, x, mean, inverse, grad_stride, x_stride, row, column, rows, width)
        sum_weight += product
        sum_bias += grad
    store(tl.sum(sum_weight, 0), grad_weight, column, width)
    store(tl.sum(sum_bias, 0), grad_bias, column, width)


@triton.jit
def summands(grad_y, x, mean, inverse, grad_stride, x_stride, row, column, rows, width):
    """A tile of grad_y · n and of grad_y, of which grad_weight and grad_bias are the column sums."""
    row_mask = row < rows
    mask = row_mask[:, None] & (column < width)[None, :]
    grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if mean is not None:
        value = value - tl.load(mean + row, mask=row_mask, other=0.0)[:, None]
    return grad * value * tl.load(inverse + row, mask=row_mask, other=0.0)[:, None], grad


@triton.jit
def store(total, gradient, column, width):
    """Write a sum if it is requested."""
    if gradient is not None:
        tl.store(gradient + column, total.to(gradient.dtype.element_ty), mask=column < width)


@triton.jit
def store_sums(sum_weight, sum_bias, part, grad_weight, grad_bias, program, programs, column, width):
    """Write the sums of one program to its rows of part (sums, programs, width)."""
    mask = column < width
    row = part + program.to(tl.int64) * width + column
    if grad_weight is not None:
        tl.store(row, sum_weight, mask=mask)
        row += programs.to(tl.int64) * width
    if grad_bias is not None:
        tl.store(row, sum_bias, mask=mask)


def sum_columns(part: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None) -> None:
    """Add the rows of part (sums, programs, width), which the last launch wrote, into the gradients that there are."""
    sums, programs, width = part.shape
    # Narrow strips fill the device at usual widths; a program reads all of its rows at once.
    block = min(power_of_two(width), max(16, power_of_two(width // 256)))
    column_sum_launch.after(
        (cdiv(width, block), sums), part, grad_weight, grad_bias, programs, width,
        ROWS=min(power_of_two(programs), SUMMED // block), BLOCK=block, num_warps=SUM_WARPS,
    )  # fmt: skip


@triton.jit
def column_sum_kernel(
    part, grad_weight, grad_bias, programs, width, EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (c, s) adds all rows of BLOCK columns of part[s] into the s-th of the gradients that are there."""
    wait(EARLY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    part += tl.program_id(1).to(tl.int64) * programs * width
    accumulated = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        accumulated += tl.load(
            part + row.to(tl.int64)[:, None] * width + column[None, :],
            mask=(row < programs)[:, None] & mask[None, :],
            other=0.0,
        )
    total = tl.sum(accumulated, 0)
    if grad_weight is None or grad_bias is None:
        store(total, grad_weight, column, width)
        store(total, grad_bias, column, width)
    elif tl.program_id(1) == 0:
        store(total, grad_weight, column, width)
    else:
        store(total, grad_bias, column, width)


column_sum_launch = Launcher(column_sum_kernel)
