# SPDX-License-Identifier: Apache-2.0
"""Residual streams and attention over depth."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_core import ops


class HyperConnection(nn.Module):
    """Mix residual streams around one layer; see `project_streams`, `sinkhorn`, `mix_streams` and `merge_streams`.

    `module(x)` returns the input of the layer, post and res. Then `merge_streams(x, layer(input), post, res)` is the
    next x. The parameters are those of DeepSeek V4.

    hidden_size    number of columns of a stream
    streams        number of streams
    iterations     of `sinkhorn`, which makes res doubly stochastic
    eps            of `sinkhorn`, also added to the coefficients by which streams are mixed
    norm_eps       added to the mean square of the streams before they are projected
    device, dtype  of the parameters

    x        (..., streams, hidden_size)
    returns  (..., hidden_size), (..., streams) and (..., streams, streams)

    fn     ((2 + streams) · streams, streams · hidden_size)   projects the normed streams; normal(0, 0.02) at first
    base   ((2 + streams) · streams,)   added to the logits; 0 at first
    scale  (3,)   factors of the logits of pre, post and res; 1 at first

    Example:

        >>> connection, layer, x = nn.HyperConnection(64), torch.nn.Linear(64, 64), torch.randn(2, 9, 4, 64)
        >>> y, post, res = connection(x)
        >>> merge_streams(x, layer(y), post, res).shape
        torch.Size([2, 9, 4, 64])

    Xie et al. 2025, arXiv:2512.24880.
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
        self.streams, self.iterations, self.eps, self.norm_eps = streams, iterations, eps, norm_eps
        count = (2 + streams) * streams
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fn = nn.Parameter(torch.empty(count, streams * hidden_size, **factory))
        self.base = nn.Parameter(torch.empty(count, **factory))
        self.scale = nn.Parameter(torch.empty(3, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=0.02)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.streams
        sizes = [n, n, n * n]
        logits = ops.project_streams(x, self.fn, self.norm_eps)
        # The logits are in float32, or in float64 if the streams are.
        factors, base = self.scale.to(logits.dtype).unbind(), self.base.to(logits.dtype).split(sizes)
        pre, post, res = (p * s + b for p, s, b in zip(logits.split(sizes, -1), factors, base, strict=True))
        # Rows of the projected matrix are source streams; rows of res are destination streams.
        res = ops.sinkhorn(res.unflatten(-1, (n, n)), self.iterations, self.eps).mT
        return ops.mix_streams(x, pre.sigmoid() + self.eps), 2 * post.sigmoid(), res


class AttentionResidual(nn.Module):
    """Attend over the outputs of earlier layers with a query of its own; see `attention_residual`.

    width               size of the last dimension of the layers
    eps                 added to the mean square in the norm of the keys
    elementwise_affine  False for no weight
    device, dtype       of the parameters

    layers   (depth, ..., width)   the outputs of earlier layers, stacked
    returns  (..., width)
    query    (width,)   0 at first, which gives all layers the same share
    weight   (width,)   of the norm of the keys; 1 at first

    Example:

        >>> attend, outputs = nn.AttentionResidual(64), [torch.randn(2, 9, 64) for _ in range(3)]
        >>> attend(torch.stack(outputs)).shape
        torch.Size([2, 9, 64])
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
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, layers: Tensor) -> Tensor:
        return ops.attention_residual(layers, self.query, self.weight, self.eps)
