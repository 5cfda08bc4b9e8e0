# SPDX-License-Identifier: Apache-2.0
"""layer_norm: center every row and scale it to unit variance."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import misuses_of, normal, normals, row_work, sample_table, sized, tensor_workloads


def check(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> None:
    checks.floating("layer_norm", x=x, weight=weight, bias=bias)
    checks.at_least_one_dimension("layer_norm", "x", x)
    checks.vector("layer_norm", "weight", weight, x.shape[-1], "x", x)
    checks.vector("layer_norm", "bias", bias, x.shape[-1], "x", x)
    checks.positive("layer_norm", "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    long = sized(device, 2100, 600)
    yield from sample_table(
        ("one_block", (n(2, 3, 64), n(64), n(64)), {}, "the width is a power of two: no mask"),
        ("odd_width", (n(5, 100), n(100), n(100)), {}, "mask on the last block, which must not enter the variance"),
        ("small_width", (n(37, 24), n(24), n(24)), {}, "many rows per program, rows not a multiple of them"),
        ("many_rows", (n(600, 24), n(24), n(24)), {}, "every program of the backward walks several rows"),
        ("many_long_rows", (n(530, long), n(long), n(long)), {}, "one row a program, and every program walks several"),
        ("whole_row", (n(3, 4096), n(4096), n(4096)), {}, "one row a program, as wide as its block: no mask"),
        ("whole_blocks", (n(8, 256), n(256), n(256)), {}, "several rows per program, all full: no mask"),
        ("whole_chunks", (n(2, 5120), n(5120), n(5120)), {}, "chunks that fill a row: no mask"),
        ("whole_tiles", (n(2, 9216), n(9216), n(9216)), {}, "tiles that fill a row"),
        ("longest_block", (n(2, 9000), n(9000), n(9000)), {}, "one row and two column sums take most of the registers"),
        ("no_bias", (n(6, 96), n(96)), {}, "weight without bias"),
        ("bias_only", (n(6, 96), None, n(96)), {}, "bias without weight"),
        ("plain", (n(6, 96),), {}, "neither weight nor bias"),
        ("frozen_weight", (n(6, 96), n(96), n(96)), {}, "only the bias gradient of the two", "weight"),
        ("frozen_affine", (n(6, 96), n(96), n(96)), {}, "no work for either", "weight", "bias"),
        ("frozen_input", (n(6, 96), n(96), n(96)), {}, "only the affine gradients", "x"),
        ("large_mean", (n(4, 96) + 50, n(96), n(96)), {},
         "the variance is taken about the mean, not as a difference of squares"),
        ("large_eps", (n(4, 48, scale=0.01), n(48), n(48), 0.1), {}, "eps dominates the variance"),
        ("huge_values", (n(4, 64, scale=3e4 if dtype == torch.float16 else 1e18), n(64), n(64)), {},
         "the cube of their inverse underflows"),
    )  # fmt: skip
    constant = torch.cat((torch.full_like(n(2, 1100), 3.0), n(3, 1100)))
    yield from sample_table(
        ("constant_long_rows", (constant, n(1100), n(1100)), {},
         "beside 1 / sqrt(eps), round-off of the sums over a row would be large"),
        ("strided_rows", (n(5, 160)[:, :80], n(80), n(80)), {}, "rows are read through their stride"),
        ("transposed", (n(40, 6).t(), n(40), n(40)), {}, "the last dimension is not contiguous"),
    )  # fmt: skip
    affine = [normal(device, torch.float32, 72) for _ in range(2)]
    yield from sample_table(
        ("float32_weight", (n(5, 72), *affine), {}, "weight and bias have another dtype than x"),
        ("one_row", (n(1, 200), n(200), n(200)), {}, "a single row"),
        # A small eps would leave a thousandth of the gradient, where errors of equally exact formulas differ by half.
        ("two_columns", (n(9, 2), n(2), n(2), 0.1), {}, "the fewest columns with a variance"),
        ("wide", (n(3, 20000), n(20000), n(20000)), {}, "the row is longer than one block"),
        ("empty", (n(0, 64), n(64), n(64)), {}, "no rows: nothing is launched, gradients are zero"),
    )  # fmt: skip


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
