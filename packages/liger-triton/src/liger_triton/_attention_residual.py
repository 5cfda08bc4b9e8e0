# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention_residual."""

import triton
import triton.language as tl

from liger_triton._chunks import (
    cast,
    multiplied,
    no_chunks,
    no_sums,
    plus_scaled,
    product_sum,
    read_chunks,
    write_chunk,
    write_chunks,
)
from liger_triton._norm import read
from liger_triton.launch import Launcher, wait


@triton.jit
def weighted_query(query, weight, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return query · weight, in float32."""
    values = read_chunks(query, WIDTH, CHUNK)
    return values if weight is None else multiplied(values, read_chunks(weight, WIDTH, CHUNK))


@triton.jit
def forward_kernel(
    layers, query, weight, y, statistics, layer_stride, row_stride, depth, rows, WIDTH: tl.constexpr, eps,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes one row: it reads each layer once, and rescales the sum when the highest score rises."""
    row = tl.program_id(0).to(tl.int64)
    factor = weighted_query(query, weight, WIDTH, CHUNK)
    highest = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    result = no_sums(WIDTH, CHUNK)
    inverses = tl.cast(depth, tl.int64) * rows
    for k in tl.range(0, depth, num_stages=STAGES):
        value = read_chunks(layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
        inverse = tl.rsqrt(product_sum(value, value) / WIDTH + eps)
        score = product_sum(value, factor) * inverse
        scores = statistics + row * depth + k
        tl.store(scores, score)
        tl.store(scores + inverses, inverse)
        higher = tl.maximum(highest, score)
        scale = tl.exp(highest - higher)
        power = tl.exp(score - higher)
        scaled = no_chunks()
        for c in tl.static_range(len(value)):
            scaled += (result[c] * scale + power * value[c],)
        result = scaled
        total = total * scale + power
        highest = higher
    for c in tl.static_range(len(result)):
        write_chunk(y + row * WIDTH, result[c] / total, c, WIDTH, CHUNK)


@triton.jit
def backward_kernel(
    grad_y, layers, query, weight, statistics, grad_layers, partials, grad_stride, layer_stride, row_stride, depth,
    rows, WIDTH: tl.constexpr, DEPTH: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p walks every programs-th row; its sums for query and weight go to row p of partials.

    The gradient of layer k is a_k · grad_y + slope_k · (query · weight) - shrink_k · layers_k; registers keep the first
    HELD layers for it.
    """
    program = tl.program_id(0)
    layer = tl.arange(0, DEPTH)
    factor = weighted_query(query, weight, WIDTH, CHUNK)
    sums = no_sums(WIDTH, CHUNK)
    for start in range(program, rows, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        scores = statistics + row * depth + layer
        # Loaded before the layers, for which they would wait.
        score = tl.load(scores, mask=layer < depth, other=float("-inf"))
        inverse = tl.load(scores + tl.cast(depth, tl.int64) * rows, mask=layer < depth, other=0.0)
        grad = read_chunks(grad_y + row * grad_stride, WIDTH, CHUNK)
        held = no_chunks()
        for early in tl.static_range(HELD):
            value = read_chunks(layers + tl.cast(early, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
            held += (cast(value, layers.dtype.element_ty),)
        product = tl.zeros((DEPTH,), dtype=tl.float32)
        for k in tl.range(HELD, depth, num_stages=STAGES):
            value = read_chunks(layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
            # A scalar, so that each thread keeps the products of a few layers, not of all.
            product = tl.where(layer == k, product_sum(grad, value), product)
        for early in tl.static_range(HELD):
            product = tl.where(layer == early, product_sum(grad, cast(held[early], tl.float32)), product)
        numbers = slopes(product, score, inverse, layer, depth, WIDTH)
        for passed in tl.range(0, depth - HELD, num_stages=STAGES):
            # The last layer comes first, because it is most likely still in the cache.
            k = depth - 1 - passed
            value = read_chunks(layers + tl.cast(k, tl.int64) * layer_stride + row * row_stride, WIDTH, CHUNK)
            offset = (tl.cast(k, tl.int64) * rows + row) * WIDTH
            sums = add_layer(sums, grad_layers, offset, value, grad, factor, picked(numbers, layer, k), WIDTH, CHUNK)
        for early in tl.static_range(HELD):
            offset = (tl.cast(early, tl.int64) * rows + row) * WIDTH
            value = cast(held[early], tl.float32)
            sums = add_layer(
                sums, grad_layers, offset, value, grad, factor, picked(numbers, layer, early), WIDTH, CHUNK
            )
    if partials is not None:
        write_chunks(partials + program.to(tl.int64) * WIDTH, sums, WIDTH, CHUNK)


@triton.jit
def picked(numbers, layer, k):
    """Return the three numbers of layer k."""
    result = no_chunks()
    for i in tl.static_range(len(numbers)):
        result += (tl.sum(tl.where(layer == k, numbers[i], 0.0)),)
    return result


@triton.jit
def add_layer(sums, grad_layers, offset, value, grad, factor, numbers, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Write the gradient of one layer of a row, and return the sums for query · weight with its contribution."""
    share, slope, shrink = numbers
    if grad_layers is not None:
        for c in tl.static_range(len(value)):
            # The gradient is not read again soon: the cache keeps the layers instead.
            write_chunk(
                grad_layers + offset, share * grad[c] + slope * factor[c] - shrink * value[c], c, WIDTH, CHUNK, ".cs"
            )
    return plus_scaled(sums, value, slope)


@triton.jit
def slopes(product, score, inverse, layer, depth, width):
    """Return for each layer its share a_k, its score's gradient times inverse, and the factor shrink_k of its key.

    With g = grad_y and product_k = Σ g · layers_k, the gradient of score k is a_k · (product_k - Σ_l a_l product_l).
    """
    highest = tl.max(score, 0)
    share = tl.exp(score - highest)
    # Relative to the product of the highest score, whose own gradient would cancel.
    is_highest = (score == highest).to(tl.float32)
    product = product - tl.sum(product * is_highest, 0) / tl.sum(is_highest, 0)
    share = share / tl.sum(share, 0)
    slope = share * (product - tl.sum(share * product, 0)) * inverse
    return share, slope, slope * tl.where(layer < depth, score, 0.0) * inverse / width


@triton.jit
def sum_kernel(
    partials, query, weight, grad_query, grad_weight, programs, width,
    EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds a strip of all partial sums, and multiplies it by the other factor of query · weight."""
    wait(EARLY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        sums += tl.load(
            partials + row[:, None] * width + column[None, :],
            mask=(row < programs)[:, None] & inside[None, :],
            other=0.0,
        )
    total = tl.sum(sums, 0)
    if grad_weight is not None:
        tl.store(
            grad_weight + column, (total * read(query + column, inside)).to(grad_weight.dtype.element_ty), mask=inside
        )
    if grad_query is not None:
        if weight is not None:
            total = total * read(weight + column, inside)
        tl.store(grad_query + column, total.to(grad_query.dtype.element_ty), mask=inside)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
sum_launch = Launcher(sum_kernel)
