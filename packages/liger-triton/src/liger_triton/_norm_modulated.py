# SPDX-License-Identifier: Apache-2.0
"""The kernels of modulated_rms_norm and modulated_layer_norm: rows of one sample share a scale and a shift."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._norm_sum import column_sum_launch, read, zero
from liger_triton.launch import Launcher, blocks_of, cdiv, contiguous, fuses, power_of_two, processors, rows_of, shared_memory, strided_rows

WIDEST = 16384
# Columns of a program that adds what the programs of a sample have, and rows that it reads at once.
STRIP, STRIP_ROWS = 32, 32


def check_width(x: Tensor) -> None:
    if x.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {x.shape[-1]} columns, more than {WIDEST}")


def statistics(x: Tensor, count: int) -> Outputs:
    """Memory for so many float32 numbers a row."""
    rows = x.numel() // max(1, x.shape[-1])
    return tuple(x.new_empty(rows, dtype=torch.float32) for _ in range(count))


def forward(
    x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, y: Tensor, mean: Tensor | None, inverse: Tensor, eps: float
) -> None:
    if x.numel() == 0:
        return
    tokens, width = x.shape[-2:]
    x, x_stride = strided_rows(x)
    scale = rows_of(scale)
    shift = None if shift is None else rows_of(shift)
    block, rest, several, warps = forward_shape(width, mean is not None)
    groups = cdiv(tokens, several)
    forward_launch(
        (groups * (y.numel() // (tokens * width)),), x, scale, shift, contiguous(weight), y, mean, inverse,
        x_stride, scale.stride(0), 0 if shift is None else shift.stride(0), tokens, width, groups, eps,
        ROWS=several, BLOCK=block, REST=rest, num_warps=warps, enable_fp_fusion=fuses(several * rest or block) and mean is None,
    )  # fmt: skip


def backward(
    grad_y: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, mean: Tensor | None, inverse: Tensor,
    grad_x: Tensor | None, grad_scale: Tensor | None, grad_shift: Tensor | None, grad_weight: Tensor | None,
) -> None:  # fmt: skip
    """grad_x row by row. With S = Σ grad_y · n and T = Σ grad_y over the tokens of a sample: grad_scale = weight · S, grad_shift = T, and
    grad_weight = Σ (1 + scale) · S over samples.
    """
    if x.numel() == 0:
        zero(grad_scale, grad_shift, grad_weight)
        return
    (tokens, width), samples = x.shape[-2:], x.numel() // (x.shape[-2] * x.shape[-1])
    grad_y, grad_stride = strided_rows(grad_y)
    size = 2 * x.element_size()
    x, x_stride = strided_rows(x)
    scale, weight = rows_of(scale), contiguous(weight)
    block, several, warps, stages, programs = backward_shape(width, mean is not None, size, shared_memory(x.device))
    programs = min(cdiv(tokens, several), programs_of_sample(programs * processors(x.device), samples))
    products = grad_scale is not None or grad_weight is not None
    part = x.new_empty((2, samples * programs, width), dtype=torch.float32) if products or grad_shift is not None else None
    backward_launch(
        (programs * samples,), grad_y, x, scale, weight, mean, inverse, grad_x, part, grad_stride, x_stride, scale.stride(0), tokens, width, programs,
        ROWS=several, BLOCK=block, STAGES=stages, num_warps=warps, enable_fp_fusion=fuses(block) and mean is None,
    )  # fmt: skip
    if part is None:
        return
    of_samples = None if grad_weight is None else x.new_empty((1, samples, width), dtype=torch.float32)
    strips = cdiv(width, STRIP)
    sum_launch(
        (strips * samples,), part, scale, weight, grad_scale, grad_shift, of_samples, scale.stride(0), programs, width, samples, strips,
        ROWS=STRIP_ROWS, BLOCK=STRIP,
    )  # fmt: skip
    if of_samples is not None:
        column_sum_launch((cdiv(width, 16), 1), of_samples, grad_weight, None, samples, width, ROWS=128, BLOCK=16)


# Share of copy bandwidth on one H200 (bfloat16): at 3072 columns .93 and, centered, .89; at 1152 .78 and .62. Where a row is centered, a second block
# of 256 columns slows it down: .48.
def forward_shape(width: int, centered: bool) -> tuple[int, int, int, int]:
    """Columns of a row's first and second block, rows of a program, warps."""
    block = power_of_two(width)
    if block <= 1024:
        return block, 0, max(1, min(64, 4096 // block)), 4
    if block > 4096:
        return block, 0, 1, 16
    if centered:
        return *((block, 0) if block <= 2048 else blocks_of(width)), 2, 4
    first, rest = blocks_of(width)
    return first, rest, 4 if block <= 2048 else 1 if rest else 2, 4


def programs_of_sample(most: int, samples: int) -> int:
    """So that all of them run at once; of few, one more than that is faster all the same, as they have less to do each."""
    share = most // samples
    return share if share >= 8 else cdiv(most, samples)


# One block of columns: with two the backward pass is slower, at 1152 columns by 9 % (H200).
def backward_shape(width: int, centered: bool, size: int, shared: int) -> tuple[int, int, int, int, int]:
    """Block, rows, warps, pipeline stages, programs per multiprocessor; size is the bytes of a column of both tensors."""
    block = power_of_two(width)
    if block <= 1024:
        rows, warps, programs = max(1, min(64, 4096 // block)), 4, 4
    elif block <= 2048:
        rows, warps, programs = (1, 4, 2) if centered else (2, 4, 4)
    else:
        rows, warps, programs = 1, 4 if block <= 4096 else 16, 2
    stages = 3 if 3 * size * rows * block < shared - 2048 else 1
    return block, rows, warps, stages, programs


@triton.jit
def forward_kernel(
    x, scale, shift, weight, y, mean, inverse, x_stride, scale_stride, shift_stride, tokens, width, groups, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Program s · groups + p computes ROWS tokens of sample s. One dimension, since the second of a grid ends at 65535.

    A row is BLOCK columns, and a tail of REST more.
    """
    sample = (tl.program_id(0) // groups).to(tl.int64)
    token = (tl.program_id(0) % groups) * ROWS + tl.arange(0, ROWS)
    row = sample * tokens + token
    there = token < tokens
    x += row[:, None] * x_stride
    y += row[:, None] * width
    scale += sample * scale_stride
    if shift is not None:
        shift += sample * shift_stride
    column = tl.arange(0, BLOCK)
    mask = there[:, None] & (column < width)[None, :]
    value = read(x + column[None, :], mask)
    if REST:
        tail = BLOCK + tl.arange(0, REST)
        tail_mask = there[:, None] & (tail < width)[None, :]
        tail_value = read(x + tail[None, :], tail_mask)
    # Loads behind the reductions would wait for them.
    factors = modulation(scale, weight, column, width)
    moved = None if shift is None else read(shift + column, column < width)
    if REST:
        tail_factors = modulation(scale, weight, tail, width)
        tail_moved = None if shift is None else read(shift + tail, tail < width)
    if mean is not None:
        average = tl.sum(value, 1)
        if REST:
            average += tl.sum(tail_value, 1)
        average = tl.div_rn(average, 1.0 * width)
        tl.store(mean + row, average, mask=there)
        value = tl.where(mask, value - average[:, None], 0.0)
        if REST:
            tail_value = tl.where(tail_mask, tail_value - average[:, None], 0.0)
    square = tl.sum(value * value, 1)
    if REST:
        square += tl.sum(tail_value * tail_value, 1)
    factor = tl.rsqrt(square / width + eps)
    tl.store(inverse + row, factor, mask=there)
    write(y + column[None, :], value * factor[:, None], factors, moved, mask)
    if REST:
        write(y + tail[None, :], tail_value * factor[:, None], tail_factors, tail_moved, tail_mask)


@triton.jit
def modulation(scale, weight, column, width):
    """(1 + scale) · weight of a block of columns."""
    factors = 1.0 + read(scale + column, column < width)
    if weight is not None:
        factors = factors * read(weight + column, column < width)
    return factors


@triton.jit
def write(y, value, factors, moved, mask):
    """Store normalized values, modulated."""
    value = value * factors[None, :]
    if moved is not None:
        value = value + moved[None, :]
    tl.store(y, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, scale, weight, mean, inverse, grad_x, part, grad_stride, x_stride, scale_stride, tokens, width, programs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program s · programs + p walks every programs-th group of ROWS tokens of sample s, from the p-th on."""
    program = tl.program_id(0) % programs
    sample = (tl.program_id(0) // programs).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factors = modulation(scale + sample * scale_stride, weight, column, width)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(program * ROWS, tokens, programs * ROWS, num_stages=STAGES):
        token = start + tl.arange(0, ROWS)
        row = sample * tokens + token
        mask = (token < tokens)[:, None] & inside[None, :]
        grad = read(grad_y + row[:, None] * grad_stride + column[None, :], mask)
        value = read(x + row[:, None] * x_stride + column[None, :], mask)
        factor = tl.load(inverse + row, mask=token < tokens, other=0.0)[:, None]
        if mean is not None:
            value = value - tl.load(mean + row, mask=token < tokens, other=0.0)[:, None]
        value = value * factor
        if part is not None:
            products += tl.sum(grad * value, 0)
            sums += tl.sum(grad, 0)
        if grad_x is not None:
            grad = grad * factors[None, :]
            if mean is not None:
                # Centered first: of two columns nothing but round-off would be left of a larger product.
                grad = tl.where(mask, grad - (tl.sum(grad, 1) / width)[:, None], 0.0)
            result = (grad - value * (tl.sum(grad * value, 1) / width)[:, None]) * factor
            tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
    if part is not None:
        first = part + (sample * programs + program) * width + column
        tl.store(first, products, mask=inside)
        tl.store(first + tl.num_programs(0).to(tl.int64) * width, sums, mask=inside)


@triton.jit
def sum_kernel(
    part, scale, weight, grad_scale, grad_shift, of_samples, scale_stride, programs, width, samples, strips,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program s · strips + c adds what the programs of sample s have of column strip c."""
    sample = (tl.program_id(0) // strips).to(tl.int64)
    column = (tl.program_id(0) % strips) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & inside[None, :]
        first = part + (sample * programs + row)[:, None] * width + column[None, :]
        products += tl.load(first, mask=mask, other=0.0)
        sums += tl.load(first + tl.cast(samples, tl.int64) * programs * width, mask=mask, other=0.0)
    product = tl.sum(products, 0)
    if of_samples is not None:
        tl.store(of_samples + sample * width + column, product * (1.0 + read(scale + sample * scale_stride + column, inside)), mask=inside)
    if weight is not None:
        product = product * read(weight + column, inside)
    if grad_scale is not None:
        tl.store(grad_scale + sample * width + column, product.to(grad_scale.dtype.element_ty), mask=inside)
    if grad_shift is not None:
        tl.store(grad_shift + sample * width + column, tl.sum(sums, 0).to(grad_shift.dtype.element_ty), mask=inside)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
sum_launch = Launcher(sum_kernel)
