# SPDX-License-Identifier: Apache-2.0
"""rms_norm: scale every row to unit root mean square."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.checks import Cast
from liger_core.errors import DeviceError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import misuses_of, normals, row_work, sample_table, scaling_misuses, sized, tensor_workloads


def check(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0, cast: Cast = "input"
) -> None:
    checks.scaling("rms_norm", x, weight, eps, weight_offset, cast)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    long = sized(device, 2100, 600)
    yield from sample_table(
        ("one_block", (n(2, 3, 64), n(64)), {}, "the width is a power of two: no mask"),
        ("odd_width", (n(5, 100), n(100)), {}, "mask on the last block"),
        ("per_head", (n(2, 7, 3, 64), n(64)), {}, "small widths: many rows per program, rows not a multiple of them"),
        ("many_rows", (n(600, 24), n(24)), {}, "every program of the backward walks several rows"),
        ("many_long_rows", (n(530, long), n(long)), {}, "one row a program, and every program walks several"),
        ("whole_row", (n(3, 4096), n(4096)), {}, "one row a program, as wide as its block: no mask"),
        ("whole_blocks", (n(8, 256), n(256)), {}, "several rows per program, all full: no mask"),
        ("whole_chunks", (n(2, 5120), n(5120)), {}, "chunks that fill a row: no mask"),
        ("whole_tiles", (n(2, 9216), n(9216)), {}, "tiles that fill a row"),
        ("longest_block", (n(2, 9000), n(9000)), {}, "one row takes most of the registers"),
        ("gemma", (n(6, 96), n(96)), {"weight_offset": 1.0, "cast": "float32"}, "1 + weight, multiplied in float32"),
        ("cast_input", (n(6, 96, scale=30), n(96)), {"cast": "input"}, "Llama casting rounds before the weight"),
        ("weightless", (n(6, 96),), {}, "no weight and no weight gradient"),
        ("frozen_weight", (n(6, 96), n(96)), {}, "no work for the weight gradient", "weight"),
        ("frozen_input", (n(6, 96), n(96)), {}, "only the weight gradient", "x"),
        ("large_eps", (n(4, 48, scale=0.01), n(48)), {"eps": 0.1}, "eps dominates the mean square"),
        ("huge_values", (n(4, 64, scale=3e4 if dtype == torch.float16 else 1e18), n(64)), {},
         "the cube of their inverse underflows"),
        ("strided_rows", (n(5, 160)[:, :80], n(80)), {}, "rows are read through their stride"),
        ("transposed", (n(40, 6).t(), n(40)), {}, "the last dimension is not contiguous"),
        ("float32_weight", (n(5, 72), normals(device, torch.float32)(72)), {}, "the weight has another dtype than x"),
        ("one_row", (n(1, 200), n(200)), {}, "a single row"),
        ("one_column", (n(9, 1), n(1), 0.5), {},
         "a single column; with a small eps its gradient would be pure cancellation"),
        ("vector", (n(33), n(33)), {}, "no leading dimension"),
        ("wide", (n(3, 20000), n(20000)), {}, "the row is longer than one block"),
        ("widest", (n(2, 65536), n(65536)), {}, "the widest documented row"),
        ("empty", (n(0, 64), n(64)), {}, "no rows: nothing is launched, gradients are zero"),
        ("zeros", (torch.zeros(3, 64, device=device, dtype=dtype), n(64)), {}, "the mean square is zero: eps alone"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    yield from scaling_misuses("rms_norm", device, 1)
    x, elsewhere = torch.zeros(2, 4, device=device), torch.zeros(4, device="meta")
    yield misuses_of("rms_norm")(
        "device", (x, elsewhere), DeviceError, f"weight must be on {x.device} like x, got meta"
    )


def workloads() -> Iterator[Workload]:
    # The first two shapes are host-bound on a GPU.
    return tensor_workloads(
        "NH", ((256, 1024), (2048, 4096), (32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384)), vectors=1
    )


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=Layout({"x": "… (width)", "weight": "(width)"}, ("x",)),
)  # fmt: skip
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0, cast: Cast = "input"
) -> Tensor:
    """Scale every row of x to unit root mean square, then by weight.

        y = x / sqrt(mean(x²) + eps) · (weight_offset + weight)          (mean over the last dimension)

    x              (..., width)   any floating dtype
    weight         (width,)       any floating dtype; without it the factor is 1
    eps            added to the mean square, in the units of x²; > 0
    weight_offset  1.0 for models that store weight - 1 (Gemma)
    cast           "input": the normalized row is rounded to the dtype of x, then multiplied by the weight (Llama);
                   "float32": it is rounded once, after that product (Gemma)
    returns        (..., width), dtype of x; the mean is accumulated in float32 (float64 for float64)

    Raises ShapeError if weight is not (width,), DtypeError for integers, OptionError for eps ≤ 0.
    Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    wide = accumulator(x.dtype)
    row = x.to(wide)
    # Not · rsqrt(…): its derivative cubes it, which underflows in float32 from |x| = 1e15 on.
    normed = row / torch.sqrt(row.square().mean(-1, keepdim=True) + eps)
    if cast == "input":
        normed = normed.to(x.dtype)
    if weight is None:
        return normed.to(x.dtype)
    factor = weight.to(wide)
    if weight_offset != 0.0:
        factor = factor + weight_offset
    return (normed.to(wide) * factor).to(x.dtype)
