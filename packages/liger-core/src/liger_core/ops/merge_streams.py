# SPDX-License-Identifier: Apache-2.0
"""merge_streams: the residual streams of hyper-connections after a layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops import _streams
from liger_core.ops._inputs import misuse_table, normal, normals, sample_table


def check(x: Tensor, y: Tensor, post: Tensor, res: Tensor | None = None) -> None:
    name = "merge_streams"
    checks.floating(name, 3, x=x, y=y, post=post, res=res)
    _streams.check(name, x)
    _streams.check_shape(name, "y", y, (*x.shape[:-2], x.shape[-1]), x)
    _streams.check_shape(name, "post", post, x.shape[:-1], x)
    _streams.check_shape(name, "res", res, (*x.shape[:-1], x.shape[-2]), x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)

    def call(positions: int, streams: int, width: int) -> tuple[Tensor, ...]:
        return n(positions, streams, width), n(positions, width), n(positions, streams), n(positions, streams, streams)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    coefficients = normal(device, wide, 5, 24)
    yield from sample_table(
        ("one_block", (n(2, 3, 4, 64), n(2, 3, 64), n(2, 3, 4), n(2, 3, 4, 4)), {},
         "streams and width are powers of two"),
        ("odd_width", call(5, 3, 100), {}, "masks on streams and columns"),
        ("wide", call(2, 4, 2100), {}, "several tiles of columns, which a coefficient's gradient sums"),
        ("one_stream", call(4, 1, 40), {}, "an ordinary residual with two factors"),
        ("eight_streams", call(3, 8, 40), {}, "the most streams in registers"),
        ("unmixed", call(5, 4, 72)[:3], {}, "the streams are kept as they are"),
        ("unmixed_wide", call(2, 3, 2100)[:3], {}, "the streams are kept, in several tiles"),
        ("float32_coefficients",
         (n(5, 4, 72), n(5, 72), coefficients[:, 4:8], coefficients[:, 8:].unflatten(-1, (4, 4))), {},
         "parts of one float32 projection, read through their strides"),
        ("transposed_res", (*call(5, 4, 72)[:3], n(5, 4, 4).mT), {}, "the matrix is read through its strides"),
        ("frozen_res", call(5, 4, 72), {}, "x is not read again", "res"),
        ("frozen_coefficients", call(5, 4, 72), {}, "only sums over streams", "post", "res"),
        ("frozen_x", call(5, 4, 72), {}, "no gradient of the streams", "x"),
        ("frozen_y", call(5, 4, 72), {}, "no gradient of the layer's output", "y"),
        ("only_post", call(5, 4, 72), {}, "only the sum over columns of y", "x", "y", "res"),
        ("wide_output", (n(5, 4, 72), normal(device, wide, 5, 72), n(5, 4), n(5, 4, 4)), {},
         "a float32 layer over narrow streams"),
        ("strided_rows", (n(5, 4, 160)[..., :72], n(5, 160)[:, :72], *call(5, 4, 1)[2:]), {},
         "slices are read in place"),
        ("transposed", (n(5, 72, 4).mT, n(72, 5).t(), *call(5, 4, 72)[2:]), {},
         "the last dimension of x is not contiguous"),
        ("one_position", (n(4, 40), n(40), n(4), n(4, 4)), {}, "no leading dimension"),
        ("empty", call(0, 4, 64), {}, "no positions: nothing is launched"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    x, y, post = torch.zeros(2, 4, 8, device=device), torch.zeros(2, 8, device=device), torch.zeros(2, 4, device=device)
    res = torch.zeros(2, 4, 4, device=device)
    yield from misuse_table(
        "merge_streams", (x, y, post),
        ("integers", DtypeError, "y must have a floating dtype, got torch.int32", {}, x, y.int(), post),
        ("vector", ShapeError, "x must have the dimensions (..., streams, width), got (8,)", {}, y[0], y, post),
        ("y_shape", ShapeError, "y must have shape (2, 8) to match x (2, 4, 8), got (2, 7)", {}, x, y[:, 1:], post),
        ("post_shape", ShapeError, "post must have shape (2, 4) to match x (2, 4, 8), got (2, 3)",
         {}, x, y, post[:, 1:]),
        ("res_shape", ShapeError, "res must have shape (2, 4, 4) to match x (2, 4, 8), got (1, 4, 4)",
         {}, x, y, post, res[:1]),
    )  # fmt: skip


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, tokens: int, streams: int, width: int) -> tuple[Tensor, ...]:
        n, wide = normals(device, dtype), normals(device, torch.float32)
        post, res = wide(tokens, streams), wide(tokens, streams, streams)
        return n(tokens, streams, width), n(tokens, width), 2 * post.sigmoid(), res.softmax(-1)

    return _streams.workloads(draw)


def work(x: Tensor, y: Tensor, post: Tensor, res: Tensor | None = None) -> Work:
    return Work(2 * x.nbytes + y.nbytes, (4 if res is None else 5) * x.nbytes + 3 * y.nbytes)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout(
        {"x": "… (streams) (width)", "y": "… (width)", "post": "… (streams)", "res": "… (streams) (streams)"}, ("x",)
    ),
)  # fmt: skip
def merge_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor | None = None) -> Tensor:
    """Mix residual streams and add the output of a layer to each.

        merged_i = post_i · y + Σ_j res_ij · x_j                        (over the streams of a position)

    x       (..., streams, width)     any floating dtype
    y       (..., width)              any floating dtype; the output of the layer
    post    (..., streams)            any floating dtype
    res     (..., streams, streams)   any floating dtype; without it, the identity
    returns (..., streams, width), dtype of x; computed in float32 (float64 for float64) and rounded once

    Raises ShapeError unless each position has one row of y, one coefficient of post for each stream, and one of res for
    each pair of streams; DtypeError for integers. Zhu et al. 2024, arXiv:2409.19606; Xie et al. 2025, arXiv:2512.24880,
    where res is doubly stochastic, as `sinkhorn` makes it.
    """
    wide = accumulator(x.dtype)
    streams = x.to(wide)
    if res is not None:
        streams = torch.matmul(res.to(wide), streams)
    return (post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(-2) + streams).to(x.dtype)
