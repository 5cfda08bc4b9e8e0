# SPDX-License-Identifier: Apache-2.0
"""attention_residual in Triton: one pass over the layers forward, with an online softmax; two backward, since a score's gradient depends on all layers.

The second pass over a row follows the first at once, and finds the layers in registers or in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs, differentiable
from liger_triton._chunks import (
    cast,
    chunks_of,
    multiplied,
    no_chunks,
    no_sums,
    plus_scaled,
    product_sum,
    read_chunks,
    stages_of,
    warps_for,
    write_chunk,
    write_chunks,
)
from liger_triton._norm_sum import SUMMED, read, zero
from liger_triton.launch import (
    Launcher,
    TritonKernel,
    cdiv,
    contiguous,
    dense_like,
    l2_cache,
    power_of_two,
    processors,
    rows_of,
    supported,
    wait,
)

# The longest rows and the most layers.
WIDEST, DEEPEST = 16384, 256
# Columns of a program that adds what the programs have.
STRIP = 16
# Chunks of a row and layers on their way at once, forward. Share of copy bandwidth on one H200 (bfloat16): .90 at 2304 columns, .96 at 4096 (8192 rows
# of 9 layers), .90 at 2048 (4096 rows of 25).
MOST_CHUNKS, MOST_STAGES = 9, 4
# The same backward, the most warps of a multiprocessor, and the share of the L2 cache that their rows may fill.
MOST_CHUNKS_BACKWARD, MOST_STAGES_BACKWARD, WALKING, KEPT = 5, 10, 8, 0.6


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
    options = chunks_of(width, warps_for(width, MOST_CHUNKS))
    forward_launch(
        (rows,), layers, query.contiguous(), contiguous(weight), y, statistics, layers.stride(0), layers.stride(1), depth, rows, width, eps,
        STAGES=stages_of(2 * width * layers.element_size(), layers, MOST_STAGES), **options,
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
    shape = backward_shape(depth, width, layers)
    programs = min(rows, shape.programs * processors(layers.device))
    summed = grad_query is not None or grad_weight is not None
    part = layers.new_empty((programs, width), dtype=torch.float32) if summed else None
    backward_launch(
        (programs,), grad_y, layers, query, weight, statistics, grad_layers, part,
        grad_y.stride(0), layers.stride(0), layers.stride(1), depth, rows, width,
        DEPTH=power_of_two(depth), HELD=shape.held, STAGES=shape.stages, **chunks_of(width, shape.warps),
    )  # fmt: skip
    if part is not None:
        sum_launch.after(
            (cdiv(width, STRIP),), part, query, weight, grad_query, grad_weight, programs, width,
            ROWS=min(power_of_two(programs), SUMMED // STRIP), BLOCK=STRIP,
        )  # fmt: skip


class Shape(NamedTuple):
    """Warps of a row, programs of a multiprocessor, layers in registers from the first pass to the second, and layers on their way at once."""

    warps: int
    programs: int
    held: int
    stages: int


def backward_shape(depth: int, width: int, layers: Tensor) -> Shape:
    """So many programs that the L2 cache holds all layers of their rows, but at least four warps. 16 warps leave a thread registers for no layer.

    One H100 (bfloat16), µs, a copy · these shapes · 8 warps and no layer held: 9 x 8192 x 2304 242 · 283 · 297, 9 x 8192 x 4096 428 · 481 · 509,
    25 x 4096 x 2048 286 · 368 · 415, 5 x 16384 x 1536 187 · 206 · 220.
    """
    warps, size = warps_for(width, MOST_CHUNKS_BACKWARD), width * layers.element_size()
    kept = int(KEPT * l2_cache(layers.device)) // (depth * size * processors(layers.device))
    programs = max(cdiv(4, warps), min(WALKING // warps, kept))
    # Few layers fill no long pipeline, unless nothing else runs meanwhile.
    stages = MOST_STAGES_BACKWARD if programs == 1 else max(MOST_STAGES, min(MOST_STAGES_BACKWARD, depth // 2 - 2))
    return Shape(warps, programs, 0 if warps == 16 else min(depth, 2 if depth <= 32 else 1), stages_of(programs * size, layers, stages))


def _stacked(layers: Tensor) -> Tensor:
    """The layers as (depth, rows, width) with adjacent columns, in place where the strides allow."""
    shape = (layers.shape[0], layers.shape[1:-1].numel(), layers.shape[-1])
    if layers.stride(-1) != 1:
        layers = layers.contiguous()
    try:
        return layers.view(shape)
    except RuntimeError:
        return layers.contiguous().view(shape)


_attention_residual = differentiable(
    TritonKernel("attention_residual", _allocate, _launch),
    TritonKernel("attention_residual_backward", _allocate_backward, _launch_backward),
)


@triton.jit
def weighted_query(query, weight, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """query · weight, in float32."""
    values = read_chunks(query, WIDTH, CHUNK)
    return values if weight is None else multiplied(values, read_chunks(weight, WIDTH, CHUNK))


@triton.jit
def forward_kernel(
    layers, query, weight, y, statistics, layer_stride, row_stride, depth, rows, WIDTH: tl.constexpr, eps,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes a row: each layer is read once, and what was summed is scaled where the highest score rises."""
    row = tl.program_id(0).to(tl.int64)
    by = weighted_query(query, weight, WIDTH, CHUNK)
    top = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    result = no_sums(WIDTH, CHUNK)
    inverses = tl.cast(depth, tl.int64) * rows
    for k in tl.range(0, depth, num_stages=STAGES):
        value = read_chunks(layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
        inverse = tl.rsqrt(product_sum(value, value) / WIDTH + eps)
        score = product_sum(value, by) * inverse
        at = statistics + row * depth + k
        tl.store(at, score)
        tl.store(at + inverses, inverse)
        higher = tl.maximum(top, score)
        scale = tl.exp(top - higher)
        power = tl.exp(score - higher)
        scaled = no_chunks()
        for c in tl.static_range(len(value)):
            scaled += (result[c] * scale + power * value[c],)
        result = scaled
        total = total * scale + power
        top = higher
    for c in tl.static_range(len(result)):
        write_chunk(y + row * WIDTH, result[c] / total, c, WIDTH, CHUNK)


@triton.jit
def backward_kernel(
    grad_y, layers, query, weight, statistics, grad_layers, part, grad_stride, layer_stride, row_stride, depth, rows, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p walks every programs-th row; what it adds up for query and weight goes to row p of part.

    The gradient of layer k is a_k · grad_y + slope_k · (query · weight) - shrink_k · layers_k. Registers keep the first HELD layers for it.
    """
    program = tl.program_id(0)
    layer = tl.arange(0, DEPTH)
    by = weighted_query(query, weight, WIDTH, CHUNK)
    sums = no_sums(WIDTH, CHUNK)
    for start in range(program, rows, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        at = statistics + row * depth + layer
        # Before the layers, behind which they would wait.
        score = tl.load(at, mask=layer < depth, other=float("-inf"))
        inverse = tl.load(at + tl.cast(depth, tl.int64) * rows, mask=layer < depth, other=0.0)
        grad = read_chunks(grad_y + row * grad_stride, WIDTH, CHUNK)
        held = no_chunks()
        for early in tl.static_range(HELD):
            value = read_chunks(layers + tl.cast(early, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
            held += (cast(value, layers.dtype.element_ty),)
        product = tl.zeros((DEPTH,), dtype=tl.float32)
        for k in tl.range(HELD, depth, num_stages=STAGES):
            value = read_chunks(layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
            # A scalar: each thread keeps the products of a few layers only, not of all.
            product = tl.where(layer == k, product_sum(grad, value), product)
        for early in tl.static_range(HELD):
            product = tl.where(layer == early, product_sum(grad, cast(held[early], tl.float32)), product)
        numbers = slopes(product, score, inverse, layer, depth, WIDTH)
        for back in tl.range(0, depth - HELD, num_stages=STAGES):
            # The last layer comes first: it was read last, and is the surest to be in the cache.
            k = depth - 1 - back
            value = read_chunks(layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
            place = (tl.cast(k, tl.int64) * rows + row) * WIDTH
            sums = add_layer(sums, grad_layers, place, value, grad, by, picked(numbers, layer, k), WIDTH, CHUNK)
        for early in tl.static_range(HELD):
            place = (tl.cast(early, tl.int64) * rows + row) * WIDTH
            value = cast(held[early], tl.float32)
            sums = add_layer(sums, grad_layers, place, value, grad, by, picked(numbers, layer, early), WIDTH, CHUNK)
    if part is not None:
        write_chunks(part + program.to(tl.int64) * WIDTH, sums, WIDTH, CHUNK)


@triton.jit
def picked(numbers, layer, k):
    """The three numbers of layer k."""
    found = no_chunks()
    for i in tl.static_range(len(numbers)):
        found += (tl.sum(tl.where(layer == k, numbers[i], 0.0)),)
    return found


@triton.jit
def add_layer(sums, grad_layers, place, value, grad, by, numbers, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """The sums for query · weight with what one layer of a row adds; its gradient is written."""
    share, slope, shrink = numbers
    if grad_layers is not None:
        for c in tl.static_range(len(value)):
            # It is not read again soon: the cache keeps the layers.
            write_chunk(grad_layers + place, share * grad[c] + slope * by[c] - shrink * value[c], c, WIDTH, CHUNK, ".cs")
    return plus_scaled(sums, value, slope)


@triton.jit
def slopes(product, score, inverse, layer, depth, width):
    """Three numbers for each layer of a row: its share a_k, the gradient of its score times inverse, and how much of it the norm of its key
    takes away.

    With g = grad_y and product_k = Σ g · layers_k the gradient of score k is a_k · (product_k - Σ_l a_l product_l).
    """
    top = tl.max(score, 0)
    share = tl.exp(score - top)
    # Only differences from the product of the layer with the highest score: that layer's own would be what is left of two equal numbers.
    highest = (score == top).to(tl.float32)
    product = product - tl.sum(product * highest, 0) / tl.sum(highest, 0)
    share = share / tl.sum(share, 0)
    slope = share * (product - tl.sum(share * product, 0)) * inverse
    return share, slope, slope * tl.where(layer < depth, score, 0.0) * inverse / width


@triton.jit
def sum_kernel(part, query, weight, grad_query, grad_weight, programs, width, EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds one strip of what the programs have, and multiplies it by the other factor of query · weight."""
    wait(EARLY)
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
