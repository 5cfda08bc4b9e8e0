# SPDX-License-Identifier: Apache-2.0
"""Ratios of probabilities, safe for any logarithms."""

import torch
from torch import Tensor

# float32 overflows at e⁸⁸, where the gradient of a saturated function is inf · 0, which is NaN.
LARGEST = 80.0


def bounded(log_ratio: Tensor) -> Tensor:
    """Return a logarithm cut at 80, with no gradient beyond."""
    return log_ratio.clamp(max=LARGEST)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return e^x with x cut at 80."""
    return bounded(log_ratio).exp()


def weighted(weight: Tensor, log_prob: Tensor) -> Tensor:
    """Return weight · log_prob, and its limit 0 where the weight has vanished with the probability."""
    return torch.where(weight == 0.0, 0.0, weight * log_prob)
