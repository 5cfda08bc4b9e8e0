# SPDX-License-Identifier: Apache-2.0
"""Norms of rows that a program holds in registers as chunks, one row at a time.

In the forward pass, these are widths between 2048 and 8192 that are not powers of two (`rms_norm.chunked`). In the
backward pass, they are widths up to 16384 and above 512, or above 2048 if there are few rows (`launch_norm_backward`).
"""

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
    plus_product,
    product_sum,
    read_chunk,
    read_chunks,
    registers_for,
    row_sum,
    warps_for,
    write_chunk,
    write_chunks,
)
from liger_triton._norm import DIRECT_ROWS, STRIP, add_columns, sum_columns
from liger_triton.launch import Launcher, cdiv, processors, registers, stages_of

FORWARD_CHUNKS = 6


def forward_options(width: int, centered: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of forward_launch, which runs one program per row."""
    return chunks_of(width, warps_for(width, FORWARD_CHUNKS))


def backward(
    rows: int, grad_y: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None,
    inverse: Tensor, grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, grad_stride: int,
    summed_stride: int, x_stride: int, width: int, offset: float,
) -> None:  # fmt: skip
    """Launch the backward pass: as many programs as run at once walk the rows, or one per row if there are few."""
    sums = (grad_weight is not None) + (grad_bias is not None)
    warps, walking, held = backward_shape(width, mean is not None, grad_summed is not None)
    direct = rows <= DIRECT_ROWS or not sums
    # Programs that add whole columns have more to do.
    warps = max(4, warps) if direct else warps
    programs = rows if direct else min(rows, max(1, walking // warps) * processors(x.device))
    partials = None if direct else x.new_empty((sums, programs, width), dtype=torch.float32)
    size = (2 if grad_summed is None else 3) * width * x.element_size() * max(1, walking // warps)
    stages = 1 if direct or warps == 32 else stages_of(size, x)
    strips = cdiv(width, STRIP) if direct and sums else 0
    backward_launch(
        (programs + strips,), grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_weight, grad_bias, partials,
        grad_stride, summed_stride, x_stride, rows, width, programs, strips, offset,
        HELD=held, STAGES=stages, **chunks_of(width, warps),
        **registers(registers_for(12) if walking == 12 and not direct else None, x),
    )  # fmt: skip
    if partials is not None:
        sum_columns(partials, grad_weight, grad_bias)


# Share of copy bandwidth on one H200 (bfloat16): rms_norm .81 at 1024 columns, .90 at 4096, layer_norm .79, .88.
def backward_shape(width: int, centered: bool, summed: bool) -> tuple[int, int, bool]:
    """Return the warps per row and per multiprocessor, and whether the weight stays in registers between rows."""
    if width <= 3072:
        return max(2, warps_for(width, 3)), 8 if summed else 12, True
    if width > 12288 and summed:
        # Three rows fill the shared memory; without stages they are faster (.93 at 14336 columns instead of .86).
        return 32, 32, False
    if width > 8192 and centered:
        # Both column sums take half of the registers.
        return warps_for(width, 8), 8, False
    return warps_for(width, 5), 8, width <= 12288


@triton.jit
def around_mean(value, mean, row, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return a row; if the norm is centered, store its mean and subtract it."""
    if mean is not None:
        # Correctly rounded, so that a constant row becomes exactly zero.
        average = tl.div_rn(row_sum(value), 1.0 * WIDTH)
        tl.store(mean + row, average)
        value = centered(value, average, WIDTH, CHUNK)
    return value


@triton.jit
def inverse_of(value, inverse, row, WIDTH: tl.constexpr, eps):
    """Store and return 1 / sqrt(mean(value²) + eps)."""
    scale = tl.rsqrt(product_sum(value, value) / WIDTH + eps)
    tl.store(inverse + row, scale)
    return scale


@triton.jit
def unweighted(value, mean, scale, row):
    """Return (value - mean) · scale, the normalized row without the weight."""
    average = 0.0
    if mean is not None:
        average = tl.load(mean + row)
    normal = no_chunks()
    for c in tl.static_range(len(value)):
        normal += ((value[c] - average) * scale,)
    return normal


@triton.jit
def forward_kernel(
    x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride, WIDTH: tl.constexpr, eps, offset,
    CAST_INPUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program normalizes one row."""
    row = tl.program_id(0).to(tl.int64)
    value = read_chunks(x + row * x_stride, WIDTH, CHUNK)
    if residual is not None:
        rounded = no_chunks()
        for c in tl.static_range(len(value)):
            total = value[c] + read_chunk(residual + row * residual_stride, c, WIDTH, CHUNK)
            # The norm is that of the rounded sum, which the next layer sees.
            rounded += (total.to(summed.dtype.element_ty).to(tl.float32),)
        write_chunks(summed + row * WIDTH, rounded, WIDTH, CHUNK)
        value = rounded
    value = around_mean(value, mean, row, WIDTH, CHUNK)
    scale = inverse_of(value, inverse, row, WIDTH, eps)
    for c in tl.static_range(len(value)):
        result = value[c] * scale
        if CAST_INPUT:
            result = result.to(y.dtype.element_ty).to(tl.float32)
        if weight is not None:
            result = result * (read_chunk(weight, c, WIDTH, CHUNK) + offset)
        if bias is not None:
            result = result + read_chunk(bias, c, WIDTH, CHUNK)
        write_chunk(y + row * WIDTH, result, c, WIDTH, CHUNK)


@triton.jit
def backward_kernel(
    grad_y, grad_summed, x, weight, mean, inverse, grad_x, grad_weight, grad_bias, partials,
    grad_stride, summed_stride, x_stride, rows, WIDTH: tl.constexpr, programs, strips, offset,
    HELD: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p walks every programs-th row; its column sums go to row p of partials (sums, programs, width).

    Without partials, `strips` programs before them sum whole columns. HELD: the weight stays in registers; otherwise
    the cache serves it to every row.
    """
    program = tl.program_id(0) - strips
    if partials is None and program < 0:
        # They come first, since they have more to do.
        add_columns(
            program + strips, grad_y, x, mean, inverse, grad_weight, grad_bias, grad_stride, x_stride, rows, WIDTH
        )
        return
    if weight is not None and HELD:
        factors = read_chunks(weight, WIDTH, CHUNK)
    sum_weight = no_sums(WIDTH, CHUNK)
    sum_bias = no_sums(WIDTH, CHUNK)
    for row in tl.range(program.to(tl.int64), rows, programs, num_stages=STAGES):
        grad = read_chunks(grad_y + row * grad_stride, WIDTH, CHUNK)
        value = read_chunks(x + row * x_stride, WIDTH, CHUNK)
        scale = tl.load(inverse + row)
        normal = unweighted(value, mean, scale, row)
        if partials is not None:
            sum_weight = plus_product(sum_weight, grad, normal)
            sum_bias = plus(sum_bias, grad)
        if grad_x is not None:
            scaled = no_chunks()
            for c in tl.static_range(len(value)):
                product = grad[c]
                if weight is not None:
                    factor = factors[c] if HELD else read_chunk(weight, c, WIDTH, CHUNK)
                    product = product * (factor + offset)
                scaled += (product,)
            slope = product_sum(scaled, normal) / WIDTH
            away = 0.0
            if mean is not None:
                away = row_sum(scaled) / WIDTH
            if grad_summed is not None:
                # Loaded before the first store, past which the compiler must not move a load.
                others = read_chunks(grad_summed + row * summed_stride, WIDTH, CHUNK)
            for c in tl.static_range(len(value)):
                result = (scaled[c] - normal[c] * slope - away) * scale
                if grad_summed is not None:
                    result += others[c]
                write_chunk(grad_x + row * WIDTH, result, c, WIDTH, CHUNK)
    if partials is not None:
        to = partials + program.to(tl.int64) * WIDTH
        if grad_weight is not None:
            write_chunks(to, sum_weight, WIDTH, CHUNK)
            to += programs.to(tl.int64) * WIDTH
        if grad_bias is not None:
            write_chunks(to, sum_bias, WIDTH, CHUNK)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
