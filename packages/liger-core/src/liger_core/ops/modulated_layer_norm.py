# SPDX-License-Identifier: Apache-2.0
"""modulated_layer_norm: a LayerNorm that is modulated for each sample, as in diffusion transformers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, accumulator, op
from liger_core.ops import _modulated
from liger_core.ops._inputs import normals, row_work


def check(x: Tensor, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-5) -> None:
    _modulated.check("modulated_layer_norm", x, scale, shift, None, eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    yield from _modulated.samples(device, dtype)
    yield Sample("large_mean", (n(2, 4, 96) + 50, n(2, 96), n(2, 96)), why="the variance is taken about the mean")
    yield Sample("large_eps", (n(2, 4, 48, scale=0.01), n(2, 48), n(2, 48), 0.1), why="eps dominates the variance")


def misuses(device: torch.device) -> Iterator[Misuse]:
    return _modulated.misuses("modulated_layer_norm", device)


@op(
    check=check, samples=samples, misuses=misuses, workloads=_modulated.workloads, work=row_work(2, 5),
    layout=Layout({"x": "… tokens (width)", "scale": "… (width)", "shift": "… (width)"}, ("x",)),
)  # fmt: skip
def modulated_layer_norm(x: Tensor, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalize rows, then scale and shift them by values that a network computes for each sample: adaLN.

        y = norm(x) · (1 + scale) + shift
        norm(x) = (x - mean(x)) / sqrt(var(x) + eps)                     (over the last dimension; var divides by width)

    x       (..., tokens, width)   any floating dtype
    scale   (..., width)           any floating dtype; one row for all tokens of a sample
    shift   (..., width)           any floating dtype; without it nothing is added
    eps     added to the variance, in the units of x²; > 0
    returns (..., tokens, width), dtype of x; computed in float32 (float64 for float64) and rounded once

    Raises ShapeError if scale or shift is not one row a sample, DtypeError for integers, OptionError for eps ≤ 0.
    Peebles & Xie 2023, arXiv:2212.09748; Ba, Kiros & Hinton 2016, arXiv:1607.06450.
    """
    wide = accumulator(x.dtype)
    row = x.to(wide)
    centered = row - row.mean(-1, keepdim=True)
    # Not · rsqrt(…), as in layer_norm.
    y = centered / torch.sqrt(centered.square().mean(-1, keepdim=True) + eps)
    y = y * (1.0 + scale.to(wide).unsqueeze(-2))
    return (y if shift is None else y + shift.to(wide).unsqueeze(-2)).to(x.dtype)
