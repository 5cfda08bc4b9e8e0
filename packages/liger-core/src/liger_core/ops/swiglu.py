# SPDX-License-Identifier: Apache-2.0
"""swiglu: a linear unit gated by SiLU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core.op import Misuse, Work, op
from liger_core.ops import _gated


def check(gate: Tensor, up: Tensor | None = None, *, overwrite: bool = False) -> None:
    _gated.check("swiglu", gate, up)


def misuses(device: torch.device) -> Iterator[Misuse]:
    return _gated.misuses("swiglu", device)


def work(gate: Tensor, up: Tensor | None = None, *, overwrite: bool = False) -> Work:
    return _gated.work(gate, up)


@op(check=check, samples=_gated.samples, misuses=misuses, workloads=_gated.workloads, work=work, layout=_gated.layout)
def swiglu(gate: Tensor, up: Tensor | None = None, *, overwrite: bool = False) -> Tensor:
    """Gate one linear map of the input by the SiLU of another.

        y = gate · sigmoid(gate) · up

    gate    (..., width)   any floating dtype; or (..., 2·width) packed, gate first, when up is None
    up      (..., width)   shape and dtype of gate
    overwrite              no other code needs gate and up: a backward pass that frees its graph may write their gradients over them, which
                           saves their size (a kept graph leaves them as they are)
    returns (..., width), dtype of gate; a fused backend keeps only the inputs for the backward pass

    Raises ShapeError if the shapes differ or a packed width is odd, DtypeError if the dtypes differ.
    Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = _gated.halves(gate, up)
    return F.silu(gate) * up
