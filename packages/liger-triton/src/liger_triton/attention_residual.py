# SPDX-License-Identifier: Apache-2.0
"""attention_residual in Triton: one pass over the layers forward, with an online softmax; two backward, since a score's gradient depends on all layers.

The second pass over a row follows the first at once, and finds the layers in the cache.
"""

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
    blocks_of,
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
# Layers that are on their way at once, and warps of a processor that walk rows backward.
STAGES, WALKING = 3, 16


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
    return layers.new_empty(layers.shape[1:]), layers.new_empty((2, rows, layers.shape[0]), dtype=torch.float32)


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
    block, rest, warps, stages = _backward_shape(width)
    programs = min(rows, WALKING // warps * processors(layers.device))
    summed = grad_query is not None or grad_weight is not None
    part = layers.new_empty((programs, width), dtype=torch.float32) if summed else None
    backward_launch(
        (programs,), grad_y, layers, query, weight, statistics, grad_layers, part,
        grad_y.stride(0), layers.stride(0), layers.stride(1), depth, rows, width,
        BLOCK=block, REST=rest, DEPTH=power_of_two(depth), STAGES=_stages(layers, block + rest, stages), num_warps=warps,
        enable_fp_fusion=fuses(rest or block) and depth <= 32,
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


# Share of copy bandwidth on one H200 (bfloat16), forward and backward: .54 at 512 columns, .68 at 1024, .65 at 2304, .81 at 4096 (8192 rows of 9
# layers), .68 at 2048 (4096 rows of 25).
def _backward_shape(width: int) -> tuple[int, int, int, int]:
    """Columns of a row's first and second block, warps, layers that are on their way at once."""
    block, rest = blocks_of(width)
    return block, rest, max(1, min(WALKING, block // 512)), STAGES if block <= 2048 else STAGES + 1


def _stages(layers: Tensor, tile: int, most: int = STAGES) -> int:
    """As many, if two programs then fit in shared memory."""
    return most if 2 * (most - 1) * tile * layers.element_size() < shared_memory(layers.device) - 8192 else 1


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
    return value


@triton.jit
def forward_kernel(
    layers, query, weight, y, statistics, layer_stride, row_stride, depth, rows, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes ROWS rows: each layer is read once, and what was summed is scaled where the highest score rises."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    by = weighted_query(query, weight, column, width)[None, :]
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    layers += row[:, None] * row_stride + column[None, :]
    inverses = tl.cast(depth, tl.int64) * rows
    for k in tl.range(0, depth, num_stages=STAGES):
        value = read(layers + tl.cast(k, tl.int64) * layer_stride, mask)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
        score = tl.sum(value * by, 1) * inverse
        at = statistics + row * depth + k
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
def backward_kernel(
    grad_y, layers, query, weight, statistics, grad_layers, part, grad_stride, layer_stride, row_stride, depth, rows, width,
    BLOCK: tl.constexpr, REST: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p walks every programs-th row; what it adds up for query and weight goes to row p of part. A row is BLOCK columns, and a tail of
    REST more.

    The gradient of layer k is a_k · grad_y + slope_k · (query · weight) - shrink_k · layers_k.
    """
    program = tl.program_id(0)
    layer = tl.arange(0, DEPTH)
    column = tl.arange(0, BLOCK)
    inside = column < width
    by = weighted_query(query, weight, column, width)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    if REST:
        tail = BLOCK + tl.arange(0, REST)
        tail_inside = tail < width
        tail_by = weighted_query(query, weight, tail, width)
        tail_sums = tl.zeros((REST,), dtype=tl.float32)
    for start in range(program, rows, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        grad = read(grad_y + row * grad_stride + column, inside)
        if REST:
            tail_grad = read(grad_y + row * grad_stride + tail, tail_inside)
        product = tl.zeros((DEPTH,), dtype=tl.float32)
        for k in tl.range(0, depth, num_stages=STAGES):
            at = layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride
            # A scalar: each thread keeps the products of a few layers only, not of all.
            one = tl.sum(grad * read(at + column, inside))
            if REST:
                one += tl.sum(tail_grad * read(at + tail, tail_inside))
            product = tl.where(layer == k, one, product)
        share, slope, shrink = slopes(product, statistics, row, layer, depth, rows, width)
        for back in tl.range(0, depth, num_stages=STAGES):
            # The last layer comes first: it was read last, and is the surest to be in the cache.
            k = depth - 1 - back
            at = layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride
            value = read(at + column, inside)
            slope_k = tl.sum(tl.where(layer == k, slope, 0.0))
            sums += slope_k * value
            if REST:
                tail_value = read(at + tail, tail_inside)
                tail_sums += slope_k * tail_value
            if grad_layers is not None:
                share_k = tl.sum(tl.where(layer == k, share, 0.0))
                shrink_k = tl.sum(tl.where(layer == k, shrink, 0.0))
                to = grad_layers + (tl.cast(k, tl.int64) * rows + row) * width
                write(to + column, share_k * grad + slope_k * by - shrink_k * value, inside)
                if REST:
                    write(to + tail, share_k * tail_grad + slope_k * tail_by - shrink_k * tail_value, tail_inside)
    if part is not None:
        tl.store(part + program.to(tl.int64) * width + column, sums, mask=inside)
        if REST:
            tl.store(part + program.to(tl.int64) * width + tail, tail_sums, mask=tail_inside)


@triton.jit
def slopes(product, statistics, row, layer, depth, rows, width):
    """Three numbers for each layer of a row: its share a_k, the gradient of its score times inverse, and how much of it the norm of its key
    takes away.

    With g = grad_y and product_k = Σ g · layers_k the gradient of score k is a_k · (product_k - Σ_l a_l product_l).
    """
    at = statistics + row * depth + layer
    score = tl.load(at, mask=layer < depth, other=float("-inf"))
    inverse = tl.load(at + tl.cast(depth, tl.int64) * rows, mask=layer < depth, other=0.0)
    top = tl.max(score, 0)
    share = tl.exp(score - top)
    # Only differences from the product of the layer with the highest score: that layer's own would be what is left of two equal numbers.
    highest = (score == top).to(tl.float32)
    product = product - tl.sum(product * highest, 0) / tl.sum(highest, 0)
    share = share / tl.sum(share, 0)
    slope = share * (product - tl.sum(share * product, 0)) * inverse
    return share, slope, slope * tl.where(layer < depth, score, 0.0) * inverse / width


@triton.jit
def write(grad_layer, result, mask):
    """Store what is not read again soon: the cache keeps the layers."""
    tl.store(grad_layer, result.to(grad_layer.dtype.element_ty), mask=mask, cache_modifier=".cs")


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
backward_launch = Launcher(backward_kernel)
sum_launch = Launcher(sum_kernel)
