# SPDX-License-Identifier: Apache-2.0
"""rms_norm in Triton, and the choice of kernel for every norm of rows, with or without a mean, residual and weight.

`launch_norm` takes `_norm_chunks` for `chunked` widths, `_norm_wide` for `tiled` ones, and `_norm` otherwise.
"""

from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from liger_core.kernels import Outputs
from liger_triton import _norm_chunks, _norm_wide
from liger_triton._norm import DIRECT_ROWS, STRIP, backward_launch, forward_launch, sum_columns, zero
from liger_triton.launch import (
    cdiv,
    contiguous,
    dense_like,
    differentiable_kernels,
    fuses,
    power_of_two,
    processors,
    stages_of,
    strided_rows,
    supported,
)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: Literal["input", "float32"] = "input",
) -> Tensor:
    supported(x, weight)
    return _rms_norm(x, weight, eps, weight_offset, cast == "input")


def _allocate(x: Tensor, *rest: object) -> Outputs:
    rows = x.numel() // max(1, x.shape[-1])
    return dense_like(x), x.new_empty(rows, dtype=torch.float32)


def _launch(
    y: Tensor, inverse_rms: Tensor, /, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float,
    cast_input: bool,
) -> None:  # fmt: skip
    launch_norm(x=x, weight=weight, y=y, inverse=inverse_rms, eps=eps, offset=weight_offset, cast_input=cast_input)


def _allocate_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, inverse_rms: Tensor, weight_offset: float, needs: list[bool]
) -> Outputs:
    return (dense_like(x) if needs[0] else None, dense_like(weight) if needs[1] and weight is not None else None)


def _launch_backward(
    grad_x: Tensor | None, grad_weight: Tensor | None, /, grad_y: Tensor, x: Tensor, weight: Tensor | None,
    inverse_rms: Tensor, weight_offset: float, needs: list[bool],
) -> None:  # fmt: skip
    launch_norm_backward(
        grad_y=grad_y, x=x, weight=weight, inverse=inverse_rms, offset=weight_offset,
        grad_x=grad_x, grad_weight=grad_weight,
    )  # fmt: skip


_rms_norm = differentiable_kernels("rms_norm", _allocate, _launch, _launch_backward, _allocate_backward)


# Beyond this, registers do not hold a row in float32 and its gradient: wider rows are processed in tiles.
WIDEST_BLOCK = 16384
# In the backward pass, rows up to this width share a program. With few rows, the limit is 2048.
SHORT = 512


class Shape(NamedTuple):
    """The block of columns, rows per program and warps with which a launch covers (rows, width)."""

    block: int
    rows: int
    warps: int


