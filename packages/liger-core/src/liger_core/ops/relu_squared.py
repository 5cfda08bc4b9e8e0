# SPDX-License-Identifier: Apache-2.0
"""relu_squared: the activation of ungated feed-forward layers (Nemotron, Arcee), or a gate (BitNet)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Dtypes, Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops._gated import joined_gate
from liger_core.ops._inputs import misuse_table, normals, tensor_workloads


def check(x: Tensor, up: Tensor | None = None) -> None:
    checks.floating("relu_squared", x=x, up=up)
    if up is not None and x.shape != up.shape:
        checks.unlike("relu_squared", "up", up, "x", x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
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
    yield Sample("gated", (n(5, 101), n(5, 101)), why="the result is multiplied by up")
    yield Sample("gated_strided", (n(40, 6).t(), n(6, 80)[:, ::2]), why="neither is contiguous in its last dimension")
    yield Sample("gated_large", (n(3, 64, scale=30), n(3, 64)), why="squares are much larger than the inputs")
    large = n(3, 64).abs().clamp(min=0.1) * 3000
    yield Sample(
        "gated_beyond_half",
        (large, n(3, 64, scale=1e-4)),
        why="the squares exceed float16, what up makes of them does not",
    )
    yield Sample("gated_frozen_up", (n(4, 40), n(4, 40)), frozen=("up",), why="only the gradient of x")
    yield Sample("gated_frozen_x", (n(4, 40), n(4, 40)), frozen=("x",), why="only up's gradient")
    yield Sample("gated_scalars", (n(), n()), why="no dimension at all")
    yield Sample("gated_empty", (n(0, 16), n(0, 16)), why="nothing is launched")


def misuses(device: torch.device) -> Iterator[Misuse]:
    x = torch.zeros(2, 8, device=device)
    yield from misuse_table(
        "relu_squared", (x,),
        ("integers", DtypeError, "x must have a floating dtype, got torch.int32", {}, x.int()),
        ("no_tensor", DtypeError, "x must be a tensor, got NoneType", {}, None),
        ("up_shape", ShapeError, "up must have the shape of x (2, 8), got (1, 8)", {}, x, x[:1]),
        ("up_dtype", DtypeError, "up must have dtype torch.float32 like x, got torch.bfloat16; cast one of them",
         {}, x, x.bfloat16()),
    )  # fmt: skip


def workloads() -> Iterator[Workload]:
    return tensor_workloads("NI", ((2048, 4096), (16384, 4096), (16384, 24576)), columns=24576)


def work(x: Tensor, up: Tensor | None = None) -> Work:
    return Work(2 * x.nbytes, 5 * x.nbytes) if up is None else Work(3 * x.nbytes, 8 * x.nbytes)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout({"x": "…", "up": "…"}, ("x",)),
    dtypes=Dtypes((("x", "up"),)),
)  # fmt: skip
def relu_squared(x: Tensor, up: Tensor | None = None) -> Tensor:
    """Square positive elements and set the others to 0; with up, multiply it by the result.

        y = max(x, 0)² · up

    x       (...)   any floating dtype
    up      (...)   shape and dtype of x (under autocast both get the wider of their dtypes); without it the factor is 1
    returns (...), dtype of x; a fused backend keeps only the inputs for the backward pass

    Raises DtypeError for integers and dtypes that differ, ShapeError for shapes that differ.
    So et al. 2021, arXiv:2109.08668.
    """
    if up is None:
        return joined_gate(x, None, "relu_squared")
    # In float32: the square of 300 overflows float16, although a small up may bring the product back.
    wide = accumulator(x.dtype)
    return joined_gate(x.to(wide), up.to(wide), "relu_squared").to(x.dtype)
