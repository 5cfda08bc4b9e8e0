# SPDX-License-Identifier: Apache-2.0
"""mix_streams in Triton: one pass forward, one backward."""

import triton
import triton.language as tl
from torch import Tensor

from liger_core.kernels import Outputs
from liger_triton._norm import read
from liger_triton._streams import BLOCK, WARPS, check_streams, positions
from liger_triton.launch import Launcher, cdiv, differentiable_kernels, supported


def mix_streams(x: Tensor, pre: Tensor) -> Tensor:
    supported(x, pre)
    check_streams(x)
    return _mix_streams(x, pre)


def _allocate(x: Tensor, pre: Tensor) -> Outputs:
    return (x.new_empty((*x.shape[:-2], x.shape[-1])),)


def _launch(y: Tensor, /, x: Tensor, pre: Tensor) -> None:
    if x.numel() == 0:
        y.zero_()
        return
    streams, width = x.shape[-2:]
    block = check_streams(x)
    x, pre = positions(x, 2, adjacent=True), positions(pre, 1)
    tiles = cdiv(width, BLOCK)
    forward_launch(
        (x.shape[0] * tiles,), x, pre, y, x.stride(0), x.stride(1), pre.stride(0), pre.stride(1), width, tiles,
        COUNT=streams, STREAMS=block, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _launch_backward(
    grad_x: Tensor | None, grad_pre: Tensor | None, /, grad_y: Tensor, x: Tensor, pre: Tensor, needs: list[bool]
) -> None:
    if x.numel() == 0:
        if grad_pre is not None:
            grad_pre.zero_()
        return
    streams, width = x.shape[-2:]
    block = check_streams(x)
    grad_y, x, pre = positions(grad_y, 1, adjacent=True), positions(x, 2, adjacent=True), positions(pre, 1)
    backward_launch(
        (x.shape[0],), grad_y, x, pre, grad_x, grad_pre,
        grad_y.stride(0), x.stride(0), x.stride(1), pre.stride(0), pre.stride(1), width,
        COUNT=streams, STREAMS=block, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


_mix_streams = differentiable_kernels("mix_streams", _allocate, _launch, _launch_backward)


@triton.jit
def forward_kernel(
    x, pre, y, x_stride, x_stream, pre_stride, pre_stream, width, tiles,
    COUNT: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of columns of one position."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, STREAMS).to(tl.int64)
    mask = (stream < COUNT)[:, None] & (column < width)[None, :]
    value = read(x + row * x_stride + stream[:, None] * x_stream + column[None, :], mask)
    factor = read(pre + row * pre_stride + stream * pre_stream, stream < COUNT)
    tl.store(y + row * width + column, tl.sum(value * factor[:, None], 0).to(y.dtype.element_ty), mask=column < width)


@triton.jit
def backward_kernel(
    grad_y, x, pre, grad_x, grad_pre, grad_stride, x_stride, x_stream, pre_stride, pre_stream, width,
    COUNT: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program walks the tiles of one position: grad_x_i = pre_i · grad_y, grad_pre_i = Σ grad_y · x_i."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS).to(tl.int64)
    inside = stream < COUNT
    if grad_x is not None:
        factor = read(pre + row * pre_stride + stream * pre_stream, inside)
    sums = tl.zeros((STREAMS, BLOCK), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (column < width)[None, :]
        grad = read(grad_y + row * grad_stride + column, column < width)
        if grad_pre is not None:
            sums += grad[None, :] * read(x + row * x_stride + stream[:, None] * x_stream + column[None, :], mask)
        if grad_x is not None:
            out = grad_x + (row * COUNT + stream[:, None]) * width + column[None, :]
            tl.store(out, (factor[:, None] * grad[None, :]).to(grad_x.dtype.element_ty), mask=mask)
    if grad_pre is not None:
        tl.store(grad_pre + row * COUNT + stream, tl.sum(sums, 1).to(grad_pre.dtype.element_ty), mask=inside)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
