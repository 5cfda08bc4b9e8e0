# SPDX-License-Identifier: Apache-2.0
"""softmax: probabilities of the last dimension."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, op
from liger_core.ops._inputs import misuses_of, normals, row_samples, row_work, tensor_workloads


def check(x: Tensor) -> None:
    checks.floating("softmax", x=x)
    checks.at_least_one_dimension("softmax", "x", x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    yield from row_samples(device, dtype)
    yield Sample("wide", (n(2, 40000),), why="the row is longer than one block: two passes over its tiles")
    yield Sample("wide_tiles", (n(2, 40960),), why="tiles that fill a row")
    yield Sample("large_values", (n(4, 96, scale=30),), why="one probability is almost 1, and the others underflow")
    yield Sample(
        "shifted", (n(4, 96) + 80,), why="the maximum is taken off before the exponential, which would overflow"
    )
    yield Sample("no_columns", (n(3, 0),), why="rows without columns")


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse, x = misuses_of("softmax"), torch.zeros(2, 8, device=device)
    yield misuse("integers", (x.int(),), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("scalar", (x[0, 0],), ShapeError, "x must have at least one dimension, got a scalar")


def workloads() -> Iterator[Workload]:
    return tensor_workloads("NV", ((32768, 1024), (32768, 4096), (16384, 8192), (4096, 32768), (2048, 128256)))


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=Layout({"x": "… (width)"}, ("x",)),
)  # fmt: skip
def softmax(x: Tensor) -> Tensor:
    """Compute probabilities from logits, over the last dimension.

        y = exp(x - max(x)) / Σ exp(x - max(x))

    x       (..., width)   any floating dtype
    returns (..., width), dtype of x; the sum is in float32 (float64 for float64); the backward pass keeps only y

    Raises DtypeError for integers, ShapeError for a scalar.
    """
    # On a GPU, autocast returns float32.
    return torch.softmax(x, dim=-1).to(x.dtype)
