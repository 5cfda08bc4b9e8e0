# SPDX-License-Identifier: Apache-2.0
"""Random tensors for samples and workloads."""

from __future__ import annotations

import torch
from torch import Tensor

LONG = torch.int64


def normal(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Normally distributed values, drawn in float32 so that every dtype sees the same ones."""
    return (torch.randn(shape, device=device) * scale).to(dtype)


def integers(device: torch.device, high: int, *shape: int) -> Tensor:
    """Uniform class indices in [0, high)."""
    return torch.randint(high, shape, device=device, dtype=LONG)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and statistics have: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
