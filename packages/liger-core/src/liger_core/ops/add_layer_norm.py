# SPDX-License-Identifier: Apache-2.0
"""add_layer_norm: a residual sum and the layer norm after it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Dtypes, Misuse, Sample, Workload, op
from liger_core.ops._inputs import misuses_of, normal, normals, row_work, sample_table, sized, tensor_workloads
from liger_core.ops.layer_norm import layer_norm


def check(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> None:
    name = "add_layer_norm"
    checks.floating(name, 2, x=x, residual=residual, weight=weight, bias=bias)
    checks.at_least_one_dimension(name, "x", x)
    if x.shape != residual.shape:
        checks.unlike(name, "residual", residual, "x", x, "; expand it")
    checks.vector(name, "weight", weight, x.shape[-1], "x", x)
    checks.vector(name, "bias", bias, x.shape[-1], "x", x)
    checks.positive(name, "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    long = sized(device, 2100, 600)
    yield from sample_table(
        ("one_block", (n(2, 3, 64), n(2, 3, 64), n(64), n(64)), {}, "the width is a power of two: no mask"),
        ("odd_width", (n(5, 100), n(5, 100), n(100), n(100)), {}, "masked lanes must not enter the variance"),
        ("many_rows", (n(600, 24), n(600, 24), n(24), n(24)), {}, "every program of the backward walks several rows"),
        ("many_long_rows", (n(530, long), n(530, long), n(long), n(long)), {},
         "one row a program, and every program walks several"),
        ("chunks", (n(3, 2100), n(3, 2100), n(2100), n(2100)), {},
         "the row is divided into chunks, and the last one is masked"),
        ("whole_row", (n(3, 4096), n(3, 4096), n(4096), n(4096)), {}, "one row a program, as wide as its block"),
        ("wide", (n(2, 20000), n(2, 20000), n(20000), n(20000)), {}, "the row is longer than one block"),
        ("no_bias", (n(6, 96), n(6, 96), n(96)), {}, "weight without bias"),
        ("plain", (n(6, 96), n(6, 96)), {}, "neither weight nor bias"),
        ("frozen_affine", (n(6, 96), n(6, 96), n(96), n(96)), {}, "no work for either", "weight", "bias"),
        ("frozen_sum", (n(6, 96), n(6, 96), n(96), n(96)), {}, "only the affine gradients", "x", "residual"),
        ("frozen_x", (n(6, 96), n(6, 96), n(96), n(96)), {}, "the one gradient of the sum goes to residual alone", "x"),
        ("large_mean", (n(4, 96) + 30, n(4, 96) + 20, n(96), n(96)), {}, "the variance is taken about the mean"),
        ("large_eps", (n(4, 48, scale=0.01), n(4, 48, scale=0.01), n(48), n(48), 0.1), {},
         "eps dominates the variance"),
        ("strided_rows", (n(5, 160)[:, :80], n(5, 240)[:, :80], n(80), n(80)), {},
         "both are read through strides of their own"),
    )  # fmt: skip
    affine = [normal(device, torch.float32, 72) for _ in range(2)]
    yield from sample_table(
        ("float32_weight", (n(5, 72), n(5, 72), *affine), {}, "weight and bias have another dtype than x"),
        ("empty", (n(0, 64), n(0, 64), n(64), n(64)), {}, "no rows: nothing is launched, gradients are zero"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("add_layer_norm")
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    message = "residual must have the shape of x (2, 8), got (8,); expand it"
    yield misuse("residual_shape", (x, x[0], weight, weight), ShapeError, message)
    message = "residual must have dtype torch.bfloat16 like x, got torch.float32; cast one of them"
    yield misuse("dtypes", (x.bfloat16(), x), DtypeError, message)
    yield misuse(
        "bias_shape", (x, x, weight, weight[1:]), ShapeError, "bias must have shape (8,) to match x (2, 8), got (7,)"
    )
    yield misuse("eps_negative", (x, x, None, None, -1e-5), OptionError, "eps must be a finite number > 0, got -1e-05")


def workloads() -> Iterator[Workload]:
    return tensor_workloads("NH", ((2048, 4096), (32768, 4096), (16384, 8192)), matrices=2, vectors=2)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(4, 8),
    layout=Layout({"x": "… (width)", "residual": "… (width)", "weight": "(width)", "bias": "(width)"}, ("x", "x")),
    dtypes=Dtypes((("x", "residual"),)),
)  # fmt: skip
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add a residual to x, then center every row of the sum, scale it to unit variance and apply weight and bias.

        summed = x + residual                                                           (rounded to the dtype of x)
        normed = (summed - mean(summed)) / sqrt(var(summed) + eps) · weight + bias      (over the last dimension)

    x             (..., width)   any floating dtype
    residual      (..., width)   shape and dtype of x; under autocast both get the wider of their dtypes
    weight, bias  (width,)       any floating dtype; without them the factor is 1, and nothing is added
    eps           as in layer_norm
    returns       (normed, summed), shape and dtype of x; the sum is the next residual

    x and residual share one gradient: autograd.grad may return the same tensor for both, as for x + residual. Raises
    ShapeError if residual has another shape than x or weight or bias is not (width,), DtypeError for integers or two
    dtypes, OptionError for eps ≤ 0. Ba, Kiros & Hinton 2016, arXiv:1607.06450.
    """
    summed = x + residual
    return layer_norm.reference(summed, weight, bias, eps), summed
