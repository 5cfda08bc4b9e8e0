# SPDX-License-Identifier: Apache-2.0
"""project_streams in Triton: the streams are read once forward, and once backward for both gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._norm import read, sum_columns, zero
from liger_triton._streams import positions
from liger_triton.launch import Launcher, cdiv, differentiable_kernels, power_of_two, processors, supported

# The most logits that a program holds, and the rows and columns of the tile that it multiplies.
MOST, ROWS, BLOCK = 128, 64, 64


def project_streams(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    supported(x, weight)
    if weight.shape[0] > MOST:
        raise Unsupported(f"{weight.shape[0]} logits, more than {MOST}")
    return _project_streams(x, weight, float(eps))


def _allocate(x: Tensor, weight: Tensor, eps: float) -> Outputs:
    leading = x.shape[:-2]
    return x.new_empty((*leading, weight.shape[0]), dtype=torch.float32), x.new_empty(leading, dtype=torch.float32)


def _launch(y: Tensor, inverse: Tensor, /, x: Tensor, weight: Tensor, eps: float) -> None:
    if x.numel() == 0 or y.numel() == 0:
        y.zero_()
        return
    x, weight = positions(x.flatten(-2), 1, adjacent=True), positions(weight, 1, adjacent=True)
    (rows, columns), count = x.shape, weight.shape[0]
    blocks = cdiv(rows, ROWS)
    # Enough programs share the columns to fill all processors; each takes a multiple of the tile.
    span = BLOCK * cdiv(columns, BLOCK * max(1, min(cdiv(columns, 16 * BLOCK), cdiv(3 * processors(x.device), blocks))))
    splits = cdiv(columns, span)
    partials = x.new_empty((splits, rows, count + 1), dtype=torch.float32)
    forward_launch(
        (blocks, splits), x, weight, partials, x.stride(0), weight.stride(0), rows, columns, span,
        COUNT=count, LOGITS=_logits(count), EXACT=x.dtype == torch.bfloat16, ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    finish_launch(
        (cdiv(rows, 32),), partials, y, inverse, splits, rows, columns, eps, COUNT=count, LOGITS=_logits(count), ROWS=32
    )


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, /, grad_y: Tensor, x: Tensor, weight: Tensor, y: Tensor,
    inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0 or y.numel() == 0:
        zero(grad_x, grad_weight)
        return
    grad_y, x, weight = (
        positions(grad_y, 1),
        positions(x.flatten(-2), 1, adjacent=True),
        positions(weight, 1, adjacent=True),
    )
    (rows, columns), count = x.shape, weight.shape[0]
    strips = cdiv(columns, BLOCK)
    span = ROWS * cdiv(rows, ROWS * max(1, min(cdiv(rows, 4 * ROWS), cdiv(3 * processors(x.device), strips))))
    splits = cdiv(rows, span)
    partials = None if grad_weight is None else x.new_empty((1, splits, count * columns), dtype=torch.float32)
    backward_launch(
        (strips, splits), grad_y, x, weight, y, inverse, grad_x, partials,
        *grad_y.stride(), x.stride(0), weight.stride(0), rows, columns, span,
        COUNT=count, LOGITS=_logits(count), EXACT=x.dtype == torch.bfloat16, ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    if partials is not None:
        sum_columns(partials, grad_weight, None)


def _logits(count: int) -> int:
    # A matrix multiply takes at least 16.
    return max(16, power_of_two(count))


_project_streams = differentiable_kernels("project_streams", _allocate, _launch, _launch_backward)


@triton.jit
def halves(value):
    """Split a float32 number into a sum of three bfloat16 numbers."""
    high = value.to(tl.bfloat16)
    rest = value - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def times(a, b, total, EXACT: tl.constexpr):
    """Return total + a · b in float32. EXACT: b is bfloat16, and a is split into three such numbers."""
    if EXACT:
        high, middle, low = halves(a)
        total = tl.dot(low, b, total)
        total = tl.dot(middle, b, total)
        return tl.dot(high, b, total)
    else:
        return tl.dot(a, b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def forward_kernel(
    x, weight, partials, x_stride, weight_stride, rows, columns, span,
    COUNT: tl.constexpr, LOGITS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, s) multiplies ROWS rows and span s of columns into (logits, rows), and sums their squares."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    logit = tl.arange(0, LOGITS)
    first = tl.program_id(1) * span
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((LOGITS, ROWS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + span, columns), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(
            x + row[:, None] * x_stride + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        by = read(weight + logit[:, None] * weight_stride + column[None, :], (logit < COUNT)[:, None] & inside[None, :])
        wide = value.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        total = times(by, tl.trans(value), total, EXACT)
    partials += (tl.program_id(1).to(tl.int64) * rows + row) * (COUNT + 1)
    tl.store(partials[None, :] + logit[:, None], total, mask=(logit < COUNT)[:, None] & (row < rows)[None, :])
    tl.store(partials + COUNT, squares, mask=row < rows)


@triton.jit
def finish_kernel(
    partials, y, inverse, splits, rows, columns, eps, COUNT: tl.constexpr, LOGITS: tl.constexpr, ROWS: tl.constexpr
):
    """One program adds the results of all spans for ROWS rows, and scales them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    logit = tl.arange(0, LOGITS)
    mask = (row < rows)[:, None] & (logit < COUNT)[None, :]
    total = tl.zeros((ROWS, LOGITS), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for split in range(0, splits):
        source = partials + (tl.cast(split, tl.int64) * rows + row) * (COUNT + 1)
        total += tl.load(source[:, None] + logit[None, :], mask=mask, other=0.0)
        squares += tl.load(source + COUNT, mask=row < rows, other=0.0)
    scale = tl.rsqrt(squares / columns + eps)
    tl.store(inverse + row, scale, mask=row < rows)
    tl.store(y + row[:, None] * COUNT + logit[None, :], total * scale[:, None], mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, weight, y, inverse, grad_x, partials, grad_stride, grad_column, x_stride, weight_stride, rows, columns,
    span, COUNT: tl.constexpr, LOGITS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (c, s) walks its span of rows of a strip of columns.

    With g = grad_y · inverse: grad_x = g · weight - x · inverse² · Σ grad_y · y / columns, and grad_weight = gᵀ · x.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logit = tl.arange(0, LOGITS)
    used = logit < COUNT
    first = tl.program_id(1) * span
    if grad_x is not None:
        by = read(weight + logit[:, None] * weight_stride + column[None, :], used[:, None] & inside[None, :])
    sums = tl.zeros((LOGITS, BLOCK), dtype=tl.float32)
    for start in range(first, tl.minimum(first + span, rows), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        known = (row < rows)[:, None] & used[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        grad = read(grad_y + row[:, None] * grad_stride + logit[None, :] * grad_column, known)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)
        if grad_x is not None:
            logits = tl.load(y + row[:, None] * COUNT + logit[None, :], mask=known, other=0.0)
            shrink = tl.sum(grad * logits, 1) * scale * scale / columns
        grad = grad * scale[:, None]
        if grad_x is not None:
            if EXACT:
                # In float32's precision: with few columns, the subtraction below cancels most digits.
                high, middle, low = halves(grad)
                by_high, by_middle, by_low = halves(by)
                result = tl.dot(high, by_low, tl.dot(low, by_high, tl.dot(middle, by_middle)))
                result = tl.dot(high, by_high, tl.dot(high, by_middle, tl.dot(middle, by_high, result)))
            else:
                result = tl.dot(grad, by, input_precision="ieee")
            result = result - value.to(tl.float32) * shrink[:, None]
            tl.store(grad_x + row[:, None] * columns + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
        if partials is not None:
            sums = times(tl.trans(grad), value, sums, EXACT)
    if partials is not None:
        out = partials + (tl.program_id(1).to(tl.int64) * COUNT + logit[:, None]) * columns + column[None, :]
        tl.store(out, sums, mask=used[:, None] & inside[None, :])


forward_launch = Launcher(forward_kernel)
finish_launch = Launcher(finish_kernel)
backward_launch = Launcher(backward_kernel)
