# SPDX-License-Identifier: Apache-2.0
"""attention_residual in Triton: one pass over the layers forward, with an online softmax; two backward, since a score's gradient depends on all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs, differentiable
from liger_triton._norm_sum import read, zero
from liger_triton.launch import (
    Launcher,
    TritonKernel,
    cdiv,
    contiguous,
    dense_like,
    fuses,
    power_of_two,
    processors,
    row_shape,
    rows_of,
    shared_memory,
    supported,
)

# The longest rows and the most layers.
WIDEST, DEEPEST = 16384, 256
# Columns of a program that adds what the programs have, and rows that it reads at once.
STRIP, STRIP_ROWS = 32, 32
# Columns and warps of a program that writes gradients, such programs for each processor, and layers that are on their way at once.
TILE, WARPS, PROGRAMS, STAGES = 1024, 4, 8, 3


def attention_residual(layers: Tensor, query: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    supported(layers, query, weight)
    if layers.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {layers.shape[-1]} columns, more than {WIDEST}")
    if layers.shape[0] > DEEPEST:
        raise Unsupported(f"{layers.shape[0]} layers, more than {DEEPEST}")
    result: Tensor = _attention_residual(layers, query, weight, float(eps))
    return result


def _allocate(layers: Tensor, query: Tensor, weight: Tensor | None, eps: float) -> Outputs:
    rows = layers[0].numel() // max(1, layers.shape[-1])
    # Scores, and what scales the keys.
    return layers.new_empty(layers.shape[1:]), layers.new_empty((2, layers.shape[0], rows), dtype=torch.float32)


def _launch(y: Tensor, statistics: Tensor, /, layers: Tensor, query: Tensor, weight: Tensor | None, eps: float) -> None:
    if layers.numel() == 0:
        return
    layers = _stacked(layers)
    depth, rows, width = layers.shape
    block, several, warps = _shape(width)
    stages = _stages(layers, several * block)
    forward_launch(
        (cdiv(rows, several),), layers, query.contiguous(), contiguous(weight), y, statistics,
        layers.stride(0), layers.stride(1), depth, rows, width, eps,
        ROWS=several, BLOCK=block, STAGES=stages, num_warps=warps, enable_fp_fusion=fuses(block),
    )  # fmt: skip


def _allocate_backward(
    grad_y: Tensor, layers: Tensor, query: Tensor, weight: Tensor | None, statistics: Tensor, needs: list[bool]
) -> Outputs:
    return tuple(dense_like(t) if need and t is not None else None for need, t in zip(needs, (layers, query, weight), strict=True))


def _launch_backward(
    grad_layers: Tensor | None, grad_query: Tensor | None, grad_weight: Tensor | None, /, grad_y: Tensor, layers: Tensor, query: Tensor,
    weight: Tensor | None, statistics: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if layers.numel() == 0:
        zero(grad_query, grad_weight)
        return
    layers, grad_y, query, weight = _stacked(layers), rows_of(grad_y), query.contiguous(), contiguous(weight)
    depth, rows, width = layers.shape
    block, several, warps = _shape(width)
    slopes = layers.new_empty((3, depth, rows), dtype=torch.float32)
    slope_launch(
        (cdiv(rows, several),), grad_y, layers, statistics, slopes, grad_y.stride(0), layers.stride(0), layers.stride(1), depth, rows, width,
        ROWS=several, BLOCK=block, DEPTH=power_of_two(depth), STAGES=_stages(layers, several * block), num_warps=warps,
        enable_fp_fusion=fuses(block) and depth <= 32,
    )  # fmt: skip
    tiles = cdiv(width, TILE)
    programs = min(rows, cdiv(PROGRAMS * processors(layers.device), tiles))
    summed = grad_query is not None or grad_weight is not None
    part = layers.new_empty((programs, width), dtype=torch.float32) if summed else None
    backward_launch(
        (tiles, programs), grad_y, layers, query, weight, slopes, grad_layers, part,
        grad_y.stride(0), layers.stride(0), layers.stride(1), depth, rows, width,
        BLOCK=TILE, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    if part is not None:
        sum_launch((cdiv(width, STRIP),), part, query, weight, grad_query, grad_weight, programs, width, ROWS=STRIP_ROWS, BLOCK=STRIP)


def _stacked(layers: Tensor) -> Tensor:
    """The layers as (depth, rows, width) with adjacent columns, in place where the strides allow."""
    shape = (layers.shape[0], layers.shape[1:-1].numel(), layers.shape[-1])
    if layers.stride(-1) != 1:
        layers = layers.contiguous()
    try:
        return layers.view(shape)
    except RuntimeError:
        return layers.contiguous().view(shape)


def _shape(width: int) -> tuple[int, int, int]:
    return row_shape(width, 2048, lambda block: 4 if block <= 4096 else 16)


def _stages(layers: Tensor, tile: int) -> int:
    """STAGES, if two programs then fit in shared memory."""
    return STAGES if 2 * (STAGES - 1) * tile * layers.element_size() < shared_memory(layers.device) - 8192 else 1


_attention_residual = differentiable(
    TritonKernel("attention_residual", _allocate, _launch),
    TritonKernel("attention_residual_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def weighted_query(query, weight, column, width):
    """query · weight, in float32."""
    inside = column < width
    value = read(query + column, inside)
    if weight is not None:
        value = value * read(weight + column, inside)
    return value[None, :]


@triton.jit
def forward_kernel(
    layers, query, weight, y, statistics, layer_stride, row_stride, depth, rows, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes ROWS rows: each layer is read once, and what was summed is scaled where the highest score rises."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    by = weighted_query(query, weight, column, width)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    layers += row[:, None] * row_stride + column[None, :]
    inverses = tl.cast(depth, tl.int64) * rows
    for k in tl.range(0, depth, num_stages=STAGES):
        value = read(layers + tl.cast(k, tl.int64) * layer_stride, mask)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
        score = tl.sum(value * by, 1) * inverse
        at = statistics + tl.cast(k, tl.int64) * rows + row
        tl.store(at, score, mask=row < rows)
        tl.store(at + inverses, inverse, mask=row < rows)
        higher = tl.maximum(top, score)
        scale = tl.exp(top - higher)
        power = tl.exp(score - higher)
        result = result * scale[:, None] + power[:, None] * value
        total = total * scale + power
        top = higher
    tl.store(y + row[:, None] * width + column[None, :], (result / total[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def slope_kernel(
    grad_y, layers, statistics, slopes, grad_stride, layer_stride, row_stride, depth, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes three numbers for each layer of ROWS rows: its share a_k, the gradient of its score times inverse, and how much
    of it the norm of its key takes away.

    With g = grad_y the gradient of score k is a_k · (Σ g · layers_k - Σ_l a_l Σ g · layers_l).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    layer = tl.arange(0, DEPTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    grad = read(grad_y + row[:, None] * grad_stride + column[None, :], mask)
    layers += row[:, None] * row_stride + column[None, :]
    product = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for k in tl.range(0, depth, num_stages=STAGES):
        value = read(layers + tl.cast(k, tl.int64) * layer_stride, mask)
        product = tl.where(layer[None, :] == k, tl.sum(grad * value, 1)[:, None], product)
    size = tl.cast(depth, tl.int64) * rows
    at = layer.to(tl.int64)[None, :] * rows + row[:, None]
    known = (row < rows)[:, None] & (layer < depth)[None, :]
    score = tl.load(statistics + at, mask=known, other=float("-inf"))
    inverse = tl.load(statistics + size + at, mask=known, other=0.0)
    # Rows behind the last one have no scores.
    top = tl.where(row < rows, tl.max(score, 1), 0.0)[:, None]
    share = tl.exp(score - top)
    # Only differences from the product of the layer with the highest score: that layer's own would be what is left of two equal numbers.
    highest = (score == top).to(tl.float32)
    product = product - (tl.sum(product * highest, 1) / tl.maximum(tl.sum(highest, 1), 1.0))[:, None]
    total = tl.where(row < rows, tl.sum(share, 1), 1.0)[:, None]
    slope = share / total * (product - tl.sum(share * product, 1)[:, None] / total) * inverse
    tl.store(slopes + at, share / total, mask=known)
    tl.store(slopes + size + at, slope, mask=known)
    tl.store(slopes + 2 * size + at, slope * tl.where(known, score, 0.0) * inverse / width, mask=known)


@triton.jit
def backward_kernel(
    grad_y, layers, query, weight, slopes, grad_layers, part, grad_stride, layer_stride, row_stride, depth, rows, width,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (c, p) walks every programs-th row of one tile of columns; what it adds up for query and weight goes to row p of part.

    The gradient of layer k is a_k · grad_y + slope_k · (query · weight) - shrink_k · layers_k.
    """
    program = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    by = read(query + column, inside)
    if weight is not None:
        by = by * read(weight + column, inside)
    size = tl.cast(depth, tl.int64) * rows
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(program, rows, tl.num_programs(1)):
        row = tl.cast(start, tl.int64)
        grad = read(grad_y + row * grad_stride + column, inside)
        for k in tl.range(0, depth, num_stages=STAGES):
            at = tl.cast(k, tl.int64) * rows + row
            value = read(layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride + column, inside)
            slope = tl.load(slopes + size + at)
            if part is not None:
                sums += slope * value
            if grad_layers is not None:
                result = tl.load(slopes + at) * grad + slope * by - tl.load(slopes + 2 * size + at) * value
                tl.store(grad_layers + at * width + column, result.to(grad_layers.dtype.element_ty), mask=inside)
    if part is not None:
        tl.store(part + program.to(tl.int64) * width + column, sums, mask=inside)


@triton.jit
def sum_kernel(part, query, weight, grad_query, grad_weight, programs, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds one strip of what the programs have, and multiplies it by the other factor of query · weight."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        sums += tl.load(part + row[:, None] * width + column[None, :], mask=(row < programs)[:, None] & inside[None, :], other=0.0)
    total = tl.sum(sums, 0)
    if grad_weight is not None:
        tl.store(grad_weight + column, (total * read(query + column, inside)).to(grad_weight.dtype.element_ty), mask=inside)
    if grad_query is not None:
        if weight is not None:
            total = total * read(weight + column, inside)
        tl.store(grad_query + column, total.to(grad_query.dtype.element_ty), mask=inside)


forward_launch = Launcher(forward_kernel)
slope_launch = Launcher(slope_kernel)
backward_launch = Launcher(backward_kernel)
sum_launch = Launcher(sum_kernel)
