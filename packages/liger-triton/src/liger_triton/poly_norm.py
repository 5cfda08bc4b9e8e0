# SPDX-License-Identifier: Apache-2.0
"""poly_norm in Triton: one pass forward; one backward, which also sums the gradients of the four numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._chunks import chunks_of, no_chunks, read_chunks, row_sum, warps_for, write_chunk
from liger_triton._norm import sum_columns, zero
from liger_triton.launch import (
    Launcher,
    contiguous,
    dense_like,
    differentiable_kernels,
    processors,
    stages_of,
    strided_rows,
    supported,
)

WIDEST = 16384
# Chunks of a row forward and backward, and warps of a multiprocessor backward. Share of copy bandwidth on one H200
# (bfloat16), forward · backward: .94 · .90 at 4096 columns, .97 · .95 at 14336.
MOST_CHUNKS, MOST_CHUNKS_BACKWARD, WARPS = 7, 11, 8


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    supported(x, weight, bias)
    if x.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {x.shape[-1]} columns, more than {WIDEST}")
    return _poly_norm(x, weight, bias, eps)


def _allocate(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Outputs:
    return dense_like(x), x.new_empty((x.numel() // max(1, x.shape[-1]), 3), dtype=torch.float32)


def _launch(y: Tensor, inverse: Tensor, /, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    forward_launch(
        (rows,), x, contiguous(weight), bias, y, inverse, x_stride, width, eps,
        **chunks_of(width, warps_for(width, MOST_CHUNKS)),
    )  # fmt: skip


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /, grad_y: Tensor, x: Tensor,
    weight: Tensor, bias: Tensor | None, inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0:
        zero(grad_weight, grad_bias)
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    grad_y, grad_stride = strided_rows(grad_y)
    warps = warps_for(width, MOST_CHUNKS_BACKWARD)
    several = max(1, WARPS // warps)
    stages = stages_of(several * 2 * width * x.element_size(), x)
    programs = min(rows, several * processors(x.device))
    partials = None if grad_weight is None and grad_bias is None else x.new_empty((1, programs, 4), dtype=torch.float32)
    backward_launch(
        (programs,), grad_y, x, contiguous(weight), inverse, grad_x, partials, grad_stride, x_stride, rows, width,
        STAGES=stages, **chunks_of(width, warps),
    )  # fmt: skip
    if partials is None:
        return
    sums = partials.new_empty(4)
    sum_columns(partials, sums, None)
    if grad_weight is not None:
        grad_weight.copy_(sums[:3])
    if grad_bias is not None:
        grad_bias.copy_(sums[3:].view(grad_bias.shape))


_poly_norm = differentiable_kernels("poly_norm", _allocate, _launch, _launch_backward)


@triton.jit
def forward_kernel(
    x, weight, bias, y, inverse, x_stride, WIDTH: tl.constexpr, eps, CHUNK: tl.constexpr
):  # fmt: skip
    """One program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    value = read_chunks(x + row * x_stride, WIDTH, CHUNK)
    squares = no_chunks()
    fourths = no_chunks()
    sixths = no_chunks()
    for c in tl.static_range(len(value)):
        square = value[c] * value[c]
        cube = square * value[c]
        squares += (square,)
        fourths += (square * square,)
        sixths += (cube * cube,)
    third = tl.rsqrt(row_sum(sixths) / WIDTH + eps)
    second = tl.rsqrt(row_sum(fourths) / WIDTH + eps)
    first = tl.rsqrt(row_sum(squares) / WIDTH + eps)
    tl.store(inverse + row * 3, third)
    tl.store(inverse + row * 3 + 1, second)
    tl.store(inverse + row * 3 + 2, first)
    third *= tl.load(weight).to(tl.float32)
    second *= tl.load(weight + 1).to(tl.float32)
    first *= tl.load(weight + 2).to(tl.float32)
    added = 0.0 if bias is None else tl.load(bias).to(tl.float32)
    for c in tl.static_range(len(value)):
        # Horner's form, in which only the values of the row stay in registers.
        result = value[c] * (value[c] * (value[c] * third + second) + first) + added
        write_chunk(y + row * WIDTH, result, c, WIDTH, CHUNK)


@triton.jit
def backward_kernel(
    grad_y, x, weight, inverse, grad_x, partials, grad_stride, x_stride, rows, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p walks every programs-th row; its sums go to row p of partials.

    With n the normalized k-th power and P = Σ grad_y · n of a row, the power's gradient is weight · inverse · (grad_y -
    n · P / width), and that of x is k · x^(k-1) times it. Here all are polynomials of u, the normalized x.
    """
    program = tl.program_id(0)
    factor_3 = tl.load(weight).to(tl.float32)
    factor_2 = tl.load(weight + 1).to(tl.float32)
    factor_1 = tl.load(weight + 2).to(tl.float32)
    sum_3 = tl.zeros((), dtype=tl.float32)
    sum_2 = tl.zeros((), dtype=tl.float32)
    sum_1 = tl.zeros((), dtype=tl.float32)
    sum_0 = tl.zeros((), dtype=tl.float32)
    for start in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(start, tl.int64)
        grad = read_chunks(grad_y + row * grad_stride, WIDTH, CHUNK)
        value = read_chunks(x + row * x_stride, WIDTH, CHUNK)
        third = tl.load(inverse + row * 3)
        second = tl.load(inverse + row * 3 + 1)
        first = tl.load(inverse + row * 3 + 2)
        # The normalized powers are u, ratio_2 · u² and ratio_3 · u³, so only grad and u stay in registers.
        ratio_2 = second / first / first
        ratio_3 = third / first / first / first
        normal = no_chunks()
        products = no_chunks()
        squares = no_chunks()
        cubes = no_chunks()
        for c in tl.static_range(len(value)):
            u = value[c] * first
            product = grad[c] * u
            normal += (u,)
            products += (product,)
            squares += (product * u,)
            cubes += (product * u * u,)
        product_1 = row_sum(products)
        product_2 = ratio_2 * row_sum(squares)
        product_3 = ratio_3 * row_sum(cubes)
        sum_3 += product_3
        sum_2 += product_2
        sum_1 += product_1
        sum_0 += row_sum(grad)
        if grad_x is not None:
            slope_3 = 3.0 * factor_3 * ratio_3
            slope_2 = 2.0 * factor_2 * ratio_2
            back_3 = slope_3 * (ratio_3 * (product_3 / WIDTH))
            back_2 = slope_2 * (ratio_2 * (product_2 / WIDTH))
            back_1 = factor_1 * (product_1 / WIDTH)
            for c in tl.static_range(len(value)):
                u = normal[c]
                square = u * u
                result = grad[c] * (u * (u * slope_3 + slope_2) + factor_1)
                result -= u * (square * (square * back_3 + back_2) + back_1)
                write_chunk(grad_x + row * WIDTH, result * first, c, WIDTH, CHUNK)
    if partials is not None:
        tl.store(partials + program * 4, sum_3)
        tl.store(partials + program * 4 + 1, sum_2)
        tl.store(partials + program * 4 + 2, sum_1)
        tl.store(partials + program * 4 + 3, sum_0)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
