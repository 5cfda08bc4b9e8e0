# SPDX-License-Identifier: Apache-2.0
"""merge_streams in Triton: one pass forward, one backward."""

import triton
import triton.language as tl
from torch import Tensor

from liger_triton._norm import read, zero
from liger_triton._streams import BLOCK, FOLD, WARPS, check_streams, positions
from liger_triton.launch import Launcher, cdiv, differentiable_kernels, first_like, supported


def merge_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor | None = None) -> Tensor:
    supported(x, y, post, res)
    check_streams(x)
    return _merge_streams(x, y, post, res)


def _launch(merged: Tensor, /, x: Tensor, y: Tensor, post: Tensor, res: Tensor | None) -> None:
    if x.numel() == 0:
        return
    streams, width = x.shape[-2:]
    block = check_streams(x)
    x, y, post = positions(x, 2, adjacent=True), positions(y, 1, adjacent=True), positions(post, 1)
    res = None if res is None else positions(res, 2)
    tiles = cdiv(width, BLOCK)
    forward_launch(
        (x.shape[0] * tiles,), x, y, post, res, merged, x.stride(0), x.stride(1), y.stride(0), *post.stride(),
        *((0, 0, 0) if res is None else res.stride()), width, tiles,
        COUNT=streams, STREAMS=block, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _launch_backward(
    grad_x: Tensor | None, grad_y: Tensor | None, grad_post: Tensor | None, grad_res: Tensor | None, /,
    grad_merged: Tensor, x: Tensor, y: Tensor, post: Tensor, res: Tensor | None, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0:
        zero(grad_y, grad_post, grad_res)
        return
    streams, width = x.shape[-2:]
    block = check_streams(x)
    grad_merged, x, y = (
        positions(grad_merged, 2, adjacent=True),
        positions(x, 2, adjacent=True),
        positions(y, 1, adjacent=True),
    )
    post, res = positions(post, 1), None if res is None else positions(res, 2)
    backward_launch(
        (x.shape[0],), grad_merged, x, y, post, res, grad_x, grad_y, grad_post, grad_res,
        grad_merged.stride(0), grad_merged.stride(1), x.stride(0), x.stride(1), y.stride(0), *post.stride(),
        *((0, 0, 0) if res is None else res.stride()), width,
        COUNT=streams, STREAMS=block, BLOCK=_columns(block), FOLD=FOLD, num_warps=WARPS,
    )  # fmt: skip


def _columns(streams: int) -> int:
    """Return the columns of a backward tile, whose threads have a product per pair of streams: fewer for 8 streams."""
    return min(BLOCK, BLOCK * 16 // streams**2)


_merge_streams = differentiable_kernels("merge_streams", first_like, _launch, _launch_backward)


@triton.jit
def forward_kernel(
    x, y, post, res, merged, x_stride, x_stream, y_stride, post_stride, post_stream, res_stride, res_out, res_in, width,
    tiles,
    COUNT: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of columns of one position."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    stream = tl.arange(0, STREAMS).to(tl.int64)
    x += row * x_stride
    if res is not None:
        value = read(x + stream[:, None] * x_stream + column[None, :], (stream < COUNT)[:, None] & inside[None, :])
    update = read(y + row * y_stride + column, inside)
    for i in tl.static_range(COUNT):
        if res is None:
            mixed = read(x + tl.cast(i, tl.int64) * x_stream + column, inside)
        else:
            weight = read(res + row * res_stride + i * res_out + stream * res_in, stream < COUNT)
            mixed = tl.sum(weight[:, None] * value, 0)
        total = tl.load(post + row * post_stride + i * post_stream).to(tl.float32) * update + mixed
        tl.store(merged + (row * COUNT + i) * width + column, total.to(merged.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_merged, x, y, post, res, grad_x, grad_y, grad_post, grad_res, grad_stride, grad_stream,
    x_stride, x_stream, y_stride, post_stride, post_stream, res_stride, res_out, res_in, width,
    COUNT: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """One program walks the tiles of one position.

    With g = grad_merged: grad_x_j = Σ_i res_ij · g_i, grad_y = Σ_i post_i · g_i, and over the columns grad_post_i = Σ
    g_i · y, grad_res_ij = Σ g_i · x_j.
    """
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS).to(tl.int64)
    used = stream < COUNT
    # The loop's tensors are (i, j, column) from the start: conversions would pass through shared memory.
    i, j = stream[:, None, None], stream[None, :, None]
    of_post = tl.zeros((STREAMS, 1, BLOCK // FOLD), dtype=tl.float32)
    of_res = tl.zeros((STREAMS, STREAMS, BLOCK // FOLD), dtype=tl.float32)
    if grad_y is not None:
        factor = read(post + row * post_stride + stream * post_stream, used)[:, None, None]
    if grad_x is not None and res is not None:
        pair = res + row * res_stride + stream[:, None] * res_out + stream[None, :] * res_in
        weight = read(pair, used[:, None] & used[None, :])[:, :, None]
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, None, :]
        inside = column < width
        grad = read(grad_merged + row * grad_stride + i * grad_stream + column, (i < COUNT) & inside)
        if grad_post is not None:
            of_post += folded(grad * read(y + row * y_stride + column, inside), FOLD)
        if grad_res is not None:
            of_res += folded(grad * read(x + row * x_stride + j * x_stream + column, (j < COUNT) & inside), FOLD)
        if grad_y is not None:
            total = tl.sum(factor * grad, 0)[None, :, :]
            tl.store(grad_y + row * width + column, total.to(grad_y.dtype.element_ty), mask=inside)
        if grad_x is not None:
            if res is None:
                out = grad_x + (row * COUNT + i) * width + column
                tl.store(out, grad.to(grad_x.dtype.element_ty), mask=(i < COUNT) & inside)
            else:
                out = grad_x + (row * COUNT + j) * width + column
                total = tl.sum(weight * grad, 0)[None, :, :]
                tl.store(out, total.to(grad_x.dtype.element_ty), mask=(j < COUNT) & inside)
    if grad_post is not None:
        out = grad_post + row * COUNT + stream[:, None]
        tl.store(out, tl.sum(of_post, 2).to(grad_post.dtype.element_ty), mask=used[:, None])
    if grad_res is not None:
        out = grad_res + row * (COUNT * COUNT) + stream[:, None] * COUNT + stream[None, :]
        tl.store(out, tl.sum(of_res, 2).to(grad_res.dtype.element_ty), mask=used[:, None] & used[None, :])


@triton.jit
def folded(value, FOLD: tl.constexpr):
    """Return the sums of FOLD neighboring columns, which one thread has."""
    shape: tl.constexpr = value.shape
    return tl.sum(tl.reshape(value, (shape[0], shape[1], shape[2] // FOLD, FOLD)), 3)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
