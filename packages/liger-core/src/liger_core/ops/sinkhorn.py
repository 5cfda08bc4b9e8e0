# SPDX-License-Identifier: Apache-2.0
"""sinkhorn: square matrices become doubly stochastic."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import ROWS, misuses_of, normal, normals, row_work, workloads_of


def check(x: Tensor, iterations: int = 20, eps: float = 1e-6) -> None:
    name = "sinkhorn"
    checks.floating(name, x=x)
    if x.dim() < 2 or x.shape[-1] != x.shape[-2]:
        checks.misshapen(name, "x must hold square matrices (..., n, n)", x)
    checks.integer(name, "iterations", iterations)
    if iterations < 1:
        checks.fail(OptionError, name, f"iterations must be at least 1, got {iterations}")
    checks.positive(name, "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    # With a smaller eps, columns sum to 1, and a constant upstream gradient leaves nothing but round-off.
    usual = (20, 0.01)
    yield Sample("one_block", (n(2, 3, 4, 4), *usual), why="n is a power of two")
    yield Sample("odd_size", (n(5, 3, 3), *usual), why="masks on rows and columns")
    yield Sample("many", (n(300, 2, 2), 3), why="several programs, the last with masked lanes")
    yield Sample("one_iteration", (n(5, 4, 4), 1), why="a softmax and one division of the columns")
    yield Sample("two_iterations", (n(5, 4, 4), 2), why="rows and columns once more")
    yield Sample("scalars", (n(5, 1, 1), *usual), why="every matrix is a 1")
    yield Sample("eight", (n(3, 8, 8), 5), why="the largest in registers")
    yield Sample("large_eps", (n(5, 4, 4), 4, 0.1), why="sums stay below 1, and the gradient knows it")
    yield Sample("far_apart", (n(5, 4, 4, scale=6), *usual), why="near a permutation, what is small counts on")
    yield Sample("transposed", (n(5, 4, 4).mT, *usual), why="read through its strides")
    yield Sample("slice", (n(5, 24)[:, 8:].unflatten(-1, (4, 4)), *usual), why="the last columns of a projection")
    yield Sample("one_matrix", (n(4, 4), *usual), why="no leading dimension")
    yield Sample("empty", (n(0, 4, 4), *usual), why="nothing is launched")


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("sinkhorn")
    x = torch.zeros(2, 4, 4, device=device)
    yield misuse("integers", (x.int(),), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("not_square", (x[:, 1:],), ShapeError, "x must hold square matrices (..., n, n), got (2, 3, 4)")
    yield misuse("iterations", (x, 0), OptionError, "iterations must be at least 1, got 0")
    yield misuse("fraction", (x, 1.5), OptionError, "iterations must be an integer, got 1.5")
    yield misuse("eps", (x, 20, 0.0), OptionError, "eps must be a finite number > 0, got 0.0")


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, tokens: int, streams: int) -> tuple[Tensor]:
        return (normal(device, dtype, tokens, streams, streams),)

    of_size = workloads_of(draw, "NS")
    yield of_size(512, 4, quick=True)
    yield of_size(16384, 4)
    yield of_size(16384, 8)
    for tokens in ROWS:
        yield of_size(tokens, 4, axis="N", quick=tokens <= 1024)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=Layout({"x": "… (rows) (columns)"}, ("x",)),
)  # fmt: skip
def sinkhorn(x: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Make matrices of logits doubly stochastic by Sinkhorn-Knopp: divide rows and columns by their sums, in turn.

        P = softmax(x) + eps                                            (over each row)
        P ← P / (column sums + eps)
        P ← P / (row sums + eps), P ← P / (column sums + eps)           (iterations - 1 times)

    The softmax is the first division of the rows. The gradient is that of these iterations, not of their limit.

    x           (..., n, n)   any floating dtype
    iterations  ≥ 1
    eps         added to the softmax and to the sums; > 0
    returns     (..., n, n), dtype of x; computed in float32 (float64 for float64) and rounded once

    Raises ShapeError for matrices that are not square, DtypeError for integers, OptionError for iterations < 1 and eps
    ≤ 0. Sinkhorn & Knopp 1967; in hyper-connections: Xie et al. 2025, arXiv:2512.24880.
    """
    p = torch.softmax(x.to(accumulator(x.dtype)), -1) + eps
    p = p / (p.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        p = p / (p.sum(-1, keepdim=True) + eps)
        p = p / (p.sum(-2, keepdim=True) + eps)
    return p.to(x.dtype)
