# SPDX-License-Identifier: Apache-2.0
"""Random tensors for samples and workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_core.op import Workload

LONG = torch.int64
# The sizes over which the cost of an op is drawn: rows, widths, classes.
ROWS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
WIDTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CLASSES = (8192, 32000, 65536, 128256, 262144)


def normal(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Normally distributed values, drawn in float32 so that every dtype sees the same ones."""
    return (torch.randn(shape, device=device) * scale).to(dtype)


def integers(device: torch.device, high: int, *shape: int) -> Tensor:
    """Uniform class indices in [0, high)."""
    return torch.randint(high, shape, device=device, dtype=LONG)


def workload(make: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]], axis: str = "", quick: bool = False, **sizes: int) -> Workload:
    """A workload that is named by its sizes; with an axis, one of them, a point of the series over that size."""
    name = "x".join(str(size) for size in sizes.values())
    if not axis:
        return Workload(name, make, quick)
    return Workload(f"{name}-{axis}", make, quick, axis=(axis, sizes[axis]))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and statistics have: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
