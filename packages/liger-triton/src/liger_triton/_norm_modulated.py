# SPDX-License-Identifier: Apache-2.0
"""The kernels of modulated_rms_norm and modulated_layer_norm: rows of one sample share a scale and a shift."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._chunks import (
    centered,
    chunks_of,
    multiplied,
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
from liger_triton._norm import read, sum_columns, zero
from liger_triton._norm_chunks import around_mean, inverse_of, unweighted
from liger_triton.launch import (
    Launcher,
    cdiv,
    contiguous,
    power_of_two,
    processors,
    registers,
    rows_of,
    stages_of,
    strided_rows,
    wait,
)

WIDEST = 16384
# Chunks of a row forward and backward; warps of a multiprocessor forward, of which some 12 run at once, so that those
# that start later even out the others' times. On one H200 (bfloat16), backward reaches .86 of copy bandwidth at 1152
# columns, .91 at 3072.
MOST_CHUNKS, MOST_CHUNKS_BACKWARD, WARPS, RUNNING = 6, 3, 48, 12
# Numbers that a program of the second kernel reads at once, in at most so many rows.
STRIP, STRIP_ROWS = 1024, 32


def check_width(x: Tensor) -> None:
    if x.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {x.shape[-1]} columns, more than {WIDEST}")


def statistics(x: Tensor, count: int) -> Outputs:
    """Allocate `count` float32 numbers per row."""
    rows = x.numel() // max(1, x.shape[-1])
    return tuple(x.new_empty(rows, dtype=torch.float32) for _ in range(count))


def forward(
    x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, y: Tensor, mean: Tensor | None,
    inverse: Tensor, eps: float,
) -> None:  # fmt: skip
    if x.numel() == 0:
        return
    tokens, width = x.shape[-2:]
    x, x_stride = strided_rows(x)
    scale = rows_of(scale)
    shift = None if shift is None else rows_of(shift)
    samples, warps = y.numel() // (tokens * width), warps_for(width, MOST_CHUNKS)
    programs = min(tokens, programs_of_sample(max(1, WARPS // warps), x, samples))
    forward_launch(
        (programs * samples,), x, scale, shift, contiguous(weight), y, mean, inverse,
        x_stride, scale.stride(0), 0 if shift is None else shift.stride(0), tokens, width, programs, eps,
        STAGES=stages_of(max(1, RUNNING // warps) * width * x.element_size(), x, 6),
        **chunks_of(width, warps, mean is not None),
    )  # fmt: skip


def backward(
    grad_y: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, mean: Tensor | None, inverse: Tensor,
    grad_x: Tensor | None, grad_scale: Tensor | None, grad_shift: Tensor | None, grad_weight: Tensor | None,
) -> None:  # fmt: skip
    """Launch the backward pass: grad_x row by row, and sums that a second kernel adds.

    With S = Σ grad_y · n and T = Σ grad_y over the tokens of a sample: grad_scale = weight · S, grad_shift = T, and
    grad_weight = Σ (1 + scale) · S over samples.
    """
    if x.numel() == 0:
        zero(grad_scale, grad_shift, grad_weight)
        return
    (tokens, width), samples = x.shape[-2:], x.numel() // (x.shape[-2] * x.shape[-1])
    grad_y, grad_stride = strided_rows(grad_y)
    x, x_stride = strided_rows(x)
    scale, weight = rows_of(scale), contiguous(weight)
    warps = warps_for(width, MOST_CHUNKS_BACKWARD)
    several = max(1, (12 if warps < 4 or mean is not None else 8) // warps)
    programs = min(tokens, programs_of_sample(several, x, samples))
    products = grad_scale is not None or grad_weight is not None
    partials = (
        x.new_empty((2, samples * programs, width), dtype=torch.float32) if products or grad_shift is not None else None
    )
    backward_launch(
        (programs * samples,), grad_y, x, scale, weight, mean, inverse, grad_x, partials, grad_stride, x_stride,
        scale.stride(0), tokens, width, programs,
        STAGES=stages_of(several * 2 * width * x.element_size(), x, 4 if several == 1 else 3),
        **chunks_of(width, warps, mean is not None), **registers(registers_for(max(12, warps)), x),
    )  # fmt: skip
    if partials is None:
        return
    of_samples = None if grad_weight is None else x.new_empty((1, samples, width), dtype=torch.float32)
    several = min(STRIP_ROWS, power_of_two(programs))
    strips = cdiv(width, STRIP // several)
    sum_launch.after(
        (strips * samples,), partials, scale, weight, grad_scale, grad_shift, of_samples, scale.stride(0), programs,
        width, samples, strips, ROWS=several, BLOCK=STRIP // several,
    )  # fmt: skip
    if of_samples is not None:
        sum_columns(of_samples, grad_weight, None)


def programs_of_sample(programs: int, x: Tensor, samples: int) -> int:
    """Return the programs per sample that give a multiprocessor about `programs` in total, at least one."""
    return max(1, programs * processors(x.device) // samples)


@triton.jit
def forward_kernel(
    x, scale, shift, weight, y, mean, inverse, x_stride, scale_stride, shift_stride, tokens, WIDTH: tl.constexpr,
    programs, eps, STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program s · programs + p computes every programs-th token of sample s, from the p-th on."""
    sample = (tl.program_id(0) // programs).to(tl.int64)
    factors = modulation(scale + sample * scale_stride, weight, WIDTH, CHUNK)
    if shift is not None:
        moved = read_chunks(shift + sample * shift_stride, WIDTH, CHUNK)
    for token in tl.range(tl.program_id(0) % programs, tokens, programs, num_stages=STAGES):
        row = sample * tokens + token
        value = read_chunks(x + row * x_stride, WIDTH, CHUNK)
        value = around_mean(value, mean, row, WIDTH, CHUNK)
        factor = inverse_of(value, inverse, row, WIDTH, eps)
        for c in tl.static_range(len(value)):
            result = value[c] * factor * factors[c]
            if shift is not None:
                result += moved[c]
            write_chunk(y + row * WIDTH, result, c, WIDTH, CHUNK)


@triton.jit
def modulation(scale, weight, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return (1 + scale) · weight of a row."""
    factors = no_chunks()
    for c in tl.static_range(triton.cdiv(WIDTH, CHUNK)):
        factor = 1.0 + read_chunk(scale, c, WIDTH, CHUNK)
        if weight is not None:
            factor = factor * read_chunk(weight, c, WIDTH, CHUNK)
        factors += (factor,)
    return factors


@triton.jit
def backward_kernel(
    grad_y, x, scale, weight, mean, inverse, grad_x, partials, grad_stride, x_stride, scale_stride, tokens,
    WIDTH: tl.constexpr, programs, STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program s · programs + p walks every programs-th token of sample s, from the p-th on."""
    program = tl.program_id(0) % programs
    sample = (tl.program_id(0) // programs).to(tl.int64)
    factors = modulation(scale + sample * scale_stride, weight, WIDTH, CHUNK)
    products = no_sums(WIDTH, CHUNK)
    sums = no_sums(WIDTH, CHUNK)
    for token in tl.range(program, tokens, programs, num_stages=STAGES):
        row = sample * tokens + token
        grad = read_chunks(grad_y + row * grad_stride, WIDTH, CHUNK)
        value = read_chunks(x + row * x_stride, WIDTH, CHUNK)
        factor = tl.load(inverse + row)
        normal = unweighted(value, mean, factor, row)
        if partials is not None:
            products = plus_product(products, grad, normal)
            sums = plus(sums, grad)
        if grad_x is not None:
            scaled = multiplied(grad, factors)
            if mean is not None:
                # Center first: with two columns, a larger product would leave nothing but round-off.
                scaled = centered(scaled, row_sum(scaled) / WIDTH, WIDTH, CHUNK)
            slope = product_sum(scaled, normal) / WIDTH
            for c in tl.static_range(len(value)):
                write_chunk(grad_x + row * WIDTH, (scaled[c] - normal[c] * slope) * factor, c, WIDTH, CHUNK)
    if partials is not None:
        first = partials + (sample * programs + program) * WIDTH
        write_chunks(first, products, WIDTH, CHUNK)
        write_chunks(first + tl.num_programs(0).to(tl.int64) * WIDTH, sums, WIDTH, CHUNK)


@triton.jit
def sum_kernel(
    partials, scale, weight, grad_scale, grad_shift, of_samples, scale_stride, programs, width, samples, strips,
    EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program s · strips + c adds the sums of sample s's programs in column strip c."""
    wait(EARLY)
    sample = (tl.program_id(0) // strips).to(tl.int64)
    column = (tl.program_id(0) % strips) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & inside[None, :]
        first = partials + (sample * programs + row)[:, None] * width + column[None, :]
        products += tl.load(first, mask=mask, other=0.0)
        sums += tl.load(first + tl.cast(samples, tl.int64) * programs * width, mask=mask, other=0.0)
    product = tl.sum(products, 0)
    if of_samples is not None:
        tl.store(
            of_samples + sample * width + column,
            product * (1.0 + read(scale + sample * scale_stride + column, inside)),
            mask=inside,
        )
    if weight is not None:
        product = product * read(weight + column, inside)
    if grad_scale is not None:
        tl.store(grad_scale + sample * width + column, product.to(grad_scale.dtype.element_ty), mask=inside)
    if grad_shift is not None:
        tl.store(grad_shift + sample * width + column, tl.sum(sums, 0).to(grad_shift.dtype.element_ty), mask=inside)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
sum_launch = Launcher(sum_kernel)