@cache
def forward_shape(width: int, centered: bool) -> Shape:
    """Return the shape for widths that `chunked` and `tiled` do not handle; short rows share a program.

    On one H200 (bfloat16), rms_norm reaches .85 of copy bandwidth at 1024 columns, .95 at 16384; layer_norm .94 at
    4096.
    """
    block = power_of_two(width)
    if block <= 2048:
        rows = max(2, min(64, 2048 // block))
        return Shape(block, rows, 4)
    if block <= 4096:
        return Shape(block, 2 if centered else 1, 8)
    return Shape(block, 1, 8 if block <= 8192 else 16)


def tiled(width: int, centered: bool, summed: bool) -> bool:
    """Whether a row is processed in tiles although registers would hold it.

    At 4096 columns, tiles reach .97 of copy bandwidth and blocks .94; at 10240, which idles lanes of a block, .94 and
    .77.
    """
    if width > WIDEST_BLOCK:
        return True
    block = power_of_two(width)
    if width == block:
        return 4096 <= width <= 8192 and not centered
    return 8192 < width <= 3 * block // 4 and width % 1024 == 0 and not summed


def chunked(width: int) -> bool:
    """Whether a row is processed in chunks: at 2560 columns rms_norm reaches .86 of copy bandwidth, in blocks .80."""
    return 2048 < width < 8192 and width != power_of_two(width)


def launch_norm(
    *, x: Tensor, y: Tensor, inverse: Tensor, eps: float, residual: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, summed: Tensor | None = None, mean: Tensor | None = None, offset: float = 0.0,
    cast_input: bool = False,
) -> None:  # fmt: skip
    """Launch the forward pass. With a residual, x + residual goes to summed and is normalized; rms_norm has no mean."""
    width = x.shape[-1]
    count = inverse.numel()
    if count == 0:
        return
    x, x_stride = strided_rows(x)
    residual, residual_stride = (None, 0) if residual is None else strided_rows(residual)
    weight, bias = contiguous(weight), contiguous(bias)
    args = (x, residual, weight, bias, summed, y, mean, inverse, x_stride, residual_stride)
    if chunked(width) or tiled(width, mean is not None, residual is not None):
        longer = _norm_chunks if chunked(width) else _norm_wide
        longer.forward_launch(
            (count,), *args, width, eps, offset, CAST_INPUT=cast_input,
            **longer.forward_options(width, mean is not None)
        )  # fmt: skip
        return
    shape = forward_shape(width, mean is not None)
    grid = (cdiv(count, shape.rows),)
    forward_launch(
        grid, *args, count, width, eps, offset,
        CAST_INPUT=cast_input, WHOLE=width == shape.block and count % shape.rows == 0, ROWS=shape.rows,
        BLOCK=shape.block, num_warps=shape.warps, enable_fp_fusion=fuses(shape.block),
    )  # fmt: skip


def launch_norm_backward(
    *, grad_y: Tensor, x: Tensor, inverse: Tensor, grad_x: Tensor | None, grad_weight: Tensor | None,
    grad_bias: Tensor | None = None, grad_summed: Tensor | None = None, weight: Tensor | None = None,
    mean: Tensor | None = None, offset: float = 0.0,
) -> None:  # fmt: skip
    """Launch the backward pass; a second kernel adds float32 partial sums of grad_weight and grad_bias.

    x is the normalized tensor, and grad_summed its gradient from elsewhere.
    """
    width = x.shape[-1]
    count = inverse.numel()
    sums = (grad_weight is not None) + (grad_bias is not None)
    if count == 0:
        zero(grad_weight, grad_bias)
        return
    x, x_stride = strided_rows(x)
    grad_y, grad_stride = strided_rows(grad_y)
    grad_summed, summed_stride = (None, 0) if grad_summed is None else strided_rows(grad_summed)
    args = (grad_y, grad_summed, x, contiguous(weight), mean, inverse, grad_x, grad_weight, grad_bias)
    direct = count <= DIRECT_ROWS
    if width > (2048 if direct else SHORT):
        # Several short rows share a program; longer ones are walked one by one, or tile by tile.
        longer = _norm_wide if width > WIDEST_BLOCK else _norm_chunks
        longer.backward(count, *args, grad_stride, summed_stride, x_stride, width, offset)
        return
    block = power_of_two(width)
    several = max(2, min(32, 4096 // block))
    groups = cdiv(count, several)
    size = (2 if grad_summed is None else 3) * x.element_size() * several * block
    programs = groups if direct or not sums else min(groups, 2 * processors(x.device))
    partials = None if direct or not sums else x.new_empty((sums, programs, width), dtype=torch.float32)
    # Around a mean, a fused product would leave its round-off, which inverse makes large where a row is constant.
    backward_launch(
        (programs + cdiv(width, STRIP) if direct and sums else programs,), *args, partials, grad_stride, summed_stride,
        x_stride, count, width, programs, offset,
        ROWS=several, BLOCK=block, STAGES=stages_of(size, x), num_warps=4, enable_fp_fusion=mean is None,
    )  # fmt: skip
    if partials is not None:
        sum_columns(partials, grad_weight, grad_bias)
