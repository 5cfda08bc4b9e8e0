# SPDX-License-Identifier: Apache-2.0
"""The language-model head fused with a loss of its logits, or with log-probabilities."""

from typing import Any

from torch import Tensor, nn

from liger_core import ops


class _Head(nn.Module):
    """A module without weights that holds the options of its op, which checks them in each call."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyLoss(_Head):
    """Compute the cross entropy of a head's logits without holding them all; see `linear_cross_entropy`.

    options  those of `linear_cross_entropy`, such as ignore_index, label_smoothing, softcap, reduction and budget
    hidden   (..., H)   any floating dtype
    weight   (V, H)     the weight of the head
    target   (...)      int64 class indices, or ignore_index
    call     further arguments of the op, such as bias and normalizer; they take precedence over the options
    returns  float32: a scalar, or (...) for reduction="none"

    Example:

        >>> head, loss = torch.nn.Linear(64, 1000, bias=False), nn.LinearCrossEntropyLoss(softcap=30.0)
        >>> loss(torch.randn(9, 64), head.weight, torch.randint(1000, (9,))).shape
        torch.Size([])
    """

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, **call: Any) -> Any:
        return ops.linear_cross_entropy(hidden, weight, target, **self.options | call)


class LogProb(_Head):
    """Compute the log-probabilities of targets under a head without holding all logits; see `linear_log_prob`.

    options  those of `linear_log_prob`, such as temperature, ignore_index and return_entropy
    hidden   (..., H)   any floating dtype
    weight   (V, H)     the weight of the head
    target   (...) or (..., K)   int64 class indices, one or several a row, or ignore_index
    call     further arguments of the op, such as bias and allowed; they take precedence over the options
    returns  float32, the shape of target; with return_entropy also the entropy

    Example:

        >>> head, log_prob = torch.nn.Linear(64, 1000, bias=False), nn.LogProb(temperature=0.7)
        >>> log_prob(torch.randn(2, 9, 64), head.weight, torch.randint(1000, (2, 9))).shape
        torch.Size([2, 9])
    """

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, **call: Any) -> Any:
        return ops.linear_log_prob(hidden, weight, target, **self.options | call)
