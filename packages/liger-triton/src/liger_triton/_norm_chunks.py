# SPDX-License-Identifier: Apache-2.0
"""One row a program, or one row after the other, in chunks that registers hold: rows of more than 512 columns backward, and forward those whose
width is not a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton._chunks import (
    centered,
    chunks_of,
    no_chunks,
    no_sums,
    plus,
    product_sum,
    read_chunk,
    read_chunks,
    registers_for,
    row_sum,
    stages_of,
    warps_for,
    write_chunk,
    write_chunks,
)
from liger_triton._norm_sum import DIRECT_ROWS, STRIP, add_columns, sum_columns
from liger_triton.launch import Launcher, cdiv, processors, registers

FORWARD_CHUNKS = 6


def forward_options(width: int, centered: bool) -> dict[str, int | bool]:
    """The compile-time arguments of forward_launch, which has one program a row."""
    return chunks_of(width, warps_for(width, FORWARD_CHUNKS))


def backward(
    rows: int, grad_y: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, inverse: Tensor,
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
    grad_stride: int, summed_stride: int, x_stride: int, width: int, offset: float,
) -> None:  # fmt: skip
    """As many programs as run at once walk the rows; of few rows each has its own."""
    sums = (grad_weight is not None) + (grad_bias is not None)
    warps, walking, held = backward_shape(width, mean is not None, grad_summed is not None)
    direct = rows <= DIRECT_ROWS or not sums
    # Programs that add whole columns have more to do.
    warps = max(4, warps) if direct else warps
    programs = rows if direct else min(rows, max(1, walking // warps) * processors(x.device))
    part = None if direct else x.new_empty((sums, programs, width), dtype=torch.float32)
    size = (2 if grad_summed is None else 3) * width * x.element_size() * max(1, walking // warps)
    stages = 1 if direct or warps == 32 else stages_of(size, x)
    strips = cdiv(width, STRIP) if direct and sums else 0
    backward_launch(
        (programs + strips,),
        grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_weight, grad_bias, part, grad_stride, summed_stride, x_stride, rows, width,
        programs, strips, offset, HELD=held, STAGES=stages, **chunks_of(width, warps),
        **registers(registers_for(12) if walking == 12 and not direct else None, x),
    )  # fmt: skip
    if part is not None:
        sum_columns(part, grad_weight, grad_bias)


# Share of copy bandwidth on one H200 (bfloat16), backward: rms_norm .81 at 1024 columns, .86 at 2560, .90 at 4096 and 5120, .89 at 8192, .91 at 16384;
# layer_norm .79 at 1024, .85 at 3072, .88 at 4096 and 5120, .86 at 8192. In one block a row of 2560 columns reaches .74, of 5120 .78.
def backward_shape(width: int, centered: bool, summed: bool) -> tuple[int, int, bool]:
    """Warps of a row, warps of a multiprocessor, and whether the weight stays in registers from row to row."""
    if width <= 3072:
        return warps_for(width, 3), 8 if summed else 12, True
    if width > 12288 and summed:
        # Three rows fill the shared memory: they are faster without waiting there (.93 at 14336 columns, with .86).
        return 32, 32, False
    if width > 8192 and centered:
        # Both column sums take half of the registers.
        return warps_for(width, 8), 8, False
    return warps_for(width, 5), 8, width <= 12288


@triton.jit
def around_mean(value, mean, row, width, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """A row, and if it is centered, less its mean, which is stored."""
    if mean is not None:
        # Correctly rounded, so that a constant row becomes exactly zero.
        average = tl.div_rn(row_sum(value, COUNT), 1.0 * width)
        tl.store(mean + row, average)
        value = centered(value, average, width, COUNT, CHUNK, EVEN)
    return value


@triton.jit
def inverse_of(value, inverse, row, width, eps, COUNT: tl.constexpr):
    """1 / sqrt(mean(value²) + eps), which is stored."""
    scale = tl.rsqrt(product_sum(value, value, COUNT) / width + eps)
    tl.store(inverse + row, scale)
    return scale


@triton.jit
def normalized(value, mean, scale, row, COUNT: tl.constexpr):
    """What a row was normalized to."""
    average = 0.0
    if mean is not None:
        average = tl.load(mean + row)
    normal = no_chunks()
    for c in tl.static_range(COUNT):
        normal += ((value[c] - average) * scale,)
    return normal


@triton.jit
def forward_kernel(
    x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride, width, eps, offset,
    CAST_INPUT: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program normalizes one row."""
    row = tl.program_id(0).to(tl.int64)
    value = read_chunks(x + row * x_stride, width, COUNT, CHUNK, EVEN)
    if residual is not None:
        rounded = no_chunks()
        for c in tl.static_range(COUNT):
            total = value[c] + read_chunk(residual + row * residual_stride, c, width, COUNT, CHUNK, EVEN)
            # The rounded sum is normalized: the one that the next layer sees.
            rounded += (total.to(summed.dtype.element_ty).to(tl.float32),)
        write_chunks(summed + row * width, rounded, width, COUNT, CHUNK, EVEN)
        value = rounded
    value = around_mean(value, mean, row, width, COUNT, CHUNK, EVEN)
    scale = inverse_of(value, inverse, row, width, eps, COUNT)
    for c in tl.static_range(COUNT):
        result = value[c] * scale
        if CAST_INPUT:
            result = result.to(y.dtype.element_ty).to(tl.float32)
        if weight is not None:
            result = result * (read_chunk(weight, c, width, COUNT, CHUNK, EVEN) + offset)
        if bias is not None:
            result = result + read_chunk(bias, c, width, COUNT, CHUNK, EVEN)
        write_chunk(y + row * width, result, c, width, COUNT, CHUNK, EVEN)


