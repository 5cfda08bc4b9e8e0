# SPDX-License-Identifier: Apache-2.0
"""add_rms_norm: add a residual, then scale every row of the sum to unit root mean square."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.checks import Cast
from liger_core.errors import DeviceError, DtypeError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Dtypes, Misuse, Sample, Workload, op
from liger_core.ops._inputs import misuses_of, normals, row_work, sample_table, scaling_misuses, sized, tensor_workloads
from liger_core.ops.rms_norm import rms_norm


def check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: Cast = "input",
) -> None:
    checks.floating("add_rms_norm", 2, x=x, residual=residual)
    if x.shape != residual.shape:
        checks.unlike("add_rms_norm", "residual", residual, "x", x, "; expand it")
    checks.scaling("add_rms_norm", x, weight, eps, weight_offset, cast)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    long = sized(device, 2100, 600)

    def pair(*shape: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return n(*shape, scale=scale), n(*shape, scale=scale)

    yield from sample_table(
        ("one_block", (*pair(2, 3, 64), n(64)), {}, "the width is a power of two: no mask"),
        ("odd_width", (*pair(5, 100), n(100)), {}, "mask on the last block"),
        ("small_width", (*pair(37, 24), n(24)), {}, "many rows per program, rows not a multiple of them"),
        ("many_rows", (*pair(600, 24), n(24)), {}, "every program of the backward walks several rows"),
        ("many_long_rows", (*pair(530, long), n(long)), {}, "one row a program, and every program walks several"),
        ("chunks", (*pair(3, 2100), n(2100)), {}, "the row is divided into chunks, and the last one is masked"),
        ("whole_row", (*pair(3, 4096), n(4096)), {}, "one row a program, as wide as its block: no mask"),
        ("whole_blocks", (*pair(8, 256), n(256)), {}, "several rows per program, all full: no mask"),
        ("longest_block", (*pair(2, 9000), n(9000)), {}, "one row takes most of the registers"),
        ("gemma", (*pair(6, 96), n(96)), {"weight_offset": 1.0, "cast": "float32"},
         "1 + weight, multiplied in float32"),
        ("cast_input", (*pair(6, 96, scale=30), n(96)), {"cast": "input"}, "Llama casting rounds before the weight"),
        ("weightless", pair(6, 96), {}, "no weight and no weight gradient"),
        ("large_residual", (n(6, 96), n(6, 96, scale=300), n(96)), {}, "the sum is rounded before it is normalized"),
        ("frozen_weight", (*pair(6, 96), n(96)), {}, "no work for the weight gradient", "weight"),
        ("frozen_residual", (*pair(6, 96), n(96)), {}, "the one gradient of the sum goes to x alone", "residual"),
        ("frozen_sum", (*pair(6, 96), n(96)), {}, "only the weight gradient", "x", "residual"),
        ("large_eps", (*pair(4, 48, scale=0.01), n(48)), {"eps": 0.1}, "eps dominates the mean square"),
        ("strided_rows", (n(5, 160)[:, :80], n(5, 240)[:, :80], n(80)), {},
         "both are read through strides of their own"),
        ("transposed", (n(40, 6).t(), n(6, 40), n(40)), {}, "the last dimension of x is not contiguous"),
        ("float32_weight", (*pair(5, 72), normals(device, torch.float32)(72)), {},
         "the weight has another dtype than x"),
        ("one_row", (*pair(1, 200), n(200)), {}, "a single row"),
        ("one_column", (*pair(9, 1), n(1), 0.5), {},
         "a single column; with a small eps its gradient would be pure cancellation"),
        ("vector", (*pair(33), n(33)), {}, "no leading dimension"),
        ("wide", (*pair(3, 20000), n(20000)), {}, "the row is longer than one block"),
        ("empty", (*pair(0, 64), n(64)), {}, "no rows: nothing is launched, gradients are zero"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    yield from scaling_misuses("add_rms_norm", device, 2)
    misuse = misuses_of("add_rms_norm")
    x = torch.zeros(2, 3, 8, device=device)
    message = "residual must have the shape of x (2, 3, 8), got (3, 8); expand it"
    yield misuse("residual_shape", (x, x[0], x[0, 0]), ShapeError, message)
    message = "residual must have dtype torch.bfloat16 like x, got torch.float32; cast one of them"
    yield misuse("dtypes", (x.bfloat16(), x), DtypeError, message)
    elsewhere = torch.zeros(2, 3, 8, device="meta")
    yield misuse("device", (x, elsewhere), DeviceError, f"residual must be on {x.device} like x, got meta")


def workloads() -> Iterator[Workload]:
    # The first shape is host-bound on a GPU.
    return tensor_workloads(
        "NH", ((2048, 4096), (32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384)), matrices=2, vectors=1
    )


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(4, 8),
    layout=Layout({"x": "… (width)", "residual": "… (width)", "weight": "(width)"}, ("x", "x")),
    dtypes=Dtypes((("x", "residual"),)),
)  # fmt: skip
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: Cast = "input",
) -> tuple[Tensor, Tensor]:
    """Add a residual to x, then scale every row of the sum to unit root mean square and by weight.

        summed = x + residual                                                    (rounded to the dtype of x)
        normed = summed / sqrt(mean(summed²) + eps) · (weight_offset + weight)   (mean over the last dimension)

    x              (..., width)   any floating dtype
    residual       (..., width)   shape and dtype of x; under autocast both get the wider of their dtypes
    weight         (width,)       any floating dtype; without it the factor is 1
    eps, weight_offset, cast      as in rms_norm
    returns        (normed, summed), shape and dtype of x; the sum is the next residual

    x and residual share one gradient: autograd.grad may return the same tensor for both, as for x + residual. Raises
    ShapeError if residual has another shape than x or weight is not (width,), DtypeError for integers or two dtypes,
    OptionError for eps ≤ 0. Zhang & Sennrich 2019, arXiv:1910.07467; before each block as in Xiong et al. 2020,
    arXiv:2002.04745.
    """
    summed = x + residual
    return rms_norm.reference(summed, weight, eps, weight_offset=weight_offset, cast=cast), summed
