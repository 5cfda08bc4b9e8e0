# SPDX-License-Identifier: Apache-2.0
"""layer_norm: center every row and scale it to unit variance."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import misuses_of, normal, normals, row_work, sized, tensor_workloads


def check(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> None:
    checks.floating("layer_norm", x=x, weight=weight, bias=bias)
    checks.at_least_one_dimension("layer_norm", "x", x)
    checks.vector("layer_norm", "weight", weight, x.shape[-1], "x", x)
    checks.vector("layer_norm", "bias", bias, x.shape[-1], "x", x)
    checks.positive("layer_norm", "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    long = sized(device, 2100, 600)
    yield Sample("one_block", (n(2, 3, 64), n(64), n(64)), why="the width is a power of two: no mask")
    yield Sample(
        "odd_width", (n(5, 100), n(100), n(100)), why="mask on the last block, which must not enter the variance"
    )
    yield Sample("small_width", (n(37, 24), n(24), n(24)), why="many rows per program, rows not a multiple of them")
    yield Sample("many_rows", (n(600, 24), n(24), n(24)), why="every program of the backward walks several rows")
    yield Sample(
        "many_long_rows", (n(530, long), n(long), n(long)), why="one row a program, and every program walks several"
    )
    yield Sample("whole_row", (n(3, 4096), n(4096), n(4096)), why="one row a program, as wide as its block: no mask")
    yield Sample("whole_blocks", (n(8, 256), n(256), n(256)), why="several rows per program, all full: no mask")
    yield Sample("whole_chunks", (n(2, 5120), n(5120), n(5120)), why="chunks that fill a row: no mask")
    yield Sample("whole_tiles", (n(2, 9216), n(9216), n(9216)), why="tiles that fill a row")
    yield Sample(
        "longest_block", (n(2, 9000), n(9000), n(9000)), why="one row and two column sums take most of the registers"
    )
    yield Sample("no_bias", (n(6, 96), n(96)), why="weight without bias")
    yield Sample("bias_only", (n(6, 96), None, n(96)), why="bias without weight")
    yield Sample("plain", (n(6, 96),), why="neither weight nor bias")
    yield Sample("frozen_weight", (n(6, 96), n(96), n(96)), frozen=("weight",), why="only the bias gradient of the two")
    yield Sample("frozen_affine", (n(6, 96), n(96), n(96)), frozen=("weight", "bias"), why="no work for either")
    yield Sample("frozen_input", (n(6, 96), n(96), n(96)), frozen=("x",), why="only the affine gradients")
    yield Sample(
        "large_mean",
        (n(4, 96) + 50, n(96), n(96)),
        why="the variance is taken about the mean, not as a difference of squares",
    )
    yield Sample("large_eps", (n(4, 48, scale=0.01), n(48), n(48), 0.1), why="eps dominates the variance")
    yield Sample(
        "huge_values",
        (n(4, 64, scale=3e4 if dtype == torch.float16 else 1e18), n(64), n(64)),
        why="the cube of their inverse underflows",
    )
    constant = torch.cat((torch.full_like(n(2, 1100), 3.0), n(3, 1100)))
    yield Sample(
        "constant_long_rows",
        (constant, n(1100), n(1100)),
        why="beside 1 / sqrt(eps), round-off of the sums over a row would be large",
    )
    yield Sample("strided_rows", (n(5, 160)[:, :80], n(80), n(80)), why="rows are read through their stride")
    yield Sample("transposed", (n(40, 6).t(), n(40), n(40)), why="the last dimension is not contiguous")
    affine = [normal(device, torch.float32, 72) for _ in range(2)]
    yield Sample("float32_weight", (n(5, 72), *affine), why="weight and bias have another dtype than x")
    yield Sample("one_row", (n(1, 200), n(200), n(200)), why="a single row")
    # A small eps would leave a thousandth of the gradient, where errors of equally exact formulas differ by half.
    yield Sample("two_columns", (n(9, 2), n(2), n(2), 0.1), why="the fewest columns with a variance")
    yield Sample("wide", (n(3, 20000), n(20000), n(20000)), why="the row is longer than one block")
    yield Sample("empty", (n(0, 64), n(64), n(64)), why="no rows: nothing is launched, gradients are zero")


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("layer_norm")
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    yield misuse("weight_shape", (x, weight[1:]), ShapeError, "weight must have shape (8,) to match x (2, 8), got (7,)")
    yield misuse(
        "bias_shape", (x, weight, weight[None]), ShapeError, "bias must have shape (8,) to match x (2, 8), got (1, 8)"
    )
    yield misuse("integers", (x.int(),), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("eps_negative", (x, None, None, -1e-5), OptionError, "eps must be a finite number > 0, got -1e-05")
    elsewhere = torch.zeros(8, device="meta")
    yield misuse("device", (x, weight, elsewhere), DeviceError, f"bias must be on {x.device} like x, got meta")


def workloads() -> Iterator[Workload]:
    # The first shape is host-bound on a GPU.
    return tensor_workloads("NH", ((2048, 4096), (32768, 4096), (16384, 8192), (8192, 16384)), vectors=2)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=Layout({"x": "… (width)", "weight": "(width)", "bias": "(width)"}, ("x",)),
)  # fmt: skip
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Center every row of x, scale it to unit variance, then apply weight and bias.

        y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias          (over the last dimension; var divides by width)

    x       (..., width)   any floating dtype
    weight  (width,)       any floating dtype; without it the factor is 1
    bias    (width,)       any floating dtype; without it nothing is added
    eps     added to the variance, in the units of x²; > 0
    returns (..., width), dtype of x; mean and variance are accumulated and kept in float32 (float64 for float64)

    Raises ShapeError if weight or bias is not (width,), DtypeError for integers, OptionError for eps ≤ 0.
    Ba, Kiros & Hinton 2016, arXiv:1607.06450.
    """
    wide = accumulator(x.dtype)
    row = x.to(wide)
    centered = row - row.mean(-1, keepdim=True)
    # Not · rsqrt(…): its derivative cubes it, which underflows in float32 from |x| = 1e15 on.
    y = centered / torch.sqrt(centered.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
