# SPDX-License-Identifier: Apache-2.0
"""modulated_rms_norm: an RMSNorm that is modulated for each sample, as in diffusion transformers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, accumulator, op
from liger_core.ops import _modulated
from liger_core.ops._inputs import normals, row_work


def check(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None, eps: float = 1e-6
) -> None:
    _modulated.check("modulated_rms_norm", x, scale, shift, weight, eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    yield from _modulated.samples(device, dtype)
    yield Sample("weight", (n(2, 6, 96), n(2, 96), n(2, 96), n(96)), why="the norm has a weight of its own")
    yield Sample("weight_no_shift", (n(3, 6, 40), n(3, 40), None, n(40)), {"eps": 0.1}, why="a weight without a shift")
    yield Sample(
        "frozen_weight", (n(2, 6, 96), n(2, 96), n(2, 96), n(96)), frozen=("weight",), why="no sum over samples"
    )
    yield Sample(
        "only_weight", (n(3, 6, 40), n(3, 40), None, n(40)), frozen=("x", "scale"), why="only the sum over samples"
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    return _modulated.misuses("modulated_rms_norm", device)


@op(
    check=check, samples=samples, misuses=misuses, workloads=_modulated.workloads, work=row_work(2, 5),
    layout=Layout({"x": "… tokens (width)", "scale": "… (width)", "shift": "… (width)", "weight": "(width)"}, ("x",)),
)  # fmt: skip
def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Scale rows to unit root mean square, then scale and shift them by values computed for each sample.

        y = norm(x) · weight · (1 + scale) + shift
        norm(x) = x / sqrt(mean(x²) + eps)                              (mean over the last dimension)

    x       (..., tokens, width)   any floating dtype
    scale   (..., width)           any floating dtype; one row for all tokens of a sample
    shift   (..., width)           any floating dtype; without it nothing is added
    weight  (width,)               any floating dtype; without it the factor is 1
    eps     added to the mean square, in the units of x²; > 0
    returns (..., tokens, width), dtype of x; computed in float32 (float64 for float64) and rounded once

    Raises ShapeError if scale or shift is not one row a sample or weight is not (width,), DtypeError for integers,
    OptionError for eps ≤ 0. Peebles & Xie 2023, arXiv:2212.09748; Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    wide = accumulator(x.dtype)
    row = x.to(wide)
    # Not · rsqrt(…), as in rms_norm.
    y = row / torch.sqrt(row.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    y = y * (1.0 + scale.to(wide).unsqueeze(-2))
    return (y if shift is None else y + shift.to(wide).unsqueeze(-2)).to(x.dtype)
