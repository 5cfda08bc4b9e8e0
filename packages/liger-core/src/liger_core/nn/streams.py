# SPDX-License-Identifier: Apache-2.0
"""Residual streams and attention over depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_core import ops
from liger_core.nn.module import Module, check_size, check_switches, meta


class HyperConnection(Module):
    """Hyper-connections around one layer, `module(x)` → (input of the layer, post, res) for streams x (..., streams, hidden_size).

    hidden_size    columns of a stream
    streams        their number
    iterations     of `sinkhorn`, which makes res doubly stochastic; ≥ 1
    eps            of `sinkhorn`, also added to the coefficients by which streams are mixed; > 0
    norm_eps       added to the mean square of the streams before they are projected; > 0
    device, dtype  of the parameters

    fn     ((2 + streams) · streams, streams · hidden_size)  projects the normalized streams; normal with deviation 0.02 at first
    base   ((2 + streams) · streams,)  is added; 0 at first
    scale  (3,)  multiplies, for pre, post and res; 1 at first

    `merge_streams(x, layer(input), post, res)` is the next x. The parameters are those of DeepSeek V4. Xie et al. 2025, arXiv:2512.24880.
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
        super().__init__(hidden_size=hidden_size, streams=streams, iterations=iterations, eps=eps, norm_eps=norm_eps)
        check_size(self, hidden_size=hidden_size, streams=streams)
        ops.sinkhorn.check(meta(streams, streams), iterations, eps)
        count = (2 + streams) * streams
        ops.project_streams.check(meta(1, streams, hidden_size), meta(count, streams * hidden_size), norm_eps)
        self.hidden_size, self.streams, self.iterations, self.eps, self.norm_eps = hidden_size, streams, iterations, eps, norm_eps
        place: dict[str, Any] = {"device": device, "dtype": dtype}
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


class AttentionResidual(Module):
    """Attention over the outputs of earlier layers, with a query of its own; see `attention_residual`.

    width               columns of a row, the size of its last dimension
    eps                 added to the mean square in the norm of the keys; > 0
    elementwise_affine  False for no weight
    device, dtype       of the parameters

    query   (width,)  0 at first, so that all layers count alike
    weight  (width,)  of the norm of the keys; 1 at first

    The call takes layers (depth, ..., width), stacked, and returns (..., width).
    """

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
        super().__init__(width=width, eps=eps, elementwise_affine=elementwise_affine)
        check_size(self, width=width)
        check_switches(self, elementwise_affine=elementwise_affine)
        ops.attention_residual.check(meta(1, 1, width), meta(width), eps=eps)
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
