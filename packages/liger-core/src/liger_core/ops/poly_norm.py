# SPDX-License-Identifier: Apache-2.0
"""poly_norm: a cubic polynomial of normalized powers, an activation."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import misuses_of, normal, normals, row_work, row_workloads, sized


def check(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> None:
    checks.floating("poly_norm", 2, x=x, weight=weight, bias=bias)
    checks.at_least_one_dimension("poly_norm", "x", x)
    if weight.shape != (3,):
        checks.misshapen("poly_norm", "weight must have shape (3,), one factor a power", weight)
    if bias is not None and bias.shape not in ((), (1,)):
        checks.misshapen("poly_norm", "bias must have one element, shape () or (1,)", bias)
    checks.positive("poly_norm", "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield Sample("one_block", (n(2, 4, 64), n(3), n(1)), why="the width is a power of two")
    yield Sample("odd_width", (n(5, 100), n(3), n(1)), why="masks on rows and columns")
    yield Sample("many_rows", (n(sized(device, 560, 40), 5000), n(3)), why="programs of the backward walk several rows")
    # No bias: its gradient, a sum of 12288 numbers near zero, would have an arbitrary relative error.
    yield Sample("whole_row", (n(3, 4096), n(3)), why="every chunk of a row is full, and no bias")
    yield Sample("no_bias", (n(6, 96), n(3)), why="no bias and no gradient of it")
    yield Sample("scalar_bias", (n(6, 96), n(3), n()), why="the bias has no dimension, and neither has its gradient")
    yield Sample("frozen_weight", (n(6, 96), n(3), n(1)), frozen=("weight", "bias"), why="only the gradient of x")
    yield Sample("frozen_input", (n(6, 96), n(3), n(1)), frozen=("x",), why="only the sums over all rows")
    yield Sample("frozen_factors", (n(6, 96), n(3), n(1)), frozen=("weight",), why="only the bias of the two")
    yield Sample("large_eps", (n(4, 48, scale=0.1), n(3), None, 0.1), why="eps dominates the mean square of the cube")
    yield Sample("strided_rows", (n(5, 160)[:, :80], n(3), n(1)), why="rows are read through their stride")
    yield Sample(
        "float32_weight",
        (n(5, 72), normal(device, wide, 3), normal(device, wide, 1)),
        why="weights of another dtype than x",
    )
    yield Sample("vector", (n(33), n(3), n(1)), why="no leading dimension")
    yield Sample("empty", (n(0, 64), n(3), n(1)), why="no rows: nothing is launched, gradients are zero")


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("poly_norm")
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(3, device=device)
    yield misuse("integers", (x.int(), weight), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("weight_shape", (x, x[0]), ShapeError, "weight must have shape (3,), one factor a power, got (8,)")
    yield misuse(
        "bias_shape", (x, weight, weight), ShapeError, "bias must have one element, shape () or (1,), got (3,)"
    )
    yield misuse("eps_zero", (x, weight, None, 0.0), OptionError, "eps must be a finite number > 0, got 0.0")


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> tuple[Tensor, ...]:
        return normal(device, dtype, rows, width), normal(device, dtype, 3), normal(device, dtype, 1)

    return row_workloads(draw, "NI", ((2048, 4096), (32768, 4096), (16384, 8192), (16384, 11008)))


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=Layout({"x": "… (width)", "weight": "(three)", "bias": "(one)"}, ("x",)),
)  # fmt: skip
def poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Sum the first three powers of x, each scaled to unit root mean square over its row.

        y = weight[0] · norm(x³) + weight[1] · norm(x²) + weight[2] · norm(x) + bias
        norm(u) = u / sqrt(mean(u²) + eps)                                               (mean over the last dimension)

    x       (..., width)   any floating dtype
    weight  (3,)           any floating dtype; the factor of the cube comes first
    bias    () or (1,)     any floating dtype; without it nothing is added
    eps     added to the mean square of each power; > 0
    returns (..., width), dtype of x; computed in float32 (float64 for float64). If the sum of x⁶ over a row overflows
            (above 3.4·10³⁸, as for 4096 columns of 6.6·10⁵), the cube counts as 0

    Raises ShapeError if weight is not (3,) or bias has more than one element, DtypeError for integers, OptionError for
    eps ≤ 0. Zhuo et al. 2024, arXiv:2411.03884.
    """
    wide = accumulator(x.dtype)
    row, factors = x.to(wide), weight.to(wide)
    y = torch.zeros_like(row) if bias is None else bias.to(wide).expand_as(row)
    for factor, power in zip(factors.unbind(), (row * row * row, row * row, row), strict=True):
        y = y + factor * (power / torch.sqrt(power.square().mean(-1, keepdim=True) + eps))
    return y.to(x.dtype)
