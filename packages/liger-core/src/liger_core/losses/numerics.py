# SPDX-License-Identifier: Apache-2.0
"""Ratios of probabilities, safe for any logarithms."""

from __future__ import annotations

import torch
from torch import Tensor

# float32 overflows at e⁸⁸, and inf · 0 is NaN in the gradient of whatever saturates.
LARGEST = 80.0


def bounded(log_ratio: Tensor) -> Tensor:
    """At most 80, with no gradient beyond."""
    return log_ratio.clamp(max=LARGEST)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """e^x with x at most 80."""
    return bounded(log_ratio).exp()


def weighted(weight: Tensor, log_prob: Tensor) -> Tensor:
    """weight · log_prob, and its limit 0 where the weight has vanished with the probability."""
    return torch.where(weight == 0.0, 0.0, weight * log_prob)
