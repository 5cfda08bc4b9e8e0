# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding."""

import torch
from torch import Tensor, nn

from liger_core.errors import OptionError


class RotaryEmbedding(nn.Module):
    """Compute the cos and sin that `rope` and `qk_norm_rope` take, as Llama does in Transformers.

    rotary       number of columns that are rotated, even
    base         base of the frequencies base^(-2i / rotary)
    interleaved  True if neighboring columns are a pair, False if a pair has a column of each half

    x             any tensor; the results have its dtype
    position_ids  (batch, tokens)
    returns       cos and sin, (batch, tokens, rotary); the angles are computed in float32

    The module has no parameters and no buffers.

    Example:

        >>> q, k = torch.randn(1, 4, 9, 64), torch.randn(1, 2, 9, 64)
        >>> cos, sin = nn.RotaryEmbedding(64)(q, torch.arange(9)[None])
        >>> q, k = rope(q, k, cos, sin)
    """

    def __init__(self, rotary: int, base: float = 10000.0, *, interleaved: bool = False) -> None:
        super().__init__()
        if rotary % 2 or rotary <= 0:
            raise OptionError(f"RotaryEmbedding: rotary must be even and > 0, got {rotary}")
        self.rotary, self.base, self.interleaved = rotary, base, interleaved

    def extra_repr(self) -> str:
        return f"{self.rotary}, base={self.base}, interleaved={self.interleaved}"

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # float32: bfloat16 has no 257. Not a buffer: `module.bfloat16()` would round it.
        frequencies = self.base ** (-torch.arange(0, self.rotary, 2, device=position_ids.device).float() / self.rotary)
        angle = position_ids[..., None].float() * frequencies
        angle = angle.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