@triton.jit
def backward_kernel(
    grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_weight, grad_bias, part,
    grad_stride, summed_stride, x_stride, rows, width, programs, strips, offset,
    HELD: tl.constexpr, STAGES: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program p walks every programs-th row, and writes its sums for the other gradients to row p of part (sums, programs, width).

    part None: `strips` programs before them add whole columns instead. HELD: the weight stays in registers; else the cache serves it
    to every row.
    """
    program = tl.program_id(0) - strips
    if part is None and program < 0:
        # They come first, since they have more to do.
        add_columns(program + strips, grad_y, x, mean, inverse, grad_weight, grad_bias, grad_stride, x_stride, rows, width)
        return
    if weight is not None and HELD:
        factors = read_chunks(weight, width, COUNT, CHUNK, EVEN)
    sum_weight = no_sums(COUNT, CHUNK)
    sum_bias = no_sums(COUNT, CHUNK)
    for row in tl.range(program.to(tl.int64), rows, programs, num_stages=STAGES):
        grad = read_chunks(grad_y + row * grad_stride, width, COUNT, CHUNK, EVEN)
        value = read_chunks(x + row * x_stride, width, COUNT, CHUNK, EVEN)
        scale = tl.load(inverse + row)
        normal = normalized(value, mean, scale, row, COUNT)
        if part is not None:
            # In one instruction each, which a product by itself is not.
            added = no_chunks()
            for c in tl.static_range(COUNT):
                added += (sum_weight[c] + grad[c] * normal[c],)
            sum_weight = added
            sum_bias = plus(sum_bias, grad, 1.0, COUNT)
        if grad_x is not None:
            scaled = no_chunks()
            for c in tl.static_range(COUNT):
                product = grad[c]
                if weight is not None:
                    factor = factors[c] if HELD else read_chunk(weight, c, width, COUNT, CHUNK, EVEN)
                    product = product * (factor + offset)
                scaled += (product,)
            slope = product_sum(scaled, normal, COUNT) / width
            away = 0.0
            if mean is not None:
                away = row_sum(scaled, COUNT) / width
            if grad_summed is not None:
                # All of it before the first store, which the compiler must not move a load past.
                others = read_chunks(grad_summed + row * summed_stride, width, COUNT, CHUNK, EVEN)
            for c in tl.static_range(COUNT):
                result = (scaled[c] - normal[c] * slope - away) * scale
                if grad_summed is not None:
                    result += others[c]
                write_chunk(grad_x + row * width, result, c, width, COUNT, CHUNK, EVEN)
    if part is not None:
        to = part + program.to(tl.int64) * width
        if grad_weight is not None:
            write_chunks(to, sum_weight, width, COUNT, CHUNK, EVEN)
            to += programs.to(tl.int64) * width
        if grad_bias is not None:
            write_chunks(to, sum_bias, width, COUNT, CHUNK, EVEN)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
