# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own fused functions, except layer_norm, which `eager` already calls."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_bench.peers import Peer


def peers() -> list[Peer]:
    calls: dict[str, Any] = {"rms_norm": rms_norm, "cross_entropy": cross_entropy}
    if hasattr(F, "linear_cross_entropy"):
        calls["linear_cross_entropy"] = linear_cross_entropy
        whole = Peer("torch", calls)
        return [whole, Peer("torch chunked", {"linear_cross_entropy": chunked_linear_cross_entropy}, consumes=True)]
    return [Peer("torch", calls)]


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), **options, reduction=reduction)
    return loss.view(target.shape) if reduction == "none" else loss


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Compute all logits at once."""
    options: dict[str, Any] = {"linear_bias": bias, "weight": class_weight, "label_smoothing": label_smoothing}
    return F.linear_cross_entropy(hidden, weight, target, **options, ignore_index=ignore_index, reduction=reduction)


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Compute the logits in chunks, with the default options of PyTorch's chunked variant."""
    options: dict[str, Any] = {
        "linear_bias": bias,
        "label_smoothing": label_smoothing,
        "options": torch.nn.LinearCrossEntropyOptions(),
    }
    return F.linear_cross_entropy(hidden, weight, target, **options, ignore_index=ignore_index, reduction=reduction)
