# SPDX-License-Identifier: Apache-2.0
"""Residual streams and attention over depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_core import ops


class HyperConnection(nn.Module):
    """Hyper-connections around one layer, `module(x)` → (input of the layer, post, res) for streams x (..., streams, hidden_size).

    With them `merge_streams(x, layer(input), post, res)` is the next x. Weights are those of DeepSeek V4: `fn` projects the normalized
    streams, `base` is added and `scale` multiplies, for pre, post and res. Xie et al. 2025, arXiv:2512.24880.
    """

    def __init__(
        self,
        hidden_size: int,
        streams: int = 4,
        *,
        iterations: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.streams, self.iterations, self.eps, self.norm_eps = hidden_size, streams, iterations, eps, norm_eps
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        count = (2 + streams) * streams
        self.fn = nn.Parameter(torch.empty(count, streams * hidden_size, **place))
        self.base = nn.Parameter(torch.empty(count, **place))
        self.scale = nn.Parameter(torch.empty(3, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=0.02)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.streams
        sizes = [n, n, n * n]
        logits = ops.project_streams(x, self.fn, self.norm_eps)
        # float32, or float64 of streams in float64.
        factors, base = self.scale.to(logits.dtype).unbind(), self.base.to(logits.dtype).split(sizes)
        pre, post, res = (p * s + b for p, s, b in zip(logits.split(sizes, -1), factors, base, strict=True))
        # The rows of the matrix that is projected are the streams that give, those of res the streams that receive.
        res = ops.sinkhorn(res.unflatten(-1, (n, n)), self.iterations, self.eps).mT
        return ops.mix_streams(x, pre.sigmoid() + self.eps), 2 * post.sigmoid(), res

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, streams={self.streams}, iterations={self.iterations}"


class AttentionResidual(nn.Module):
    """`attention_residual` with its query, which begins as zeros, so that all layers count alike, and the weight of its keys' norm."""

    weight: nn.Parameter | None

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.register_parameter("weight", nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, layers: Tensor) -> Tensor:
        return ops.attention_residual(layers, self.query, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.query.shape[0]}, eps={self.eps}"
