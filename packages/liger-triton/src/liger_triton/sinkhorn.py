# SPDX-License-Identifier: Apache-2.0
"""sinkhorn in Triton: all iterations in registers; backward repeats them for the divisors, then undoes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._streams import MOST, positions
from liger_triton.launch import Launcher, cdiv, dense_like, differentiable_kernels, first_like, power_of_two, supported

# Matrices of a program.
ROWS, WARPS = 32, 1


def sinkhorn(x: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    supported(x)
    if x.shape[-1] > MOST:
        raise Unsupported(f"matrices of {x.shape[-1]} rows, more than {MOST}")
    return _sinkhorn(x, iterations, float(eps))


def _launch(y: Tensor, /, x: Tensor, iterations: int, eps: float) -> None:
    if x.numel():
        _iterate(y, None, x, iterations, eps)


def _allocate_backward(grad_y: Tensor, x: Tensor, iterations: int, eps: float, needs: list[bool]) -> Outputs:
    size = x.shape[-1]
    # For each matrix: the last iterate, and all divisors.
    floats = x.numel() // max(1, size) * (size + 2 * iterations - 1)
    return dense_like(x), x.new_empty(floats, dtype=torch.float32)


def _launch_backward(
    grad_x: Tensor, scratch: Tensor, /, grad_y: Tensor, x: Tensor, iterations: int, eps: float, needs: list[bool]
) -> None:
    if x.numel() == 0:
        return
    last, divisors = scratch[: x.numel()], scratch[x.numel() :]
    _iterate(last, divisors, x, iterations, eps)
    size, grad_y, x = x.shape[-1], positions(grad_y, 2), positions(x, 2)
    backward_launch(
        (cdiv(x.shape[0], ROWS),), grad_y, x, last, divisors, grad_x, *grad_y.stride(), *x.stride(), x.shape[0],
        iterations,
        COUNT=size, SIZE=power_of_two(size), ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip


def _iterate(y: Tensor, divisors: Tensor | None, x: Tensor, iterations: int, eps: float) -> None:
    size, x = x.shape[-1], positions(x, 2)
    forward_launch(
        (cdiv(x.shape[0], ROWS),), x, y, divisors, *x.stride(), x.shape[0], iterations, eps,
        COUNT=size, SIZE=power_of_two(size), ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip


_sinkhorn = differentiable_kernels("sinkhorn", first_like, _launch, _launch_backward, _allocate_backward)


@triton.jit
def softmax_of(x, x_stride, x_row, x_column, i, j, row, rows, COUNT: tl.constexpr):
    """Return the softmax of each row of the matrices (i, j, row), zero outside them."""
    inside = (i < COUNT) & (j < COUNT)
    value = tl.load(x + row * x_stride + i * x_row + j * x_column, mask=inside & (row < rows), other=0.0).to(tl.float32)
    value = tl.where(j < COUNT, value, float("-inf"))
    power = tl.exp(value - tl.max(value, 1)[:, None, :])
    return tl.where(inside, power / tl.sum(power, 1)[:, None, :], 0.0)


@triton.jit
def forward_kernel(
    x, y, divisors, x_stride, x_row, x_column, rows, iterations, eps,
    COUNT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program iterates on ROWS matrices, which are the last dimension, so that few threads share one."""
    i, j = tl.arange(0, SIZE).to(tl.int64)[:, None, None], tl.arange(0, SIZE).to(tl.int64)[None, :, None]
    step = tl.cast(rows, tl.int64) * (2 * COUNT)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, None, :]
    inside = (i < COUNT) & (j < COUNT)
    p = tl.where(inside, softmax_of(x, x_stride, x_row, x_column, i, j, row, rows, COUNT) + eps, 0.0)
    down = tl.sum(p, 0)[None, :, :] + eps
    p = p / down
    if divisors is not None:
        tl.store(divisors + j * rows + row, down, mask=(j < COUNT) & (row < rows))
    for _ in range(1, iterations):
        across = tl.sum(p, 1)[:, None, :] + eps
        p = p / across
        down = tl.sum(p, 0)[None, :, :] + eps
        p = p / down
        if divisors is not None:
            divisors += step
            tl.store(divisors + (i - COUNT) * rows + row, across, mask=(i < COUNT) & (row < rows))
            tl.store(divisors + j * rows + row, down, mask=(j < COUNT) & (row < rows))
    out = y + row * (COUNT * COUNT) + i * COUNT + j
    tl.store(out, p.to(y.dtype.element_ty), mask=inside & (row < rows))


@triton.jit
def backward_kernel(
    grad_y, x, last, divisors, grad_x, grad_stride, grad_row, grad_column, x_stride, x_row, x_column, rows, iterations,
    COUNT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program walks back through the iterations of ROWS matrices.

    For q = p / s with s = Σ p + eps, the gradient of p is (g - Σ g · q) / s, and p is q · s.
    """
    i, j = tl.arange(0, SIZE).to(tl.int64)[:, None, None], tl.arange(0, SIZE).to(tl.int64)[None, :, None]
    step = tl.cast(rows, tl.int64) * (2 * COUNT)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, None, :]
    inside = (i < COUNT) & (j < COUNT) & (row < rows)
    grad = tl.load(grad_y + row * grad_stride + i * grad_row + j * grad_column, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(last + row * (COUNT * COUNT) + i * COUNT + j, mask=inside, other=0.0)
    divisors += (iterations - 1) * step
    for _ in range(1, iterations):
        down = tl.load(divisors + j * rows + row, mask=(j < COUNT) & (row < rows), other=1.0)
        grad = (grad - tl.sum(grad * p, 0)[None, :, :]) / down
        p = p * down
        across = tl.load(divisors + (i - COUNT) * rows + row, mask=(i < COUNT) & (row < rows), other=1.0)
        grad = (grad - tl.sum(grad * p, 1)[:, None, :]) / across
        p = p * across
        divisors -= step
    down = tl.load(divisors + j * rows + row, mask=(j < COUNT) & (row < rows), other=1.0)
    grad = (grad - tl.sum(grad * p, 0)[None, :, :]) / down
    p = softmax_of(x, x_stride, x_row, x_column, i, j, row, rows, COUNT)
    grad = p * (grad - tl.sum(grad * p, 1)[:, None, :])
    tl.store(grad_x + row * (COUNT * COUNT) + i * COUNT + j, grad.to(grad_x.dtype.element_ty), mask=inside)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
