# SPDX-License-Identifier: Apache-2.0
"""dyt: a tanh in place of a norm."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import misuses_of, normal, normals, row_work, row_workloads, sample_table


def check(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
    checks.floating("dyt", 2, x=x, alpha=alpha, weight=weight, bias=bias)
    checks.at_least_one_dimension("dyt", "x", x)
    if alpha.shape not in ((), (1,)):
        checks.misshapen("dyt", "alpha must have one element, shape () or (1,)", alpha)
    checks.vector("dyt", "weight", weight, x.shape[-1], "x", x)
    checks.vector("dyt", "bias", bias, x.shape[-1], "x", x)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    half = torch.full((1,), 0.5, device=device, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield from sample_table(
        ("one_block", (n(2, 4, 64), half, n(64), n(64)), {}, "the width is a power of two: no mask"),
        ("odd_width", (n(5, 101), half, n(101), n(101)), {}, "masks on rows and columns"),
        ("many_rows", (n(600, 24), half, n(24), n(24)), {}, "every program of the backward walks several rows"),
        ("several_tiles", (n(70, 2500), half, n(2500), n(2500)), {}, "a row takes several column tiles"),
        ("no_bias", (n(6, 96), half, n(96)), {}, "weight without bias"),
        ("bias_only", (n(6, 96), half, None, n(96)), {}, "bias without weight"),
        ("plain", (n(6, 96), half), {}, "neither weight nor bias"),
        ("scalar_alpha", (n(12, 96), half[0], n(96), n(96)), {},
         "alpha has no dimension, and neither has its gradient"),
        ("negative_alpha", (n(6, 96), -3 * half, n(96), n(96)), {}, "the tanh is turned around"),
        ("large_values", (n(6, 96, scale=30), half, n(96), n(96)), {}, "the tanh saturates on both sides"),
        ("small_values", (n(6, 96, scale=1e-3), half, n(96)), {}, "near zero, where a tanh of exponentials cancels"),
        ("frozen_affine", (n(6, 96), half, n(96), n(96)), {}, "only the gradients of x and alpha", "weight", "bias"),
        ("frozen_input", (n(6, 96), half, n(96), n(96)), {}, "only the gradients of the weights", "x"),
        ("frozen_alpha", (n(6, 96), half, n(96), n(96)), {}, "no sum over everything", "alpha"),
        ("strided_rows", (n(5, 160)[:, :80], half, n(80), n(80)), {}, "rows are read through their stride"),
        ("float32_weight", (n(5, 72), half.to(wide), *(normal(device, wide, 72) for _ in range(2))), {},
         "weights of another dtype than x"),
        ("vector", (n(33), half, n(33), n(33)), {}, "no leading dimension"),
        ("empty", (n(0, 64), half, n(64), n(64)), {}, "no rows: nothing is launched, gradients are zero"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("dyt")
    x, alpha = torch.zeros(2, 8, device=device), torch.zeros(1, device=device)
    yield misuse("integers", (x.int(), alpha), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("alpha", (x, x[0]), ShapeError, "alpha must have one element, shape () or (1,), got (8,)")
    yield misuse("number", (x, 0.5), DtypeError, "alpha must be a tensor, got float")
    yield misuse("weight_shape", (x, alpha, x), ShapeError, "weight must have shape (8,) to match x (2, 8), got (2, 8)")


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> tuple[Tensor, ...]:
        alpha = torch.full((1,), 0.5, device=device, dtype=dtype)
        return normal(device, dtype, rows, width), alpha, normal(device, dtype, width), normal(device, dtype, width)

    return row_workloads(draw, "NH", ((2048, 4096), (32768, 4096), (16384, 8192)))


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=Layout({"x": "… width", "alpha": "(one)", "weight": "width", "bias": "width"}, ("x",)),
)  # fmt: skip
def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Apply tanh to alpha · x, then weight and bias: DyT, which replaces a norm.

        y = tanh(alpha · x) · weight + bias

    x       (..., width)   any floating dtype
    alpha   () or (1,)     any floating dtype
    weight  (width,)       any floating dtype; without it the factor is 1
    bias    (width,)       any floating dtype; without it nothing is added
    returns (..., width), dtype of x; computed in float32 (float64 for float64); the backward pass keeps only x

    Raises ShapeError if alpha has more than one element or weight or bias is not (width,), DtypeError for integers.
    Zhu et al. 2025, arXiv:2503.10622.
    """
    wide = accumulator(x.dtype)
    y = torch.tanh(x.to(wide) * alpha.to(wide))
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
