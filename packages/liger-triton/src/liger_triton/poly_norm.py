# SPDX-License-Identifier: Apache-2.0
"""poly_norm in Triton: one pass forward; one backward, which also sums the gradients of the four numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs, differentiable
from liger_triton._norm_sum import column_sum_launch, read, zero
from liger_triton.launch import (
    Launcher,
    TritonKernel,
    cdiv,
    contiguous,
    dense_like,
    fuses,
    processors,
    row_shape,
    shared_memory,
    strided_rows,
    supported,
)

WIDEST = 16384


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    supported(x, weight, bias)
    if x.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {x.shape[-1]} columns, more than {WIDEST}")
    result: Tensor = _poly_norm(x, weight, bias, eps)
    return result


def _allocate(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Outputs:
    return dense_like(x), x.new_empty((x.numel() // max(1, x.shape[-1]), 3), dtype=torch.float32)


def _launch(y: Tensor, inverse: Tensor, /, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    block, several, warps = forward_shape(width)
    forward_launch(
        (cdiv(rows, several),), x, contiguous(weight), bias, y, inverse, x_stride, rows, width, eps,
        ROWS=several, BLOCK=block, num_warps=warps, enable_fp_fusion=fuses(block),
    )  # fmt: skip


def _allocate_backward(grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, inverse: Tensor, needs: list[bool]) -> Outputs:
    return tuple(dense_like(t) if need and t is not None else None for need, t in zip(needs, (x, weight, bias), strict=True))


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, /, grad_y: Tensor, x: Tensor, weight: Tensor,
    bias: Tensor | None, inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0:
        zero(grad_weight, grad_bias)
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = strided_rows(x)
    grad_y, grad_stride = strided_rows(grad_y)
    block, several, warps, stages, programs = backward_shape(width, 2 * x.element_size(), shared_memory(x.device))
    programs = min(cdiv(rows, several), programs * processors(x.device))
    part = None if grad_weight is None and grad_bias is None else x.new_empty((1, programs, 4), dtype=torch.float32)
    backward_launch(
        (programs,), grad_y, x, contiguous(weight), inverse, grad_x, part, grad_stride, x_stride, rows, width,
        ROWS=several, BLOCK=block, STAGES=stages, num_warps=warps, enable_fp_fusion=fuses(block),
    )  # fmt: skip
    if part is None:
        return
    sums = part.new_empty(4)
    column_sum_launch((1, 1), part, sums, None, programs, 4, ROWS=128, BLOCK=4)
    if grad_weight is not None:
        grad_weight.copy_(sums[:3])
    if grad_bias is not None:
        grad_bias.copy_(sums[3:].view(grad_bias.shape))


def forward_shape(width: int) -> tuple[int, int, int]:
    """Block of columns, rows of a program, warps."""
    return row_shape(width, 2048, lambda block: 4 if block <= 4096 else 8)


def backward_shape(width: int, size: int, shared: int) -> tuple[int, int, int, int, int]:
    """Block, rows, warps, pipeline stages, programs per multiprocessor; size is the bytes of a column of both tensors."""
    block, rows, warps = forward_shape(width)
    if block <= 2048:
        return block, rows, warps, 1, 8
    # Share of copy bandwidth on one H200 (bfloat16): at 4096 columns forward .93, full .94; at 8192 .97 and .89.
    return block, rows, warps, 3 if 3 * size * block < shared - 2048 else 1, 2 if block <= 4096 else 1


_poly_norm = differentiable(
    TritonKernel("poly_norm", _allocate, _launch),
    TritonKernel("poly_norm_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def forward_kernel(x, weight, bias, y, inverse, x_stride, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes ROWS rows, each in one block."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    factor_3 = tl.load(weight).to(tl.float32)
    factor_2 = tl.load(weight + 1).to(tl.float32)
    factor_1 = tl.load(weight + 2).to(tl.float32)
    value = read(x + row[:, None] * x_stride + column[None, :], mask)
    square = value * value
    cube = square * value
    third = tl.rsqrt(tl.sum(cube * cube, 1) / width + eps)
    second = tl.rsqrt(tl.sum(square * square, 1) / width + eps)
    first = tl.rsqrt(tl.sum(square, 1) / width + eps)
    tl.store(inverse + row * 3, third, mask=row < rows)
    tl.store(inverse + row * 3 + 1, second, mask=row < rows)
    tl.store(inverse + row * 3 + 2, first, mask=row < rows)
    # Horner's form: of the row, only the values stay in registers.
    result = value * (third * factor_3)[:, None] + (second * factor_2)[:, None]
    result = value * (value * result + (first * factor_1)[:, None])
    if bias is not None:
        result += tl.load(bias).to(tl.float32)
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, weight, inverse, grad_x, part, grad_stride, x_stride, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p walks every programs-th group of ROWS rows; the sums of its rows go to row p of part.

    With n the k-th power normalized and P = Σ grad_y · n of a row, the power's gradient is weight · inverse · (grad_y - n · P / width),
    and that of x is k · x^(k-1) times as much; here all are polynomials of u = x normalized.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    factor_3 = tl.load(weight).to(tl.float32)
    factor_2 = tl.load(weight + 1).to(tl.float32)
    factor_1 = tl.load(weight + 2).to(tl.float32)
    sum_3 = tl.zeros((ROWS,), dtype=tl.float32)
    sum_2 = tl.zeros((ROWS,), dtype=tl.float32)
    sum_1 = tl.zeros((ROWS,), dtype=tl.float32)
    sum_0 = tl.zeros((ROWS,), dtype=tl.float32)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        grad = read(grad_y + row[:, None] * grad_stride + column[None, :], mask)
        value = read(x + row[:, None] * x_stride + column[None, :], mask)
        third = tl.load(inverse + row * 3, mask=row < rows, other=0.0)
        second = tl.load(inverse + row * 3 + 1, mask=row < rows, other=0.0)
        first = tl.load(inverse + row * 3 + 2, mask=row < rows, other=1.0)
        # The normalized powers are u, ratio_2 · u² and ratio_3 · u³: of the row, only grad and u stay in registers.
        ratio_2 = tl.where(first > 0, second / first / first, 0.0)
        ratio_3 = tl.where(first > 0, third / first / first / first, 0.0)
        u = value * first[:, None]
        product = grad * u
        product_1 = tl.sum(product, 1)
        product = product * u
        product_2 = ratio_2 * tl.sum(product, 1)
        product_3 = ratio_3 * tl.sum(product * u, 1)
        sum_3 += product_3
        sum_2 += product_2
        sum_1 += product_1
        sum_0 += tl.sum(grad, 1)
        if grad_x is not None:
            slope_3 = 3.0 * factor_3 * ratio_3
            slope_2 = 2.0 * factor_2 * ratio_2
            back_3 = slope_3 * (ratio_3 * (product_3 / width))
            back_2 = slope_2 * (ratio_2 * (product_2 / width))
            back_1 = factor_1 * (product_1 / width)
            result = grad * (u * (u * slope_3[:, None] + slope_2[:, None]) + factor_1)
            result -= u * (u * (u * (u * (u * back_3[:, None]) + back_2[:, None])) + back_1[:, None])
            tl.store(grad_x + row[:, None] * width + column[None, :], (result * first[:, None]).to(grad_x.dtype.element_ty), mask=mask)
    if part is not None:
        tl.store(part + program * 4, tl.sum(sum_3, 0))
        tl.store(part + program * 4 + 1, tl.sum(sum_2, 0))
        tl.store(part + program * 4 + 2, tl.sum(sum_1, 0))
        tl.store(part + program * 4 + 3, tl.sum(sum_0, 0))


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
