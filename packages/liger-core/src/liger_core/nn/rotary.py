# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings, and the queries and keys that they rotate."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_core import checks, ops
from liger_core.errors import OptionError
from liger_core.nn.module import Module, check_size, check_switches
from liger_core.nn.norms import Norm, RMSNorm
from liger_core.ops._norm import Cast


class QKNormRoPE(Module):
    """Queries and keys normalized by `q_norm` and `k_norm`, as Transformers calls them, and rotated; see `qk_norm_rope`.

    width                     of a head
    eps, weight_offset, cast  those of the two norms, which are `RMSNorm`s with a weight (width,)
    interleaved               pairs are neighboring columns (True), or a column of each half (False)
    device, dtype             of the parameters

    The call takes q (batch, heads, tokens, width), k (batch, key_heads, tokens, width) and the cos and sin of `RotaryEmbedding`, and
    returns queries and keys.
    """

    q_norm: Norm
    k_norm: Norm

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        cast: Cast = "input",
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width=width, eps=eps, weight_offset=weight_offset, cast=cast, interleaved=interleaved)
        check_size(self, width=width)
        check_switches(self, interleaved=interleaved)
        for name in ("q_norm", "k_norm"):
            self.add_module(name, RMSNorm(width, eps, weight_offset=weight_offset, cast=cast, device=device, dtype=dtype))
        self.interleaved = interleaved

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.q_norm
        return ops.qk_norm_rope(
            q, k, norm.weight, self.k_norm.weight, cos, sin, norm.eps, interleaved=self.interleaved, **norm.options
        )  # fmt: skip


class RotaryEmbedding(Module):
    """The cos and sin that `rope` takes: `module(x, position_ids)` has the dtype of x, as in Transformers, and no entry in the `state_dict`.

    rotary       the number of columns that are rotated, even
    base         of the frequencies base^(-2i / rotary)
    interleaved  neighboring columns are a pair

    The call returns cos and sin, (batch, tokens, rotary) for position_ids (batch, tokens).
    """

    def __init__(self, rotary: int, base: float = 10000.0, *, interleaved: bool = False) -> None:
        super().__init__(rotary=rotary, base=base, interleaved=interleaved)
        checks.integer("RotaryEmbedding", "rotary", rotary)
        if rotary % 2 or rotary <= 0:
            raise OptionError(f"RotaryEmbedding: rotary must be even and > 0, got {rotary}")
        checks.positive("RotaryEmbedding", "base", base)
        check_switches(self, interleaved=interleaved)
        self.rotary, self.base, self.interleaved = rotary, base, interleaved

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # float32: bfloat16 has no 257th position. No buffer, which `module.bfloat16()` would round.
        frequencies = self.base ** (-torch.arange(0, self.rotary, 2, device=position_ids.device).float() / self.rotary)
        angle = position_ids[..., None].float() * frequencies
        angle = angle.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
