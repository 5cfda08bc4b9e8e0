# SPDX-License-Identifier: Apache-2.0
"""relu_squared: the activation of feed-forward layers without a gate, as Nemotron and Arcee have it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Work, Workload, op
from liger_core.ops._inputs import misuses_of, normal, row_workloads


def check(x: Tensor) -> None:
    checks.floating("relu_squared", x=x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def n(*shape: int, scale: float = 1.0) -> Tensor:
        return normal(device, dtype, *shape, scale=scale)

    yield Sample("one_block", (n(2, 3, 64),), why="elements are a power of two: no mask")
    yield Sample("odd_width", (n(5, 101),), why="mask on the last block")
    yield Sample("several_tiles", (n(3, 2500)[:, 1:],), why="a row takes several column tiles")
    yield Sample("strided_rows", (n(5, 160)[:, :80],), why="rows are read through their stride")
    yield Sample("transposed", (n(40, 6).t(),), why="the last dimension is not contiguous")
    yield Sample("large_values", (n(3, 64, scale=30),), why="squares are much larger than the inputs")
    yield Sample("negative", (-n(3, 64).abs(),), why="nothing passes, and no gradient does")
    yield Sample("one_row", (n(1, 33),), why="a single row")
    yield Sample("vector", (n(33),), why="no leading dimension")
    yield Sample("scalar", (n(),), why="no dimension at all")
    yield Sample("empty", (n(0, 16),), why="nothing is launched")


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("relu_squared")
    yield misuse("integers", (torch.zeros(2, 8, device=device).int(),), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("no_tensor", (None,), DtypeError, "x must be a tensor, got NoneType")


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> tuple[Tensor, ...]:
        return (normal(device, dtype, rows, width),)

    return row_workloads(draw, "NI", ((2048, 4096), (16384, 4096), (16384, 24576)), columns=24576)


def work(x: Tensor) -> Work:
    size = x.numel() * x.element_size()
    return Work(2 * size, 5 * size)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout({"x": "…"}, ("x",)),
)  # fmt: skip
def relu_squared(x: Tensor) -> Tensor:
    """Square what is positive; the rest becomes 0.

        y = max(x, 0)²

    x       (...)   any floating dtype
    returns (...), dtype of x; a fused backend keeps only x for the backward pass

    Raises DtypeError for integers.
    So et al. 2021, arXiv:2109.08668.
    """
    positive = F.relu(x)
    # Unlike that of square(), the gradient of this product never holds 2x, which overflows where grad · 2x does not.
    return positive * positive
