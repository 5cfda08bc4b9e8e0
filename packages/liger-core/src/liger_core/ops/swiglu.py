# SPDX-License-Identifier: Apache-2.0
"""swiglu: a linear unit gated by SiLU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.op import Misuse, Sample, accumulator, op
from liger_core.ops import _gated
from liger_core.ops._inputs import misuses_of, normals, sample_table


def check(
    gate: Tensor, up: Tensor | None = None, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0,
    gate_scale: float = 1.0, scale: float = 1.0, overwrite: bool = False,
) -> None:  # fmt: skip
    _gated.check("swiglu", gate, up)
    if limit is not None:
        checks.positive("swiglu", "limit", limit)
    checks.finite("swiglu", "alpha", alpha)
    checks.finite("swiglu", "shift", shift)
    checks.finite("swiglu", "gate_scale", gate_scale)
    checks.finite("swiglu", "scale", scale)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    yield from _gated.samples(device, dtype)
    gpt_oss = {"limit": 1.0, "alpha": 1.702, "shift": 1.0}
    yield from sample_table(
        ("limited", (n(5, 101), n(5, 101)), {"limit": 1.0}, "the gate is clipped from above, up on both sides"),
        ("gpt_oss", (n(5, 101), n(5, 101)), gpt_oss, "a steeper sigmoid, and up + 1"),
        ("gpt_oss_packed", (n(4, 3, 2 * 77),), gpt_oss, "the same of halves of one tensor"),
        ("limited_frozen_gate", (n(4, 40), n(4, 40)), gpt_oss, "up's gradient alone is cut at the limit", "gate"),
        ("multipliers", (n(5, 101), n(5, 101)), {"gate_scale": 0.37, "scale": -2.5},
         "Falcon-H1 scales the gate and the result"),
        ("scaled_limit", (n(5, 64), n(5, 64)), {"gate_scale": 3.0, "limit": 1.5}, "the limit is of the scaled gate"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    yield from _gated.misuses("swiglu", device)
    misuse, x = misuses_of("swiglu"), torch.zeros(2, 4, device=device)
    yield misuse("limit", (x, x), OptionError, "limit must be a finite number > 0, got 0", limit=0)
    yield misuse("scale", (x, x), OptionError, "scale must be a finite number, got nan", scale=float("nan"))
    yield misuse("gate_scale", (x, x), OptionError, "gate_scale must be a finite number, got '2'", gate_scale="2")


@op(
    check=check, samples=samples, misuses=misuses, workloads=_gated.workloads, work=_gated.work, layout=_gated.layout,
    dtypes=_gated.DTYPES,
)  # fmt: skip
def swiglu(
    gate: Tensor, up: Tensor | None = None, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0,
    gate_scale: float = 1.0, scale: float = 1.0, overwrite: bool = False,
) -> Tensor:  # fmt: skip
    """Gate one linear map of the input by the SiLU of another.

        y = g · sigmoid(alpha · g) · (clamp(up, -limit, limit) + shift) · scale
        g = min(gate_scale · gate, limit)

    gate    (..., width)   any floating dtype; or (..., 2·width) packed, gate first, when up is None
    up      (..., width)   shape and dtype of gate; under autocast both get the wider of their dtypes
    limit                  no limit by default; gpt-oss and MiniMax have limit=7.0, alpha=1.702, shift=1.0
    gate_scale, scale      Falcon-H1 calls them the gate and down multipliers
    overwrite              set this if no other code needs gate and up: a backward pass that frees its graph may write
                           their gradients over them, which saves their size (a kept graph leaves them as they are)
    returns (..., width), dtype of gate; a fused backend keeps only the inputs for the backward pass

    Raises ShapeError if the shapes differ or a packed width is odd, DtypeError if the dtypes differ, OptionError for a
    limit ≤ 0 and numbers that are not finite. Shazeer 2020, arXiv:2002.05202.
    """
    first, second = _gated.halves(gate, up)
    if (limit, alpha, shift, gate_scale, scale) == (None, 1.0, 0.0, 1.0, 1.0):
        return _gated.joined_gate(first, second)
    wide = accumulator(gate.dtype)
    return (_gated.joined_gate(first.to(wide) * gate_scale, second.to(wide), "silu", limit, alpha, shift) * scale).to(
        gate.dtype
    )
