# SPDX-License-Identifier: Apache-2.0
"""project_streams: the logits of the coefficients of hyper-connections."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops import _streams
from liger_core.ops._inputs import misuses_of, normal, normals, sample_table


def check(x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    name = "project_streams"
    checks.floating(name, 2, x=x, weight=weight)
    _streams.check(name, x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-2] * x.shape[-1]:
        checks.mismatch(name, "weight", weight, f"(count, {x.shape[-2] * x.shape[-1]})", "x", x)
    checks.positive(name, "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield from sample_table(
        ("one_block", (n(2, 3, 4, 64), n(24, 256, scale=0.1)), {}, "columns are a power of two"),
        ("odd_width", (n(5, 3, 33), n(15, 99, scale=0.1)), {}, "masks on rows, columns and coefficients"),
        ("many_rows", (n(150, 2, 24), n(8, 48, scale=0.2)), {},
         "several blocks of rows, which the weight gradient sums"),
        ("wide", (n(3, 4, 300), n(24, 1200, scale=0.03)), {}, "columns are shared among programs"),
        ("one_coefficient", (n(4, 1, 40), n(1, 40, scale=0.2)), {}, "a single logit of a single stream"),
        ("float32_weight", (n(5, 4, 24), normal(device, wide, 24, 96, scale=0.1)), {},
         "float32 parameters, split into three numbers"),
        ("large_eps", (n(4, 2, 24, scale=0.01), n(8, 48), 0.1), {}, "eps dominates the mean square"),
        ("frozen_weight", (n(5, 4, 24), n(24, 96, scale=0.1)), {}, "no sums over rows", "weight"),
        ("frozen_x", (n(5, 4, 24), n(24, 96, scale=0.1)), {}, "only sums over rows", "x"),
        ("strided_rows", (n(5, 192)[:, :96].unflatten(-1, (4, 24)), n(24, 160)[:, 64:]), {},
         "slices are read in place"),
        ("transposed", (n(5, 24, 4).mT, n(96, 24, scale=0.1).t()), {}, "columns are not adjacent"),
        ("one_position", (n(4, 24), n(24, 96, scale=0.1)), {}, "no leading dimension"),
        ("empty", (n(0, 4, 24), n(24, 96)), {}, "no positions: nothing is launched, the weight gradient is zero"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("project_streams")
    x, weight = torch.zeros(2, 4, 8, device=device), torch.zeros(24, 32, device=device)
    yield misuse("integers", (x.int(), weight), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("vector", (x[0, 0], weight), ShapeError, "x must have the dimensions (..., streams, width), got (8,)")
    yield misuse(
        "weight_shape", (x, weight[:, 1:]), ShapeError,
        "weight must have shape (count, 32) to match x (2, 4, 8), got (24, 31)"
    )  # fmt: skip
    yield misuse("eps", (x, weight, 0.0), OptionError, "eps must be a finite number > 0, got 0.0")


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, tokens: int, streams: int, width: int) -> tuple[Tensor, ...]:
        count, columns = (2 + streams) * streams, streams * width
        x = normal(device, dtype, tokens, streams, width)
        return x, normal(device, torch.float32, count, columns, scale=columns**-0.5)

    return _streams.workloads(draw)


def work(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Work:
    return Work(x.nbytes + weight.nbytes, 3 * (x.nbytes + weight.nbytes))


@op(check=check, samples=samples, misuses=misuses, workloads=workloads, work=work)
def project_streams(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Project the streams of a position, scaled together to unit root mean square, to a few logits.

        y = weight · x / sqrt(mean(x²) + eps)                           (over all streams and columns of a position)

    x       (..., streams, width)      any floating dtype
    weight  (count, streams · width)   any floating dtype
    eps     added to the mean square, in the units of x²; > 0
    returns (..., count), float32 (float64 for float64); products of bfloat16 numbers are exact, and sums are in float32

    Raises ShapeError if weight does not have streams · width columns, DtypeError for integers, OptionError for eps ≤ 0.
    Xie et al. 2025, arXiv:2512.24880.
    """
    wide = accumulator(x.dtype)
    rows = x.to(wide).flatten(-2)
    # Scaling after the product spares a tensor of the size of the streams.
    return F.linear(rows, weight.to(wide)) / torch.sqrt(rows.square().mean(-1, keepdim=True) + eps)
