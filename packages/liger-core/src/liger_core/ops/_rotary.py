# SPDX-License-Identifier: Apache-2.0
"""The parts that rope and qk_norm_rope share: checks of queries, keys and angles, usual angles, dimension names."""

import functools
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import ShapeError
from liger_core.op import Dtypes, Workload
from liger_core.ops._inputs import normal, sample_table

HEADS, TABLE = "batch heads tokens (width)", "batch tokens (width)"
DTYPES = Dtypes((("q", "k"), ("cos", "sin")))

rotary_table = functools.partial(sample_table, constants=("cos", "sin"))


def check_rotary(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Check that queries and keys match and that the angles are for their tokens."""
    checks.floating(op, 4, q=q, k=k, cos=cos, sin=sin)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            checks.misshapen(op, f"{name} must have shape (batch, heads, tokens, width)", tensor)
    batch, _, tokens, width = q.shape
    of_batch, _, of_tokens, of_width = k.shape
    if of_batch != batch or of_tokens != tokens or of_width != width:
        checks.mismatch(op, "k", k, f"({batch}, heads, {tokens}, {width})", "q", q)
    dimensions = cos.dim()
    rotary = cos.size(-1) if dimensions else 0
    if dimensions not in (2, 3) or cos.size(-2) != tokens or (dimensions == 3 and cos.size(0) not in (1, batch)):
        # With a single sample, two of these shapes are the same.
        *shapes, last = dict.fromkeys((f"({tokens}, rotary)", f"(1, {tokens}, rotary)", f"({batch}, {tokens}, rotary)"))
        checks.mismatch(op, "cos", cos, f"{', '.join(shapes)} or {last}", "q", q)
    if rotary % 2 or rotary > width or rotary == 0:
        wanted = f"even and at most {width}, the width of q"
        checks.fail(ShapeError, op, f"the rotary width of cos must be {wanted}, got {rotary}")
    if sin.shape != cos.shape:
        checks.unlike(op, "sin", sin, "cos", cos)


def heads_of_tokens(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return (batch, heads, tokens, width) views of (batch, tokens, heads, width)."""
    return q.transpose(1, 2), k.transpose(1, 2)


def angles(
    device: torch.device, dtype: torch.dtype, tokens: int, rotary: int, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (tokens, rotary) of the usual frequencies; each angle appears twice."""
    frequency = 10000.0 ** (-torch.arange(0, rotary, 2, device=device, dtype=torch.float32) / rotary)
    angle = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequency
    angle = angle.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def workload(
    norms: int, batch: int, tokens: int, heads: int, key_heads: int, width: int, axis: str = "", quick: bool = False
) -> Workload:
    """Return a workload of queries, keys and angles, with the weights of so many norms; the axis is "T" or "heads"."""

    def make(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        q = normal(device, dtype, batch, tokens, heads, width)
        k = normal(device, dtype, batch, tokens, key_heads, width)
        weights = [normal(device, dtype, width) for _ in range(norms)]
        return (*heads_of_tokens(q, k), *weights, *angles(device, dtype, tokens, width)), {}

    name = f"{batch}x{tokens}x{heads}+{key_heads}x{width}"
    if not axis:
        return Workload(name, make, quick)
    return Workload(f"{name}-{axis}", make, quick, axis=(axis, tokens if axis == "T" else heads))
