# SPDX-License-Identifier: Apache-2.0
"""attention_residual in Triton: one pass over the layers forward, with an online softmax, and two backward.

The second pass over a row follows the first at once, and finds the layers in registers or in the cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._attention_residual import backward_launch, forward_launch, sum_launch
from liger_triton._chunks import chunks_of, warps_for
from liger_triton._norm import SUMMED, zero
from liger_triton.launch import (
    cdiv,
    contiguous,
    differentiable_kernels,
    l2_cache,
    power_of_two,
    processors,
    rows_of,
    stages_of,
    supported,
)

# The widest rows and the most layers.
WIDEST, DEEPEST = 16384, 256
# Columns of a program that adds the partial sums.
STRIP = 16
# Chunks of a row and layers loaded ahead, forward: .90 of copy bandwidth at 2304 columns on one H200, .96 at 4096.
MOST_CHUNKS, MOST_STAGES = 9, 4
# The same backward, the most warps of a multiprocessor, and the share of the L2 cache that their rows may fill.
MOST_CHUNKS_BACKWARD, MOST_STAGES_BACKWARD, WALKING, KEPT = 5, 10, 8, 0.6


def attention_residual(layers: Tensor, query: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    supported(layers, query, weight)
    if layers.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {layers.shape[-1]} columns, more than {WIDEST}")
    if layers.shape[0] > DEEPEST:
        raise Unsupported(f"{layers.shape[0]} layers, more than {DEEPEST}")
    return _attention_residual(layers, query, weight, float(eps))


def _allocate(layers: Tensor, query: Tensor, weight: Tensor | None, eps: float) -> Outputs:
    rows = layers[0].numel() // max(1, layers.shape[-1])
    # The statistics are the scores, and the scales of the keys.
    return layers.new_empty(layers.shape[1:]), layers.new_empty((2, rows, layers.shape[0]), dtype=torch.float32)


def _launch(y: Tensor, statistics: Tensor, /, layers: Tensor, query: Tensor, weight: Tensor | None, eps: float) -> None:
    if layers.numel() == 0:
        return
    layers = _stacked(layers)
    depth, rows, width = layers.shape
    options = chunks_of(width, warps_for(width, MOST_CHUNKS))
    forward_launch(
        (rows,), layers, query.contiguous(), contiguous(weight), y, statistics, layers.stride(0), layers.stride(1),
        depth, rows, width, eps,
        STAGES=stages_of(2 * width * layers.element_size(), layers, MOST_STAGES), **options,
    )  # fmt: skip


def _launch_backward(
    grad_layers: Tensor | None, grad_query: Tensor | None, grad_weight: Tensor | None, /, grad_y: Tensor,
    layers: Tensor, query: Tensor, weight: Tensor | None, statistics: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if layers.numel() == 0:
        zero(grad_query, grad_weight)
        return
    layers, grad_y, query, weight = _stacked(layers), rows_of(grad_y), query.contiguous(), contiguous(weight)
    depth, rows, width = layers.shape
    shape = backward_shape(depth, width, layers)
    programs = min(rows, shape.programs * processors(layers.device))
    summed = grad_query is not None or grad_weight is not None
    partials = layers.new_empty((programs, width), dtype=torch.float32) if summed else None
    backward_launch(
        (programs,), grad_y, layers, query, weight, statistics, grad_layers, partials,
        grad_y.stride(0), layers.stride(0), layers.stride(1), depth, rows, width,
        DEPTH=power_of_two(depth), HELD=shape.held, STAGES=shape.stages, **chunks_of(width, shape.warps),
    )  # fmt: skip
    if partials is not None:
        sum_launch.after(
            (cdiv(width, STRIP),), partials, query, weight, grad_query, grad_weight, programs, width,
            ROWS=min(power_of_two(programs), SUMMED // STRIP), BLOCK=STRIP,
        )  # fmt: skip


class Shape(NamedTuple):
    """Warps per row, programs per multiprocessor, layers held in registers for the second pass, and stages."""

    warps: int
    programs: int
    held: int
    stages: int


def backward_shape(depth: int, width: int, layers: Tensor) -> Shape:
    """Return a shape with at least four warps whose rows' layers fit in the L2 cache; 16 warps hold no layers.

    On one H100 (bfloat16), 9 x 8192 x 4096 takes 481 µs, with 8 warps and no layer held 509 (a copy 428).
    """
    warps, size = warps_for(width, MOST_CHUNKS_BACKWARD), width * layers.element_size()
    cached = int(KEPT * l2_cache(layers.device)) // (depth * size * processors(layers.device))
    programs = max(cdiv(4, warps), min(WALKING // warps, cached))
    # Few layers do not fill a long pipeline, unless nothing else runs meanwhile.
    stages = MOST_STAGES_BACKWARD if programs == 1 else max(MOST_STAGES, min(MOST_STAGES_BACKWARD, depth // 2 - 2))
    return Shape(
        warps,
        programs,
        0 if warps == 16 else min(depth, 2 if depth <= 32 else 1),
        stages_of(programs * size, layers, stages),
    )


def _stacked(layers: Tensor) -> Tensor:
    """Return the layers as (depth, rows, width) with adjacent columns, copied only if their strides require it."""
    shape = (layers.shape[0], layers.shape[1:-1].numel(), layers.shape[-1])
    if layers.stride(-1) != 1:
        layers = layers.contiguous()
    return layers.reshape(shape)


_attention_residual = differentiable_kernels("attention_residual", _allocate, _launch, _launch_backward)
