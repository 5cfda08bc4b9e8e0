# SPDX-License-Identifier: Apache-2.0
"""The kernels of norms with one block per row, and the column sums that give all norms grad_weight and grad_bias.

With many rows, each program sums those that it walks, and a second kernel adds these sums. With few rows, extra
programs sum whole columns: that reads the rows twice, but spares memory, a launch and its wait.

`_norm_chunks.py` and `_norm_wide.py` have the same math for wider rows. A change of it touches all three, and
`summands`, from which the column sums are made.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from liger_triton.launch import Launcher, cdiv, power_of_two, wait

DIRECT_ROWS = 512
# Columns (more in the interpreter, where programs are slow) and rows that a program reads at once to sum columns.
STRIP, STRIP_ROWS = 512 if knobs.runtime.interpret else 32, 128
# Numbers that a program of the second kernel reads at once, and its warps.
SUMMED, SUM_WARPS = 8192, 4

# No eviction policy: the cache gets no hint.
ANY = tl.constexpr("")


def zero(*gradients: Tensor | None) -> None:
    """Set the requested gradients to zero, the sum over no rows."""
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


@triton.jit
def read(pointer, mask, POLICY: tl.constexpr = ANY, OTHER: tl.constexpr = 0.0):
    """Load values in float32, OTHER where masked; a mask of None masks nothing."""
    if mask is None:
        return tl.load(pointer, eviction_policy=POLICY).to(tl.float32)
    else:
        return tl.load(pointer, mask=mask, other=OTHER, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def forward_kernel(
    x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride, rows, width, eps, offset,
    CAST_INPUT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program normalizes ROWS rows, each in one block of columns.

    WHOLE: rows and blocks are full, so that no lane is masked.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_mask = None if WHOLE else row < rows
    column_mask = None if WHOLE else column < width
    mask = None if WHOLE else (row < rows)[:, None] & (column < width)[None, :]
    out = row[:, None] * width + column[None, :]
    value = read(x + row[:, None] * x_stride + column[None, :], mask)
    if residual is not None:
        value += read(residual + row[:, None] * residual_stride + column[None, :], mask)
        # The norm is that of the rounded sum, which the next layer sees.
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + out, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if mean is not None:
        # Correctly rounded, so that a constant row becomes exactly zero.
        average = tl.div_rn(tl.sum(value, 1), 1.0 * width)
        tl.store(mean + row, average, mask=row_mask)
        value = value - average[:, None]
        if not WHOLE:
            value = tl.where(mask, value, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(inverse + row, scale, mask=row_mask)
    value = value * scale[:, None]
    if CAST_INPUT:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    if weight is not None:
        value = value * (read(weight + column, column_mask) + offset)[None, :]
    if bias is not None:
        value = value + read(bias + column, column_mask)[None, :]
    tl.store(y + out, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_weight, grad_bias, partials,
    grad_stride, summed_stride, x_stride, rows, width, programs, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p walks the groups p, p + programs, … of ROWS rows; its column sums go to row p of partials.

    With n = (x - mean) · inverse and g = grad_y · weight, grad_x = inverse · (g - mean(g) - n · mean(g · n)) +
    grad_summed, without mean(g) if not centered. Masked lanes need no special handling, because their gradient
    loads as zero. Without partials, the programs from `programs` on sum whole columns.
    """
    program = tl.program_id(0)
    if partials is None and program >= programs:
        add_columns(
            program - programs, grad_y, x, mean, inverse, grad_weight, grad_bias, grad_stride, x_stride, rows, width
        )
        return
    column = tl.arange(0, BLOCK)
    column_mask = column < width
    if weight is not None:
        factor = (tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32) + offset)[None, :]
    # Tiles are summed once, at the end, so that all threads that know a column's sum know the same bits.
    sum_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask[None, :]
        grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row, mask=row_mask, other=0.0)[:, None]
        if mean is not None:
            value = value - tl.load(mean + row, mask=row_mask, other=0.0)[:, None]
        value = value * scale
        if partials is not None:
            sum_weight += grad * value
            sum_bias += grad
        if grad_x is not None:
            if weight is not None:
                grad = grad * factor
            if mean is not None:
                # Center first: with two columns, a larger product would leave nothing but round-off.
                grad = tl.where(mask, grad - (tl.sum(grad, 1) / width)[:, None], 0.0)
            result = (grad - value * (tl.sum(grad * value, 1) / width)[:, None]) * scale
            if grad_summed is not None:
                result += tl.load(
                    grad_summed + row[:, None] * summed_stride + column[None, :], mask=mask, other=0.0
                ).to(tl.float32)
            tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
    if partials is not None:
        store_sums(
            tl.sum(sum_weight, 0), tl.sum(sum_bias, 0), partials, grad_weight, grad_bias, program, programs, column,
            width,
        )  # fmt: skip


@triton.jit
def add_columns(
    strip, grad_y, x, mean, inverse, grad_weight, grad_bias, grad_stride, x_stride, rows, width,
    ROWS: tl.constexpr = STRIP_ROWS, BLOCK: tl.constexpr = STRIP,
):  # fmt: skip
    """Sum one strip of columns over all rows, and write its gradients."""
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
    """Return tiles of grad_y · n and of grad_y, whose column sums are grad_weight and grad_bias."""
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
def store_sums(sum_weight, sum_bias, partials, grad_weight, grad_bias, program, programs, column, width):
    """Write the sums of one program to its rows of partials (sums, programs, width)."""
    mask = column < width
    row = partials + program.to(tl.int64) * width + column
    if grad_weight is not None:
        tl.store(row, sum_weight, mask=mask)
        row += programs.to(tl.int64) * width
    if grad_bias is not None:
        tl.store(row, sum_bias, mask=mask)


def sum_columns(partials: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None) -> None:
    """Add the rows of partials (sums, programs, width), which the last launch wrote, into the requested gradients."""
    sums, programs, width = partials.shape
    # Narrow strips fill the device at usual widths; a program reads all of its rows at once.
    block = min(power_of_two(width), max(16, power_of_two(width // 256)))
    column_sum_launch.after(
        (cdiv(width, block), sums), partials, grad_weight, grad_bias, programs, width,
        ROWS=min(power_of_two(programs), SUMMED // block), BLOCK=block, num_warps=SUM_WARPS,
    )  # fmt: skip


@triton.jit
def column_sum_kernel(
    partials, grad_weight, grad_bias, programs, width, EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (c, s) adds all rows of BLOCK columns of partials[s] into the s-th requested gradient."""
    wait(EARLY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    partials += tl.program_id(1).to(tl.int64) * programs * width
    accumulated = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        accumulated += tl.load(
            partials + row.to(tl.int64)[:, None] * width + column[None, :],
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


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
column_sum_launch = Launcher(column_sum_kernel)
