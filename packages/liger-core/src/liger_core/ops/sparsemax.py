# SPDX-License-Identifier: Apache-2.0
"""sparsemax: probabilities of the last dimension, most of them exactly zero."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import misuses_of, normals, row_samples, row_work, tensor_workloads


def check(x: Tensor) -> None:
    checks.floating("sparsemax", x=x)
    if x.dim() == 0 or x.shape[-1] == 0:
        checks.misshapen("sparsemax", "x must have at least one column", x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    yield from row_samples(device, dtype)
    yield Sample("dense", (n(4, 48, scale=1e-3),), why="every element is in the support")
    yield Sample("sparse", (n(4, 96, scale=30),), why="one element is the support")
    yield Sample("long", (n(3, 16400),), why="a program reads its next row while it computes one")
    yield Sample(
        "long_tiles", (n(2, 12288),), why="tiles that fill a row of 16-bit numbers, which is read again in every pass"
    )
    yield Sample("shifted", (n(4, 96) + 50,), why="the threshold is relative to the maximum")


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse, x = misuses_of("sparsemax"), torch.zeros(2, 8, device=device)
    yield misuse("integers", (x.int(),), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("scalar", (x[0, 0],), ShapeError, "x must have at least one column, got ()")
    yield misuse("no_columns", (x[:, :0],), ShapeError, "x must have at least one column, got (2, 0)")


def workloads() -> Iterator[Workload]:
    return tensor_workloads("NV", ((32768, 1024), (32768, 4096), (16384, 8192), (4096, 32768)))


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=Layout({"x": "… (width)"}, ("x",)),
)  # fmt: skip
def sparsemax(x: Tensor) -> Tensor:
    """Compute the probabilities that are nearest to x in the Euclidean norm, over the last dimension.

        y = max(x - t, 0), with the t for which Σ y = 1

    x       (..., width)   any floating dtype; at least one column
    returns (..., width), dtype of x; t is in float32 (float64 for float64); the backward pass keeps only y

    Where x equals t, the gradient is that of y = 0. Raises DtypeError for integers, ShapeError for a scalar and rows
    without columns. Martins & Astudillo 2016, arXiv:1602.02068.
    """
    row = x.to(accumulator(x.dtype))
    row = row - row.detach().amax(-1, keepdim=True)
    ordered = row.sort(dim=-1, descending=True).values
    total = ordered.cumsum(-1)
    number = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=row.dtype)
    size = (1 + number * ordered > total).sum(-1, keepdim=True)
    threshold = (total.gather(-1, (size - 1).clamp(min=0)) - 1) / size
    return F.relu(row - threshold).to(x.dtype)
