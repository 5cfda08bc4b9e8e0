# SPDX-License-Identifier: Apache-2.0
"""geglu: a linear unit gated by GELU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.op import Misuse, Sample, op
from liger_core.ops import _gated

Approximate = Literal["tanh", "none"]


def check(
    gate: Tensor, up: Tensor | None = None, *, approximate: Approximate = "tanh", overwrite: bool = False
) -> None:
    _gated.check("geglu", gate, up)
    checks.choice("geglu", "approximate", approximate, ("tanh", "none"))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _gated.samples(device, dtype)
    for sample in _gated.samples(device, dtype):
        if sample.name in ("odd_width", "packed", "large_values"):
            yield replace(sample, name=f"{sample.name}_erf", kwargs={"approximate": "none"}, why="the exact GELU")


def misuses(device: torch.device) -> Iterator[Misuse]:
    yield from _gated.misuses("geglu", device)
    x = torch.zeros(2, 4, device=device)
    yield Misuse(
        "approximate",
        (x, x),
        {"approximate": "erf"},
        OptionError,
        "geglu: approximate must be one of 'tanh', 'none', got 'erf'",
    )


@op(
    check=check, samples=samples, misuses=misuses, workloads=_gated.workloads, work=_gated.work, layout=_gated.layout,
    dtypes=_gated.DTYPES,
)  # fmt: skip
def geglu(
    gate: Tensor, up: Tensor | None = None, *, approximate: Approximate = "tanh", overwrite: bool = False
) -> Tensor:
    """Gate one linear map of the input by the GELU of another.

        y = gelu(gate) · up
        gelu(g) = g/2 · (1 + erf(g/√2))                                      approximate="none"
        gelu(g) = g/2 · (1 + tanh(√(2/π) · (g + 0.044715·g³)))               approximate="tanh"

    gate    (..., width)   any floating dtype; or (..., 2·width) packed, gate first, when up is None
    up      (..., width)   shape and dtype of gate; under autocast both get the wider of their dtypes
    approximate            "tanh" or "none", the formulas above
    overwrite              set this if no other code needs gate and up: a backward pass that frees its graph may write
                           their gradients over them, which saves their size (a kept graph leaves them as they are)
    returns (..., width), dtype of gate; a fused backend keeps only the inputs for the backward pass

    Raises ShapeError if the shapes differ or a packed width is odd, DtypeError if the dtypes differ, OptionError for
    another approximation. Shazeer 2020, arXiv:2002.05202; Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """
    gate, up = _gated.halves(gate, up)
    return F.gelu(gate, approximate=approximate) * up
