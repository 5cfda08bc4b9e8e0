# SPDX-License-Identifier: Apache-2.0
"""mix_streams: the input of a layer from the residual streams of hyper-connections."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, ShapeError
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops import _streams
from liger_core.ops._inputs import misuses_of, normal, normals


def check(x: Tensor, pre: Tensor) -> None:
    checks.floating("mix_streams", 2, x=x, pre=pre)
    _streams.check("mix_streams", x)
    _streams.check_shape("mix_streams", "pre", pre, x.shape[:-1], x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield Sample("one_block", (n(2, 3, 4, 64), n(2, 3, 4)), why="streams and width are powers of two")
    yield Sample("odd_width", (n(5, 3, 100), n(5, 3)), why="masks on streams and columns")
    yield Sample("wide", (n(2, 4, 2100), n(2, 4)), why="several tiles of columns, which a coefficient's gradient sums")
    yield Sample("one_stream", (n(4, 1, 40), n(4, 1)), why="a single stream is scaled")
    yield Sample("eight_streams", (n(3, 8, 40), n(3, 8)), why="the most streams in registers")
    yield Sample(
        "float32_coefficients", (n(5, 4, 72), normal(device, wide, 5, 4)), why="coefficients of a float32 projection"
    )
    yield Sample("frozen_pre", (n(5, 4, 72), n(5, 4)), frozen=("pre",), why="x is not read again")
    yield Sample("frozen_x", (n(5, 4, 72), n(5, 4)), frozen=("x",), why="no gradient of the streams")
    yield Sample("strided_rows", (n(5, 4, 160)[..., :72], n(5, 24)[:, :4]), why="slices are read through their strides")
    yield Sample("transposed", (n(5, 72, 4).mT, n(4, 5).t()), why="the last dimension of x is not contiguous")
    yield Sample("one_position", (n(4, 40), n(4)), why="no leading dimension")
    yield Sample("empty", (n(0, 4, 64), n(0, 4)), why="no positions: nothing is launched")


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("mix_streams")
    x, pre = torch.zeros(2, 4, 8, device=device), torch.zeros(2, 4, device=device)
    yield misuse("integers", (x.int(), pre), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("vector", (x[0, 0], pre), ShapeError, "x must have the dimensions (..., streams, width), got (8,)")
    yield misuse(
        "pre_shape", (x, pre[:, 1:]), ShapeError, "pre must have shape (2, 4) to match x (2, 4, 8), got (2, 3)"
    )


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, tokens: int, streams: int, width: int) -> tuple[Tensor, ...]:
        return normal(device, dtype, tokens, streams, width), normal(device, torch.float32, tokens, streams).sigmoid()

    return _streams.workloads(draw)


def work(x: Tensor, pre: Tensor) -> Work:
    streams, layer_size = x.nbytes, x.nbytes // max(1, x.shape[-2])
    return Work(streams + layer_size, 3 * streams + 2 * layer_size)


@op(check=check, samples=samples, misuses=misuses, workloads=workloads, work=work)
def mix_streams(x: Tensor, pre: Tensor) -> Tensor:
    """Compute the weighted sum of residual streams, which is the input of a layer.

        y = Σ_i pre_i · x_i                                             (over the streams of a position)

    x       (..., streams, width)   any floating dtype
    pre     (..., streams)          any floating dtype
    returns (..., width), dtype of x; computed in float32 (float64 for float64) and rounded once

    Raises ShapeError if pre does not have one coefficient for each stream of each position, DtypeError for integers.
    Zhu et al. 2024, arXiv:2409.19606; Xie et al. 2025, arXiv:2512.24880.
    """
    wide = accumulator(x.dtype)
    return (pre.to(wide).unsqueeze(-1) * x.to(wide)).sum(-2).to(x.dtype)
