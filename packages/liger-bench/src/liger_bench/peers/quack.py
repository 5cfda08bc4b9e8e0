# SPDX-License-Identifier: Apache-2.0
"""quack-kernels 0.6.5, written in CuTe.

Its layer_norm has no backward pass of its own, and it has no separate gated activation.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from liger_bench.peers import Peer, by_name, missing
from liger_core.errors import Unsupported


def unavailable(device: torch.device) -> str | None:
    reason = missing("quack", "quack-kernels==0.6.5")
    return reason or ("its kernels need a CUDA GPU" if device.type != "cuda" else None)


def peers() -> list[Peer]:
    quack = importlib.import_module("quack")
    linear = importlib.import_module("quack.linear_cross_entropy")
    rotary = importlib.import_module("quack.rotary")

    def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0) -> Any:
        return quack.rmsnorm(x, weight, eps=eps, weight_offset=weight_offset)

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0
    ) -> Any:
        return quack.rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=weight_offset)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Any:
        if interleaved or cos.dim() != 2:
            raise Unsupported("it is called with one table of halves here")
        # It takes (batch, tokens, heads, width), one tensor per call, and each angle once.
        half = cos.shape[-1] // 2
        cos, sin = cos[:, :half], sin[:, :half]
        return tuple(rotary.apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))

    def cross_entropy(
        logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> Any:
        return quack.cross_entropy(
            logits, target, weight=weight, ignore_index=ignore_index, reduction=reduction, inplace_backward=True
        )

    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean"
    ) -> Any:
        return linear.chunked_linear_cross_entropy(
            hidden, weight, target, chunk_size=4096, ignore_index=ignore_index, reduction=reduction
        )

    calls = by_name(rms_norm, add_rms_norm, rope, cross_entropy, linear_cross_entropy)
    return [Peer("quack", calls, {"cross_entropy": ("logits",)})]
