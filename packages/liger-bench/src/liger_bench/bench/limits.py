# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at best, measured in the run whose results are compared with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_bench.bench.timing import time_call
from liger_core.op import Work


@dataclass(frozen=True)
class Limits:
    """Bytes a second of a copy (read and written) and floating-point operations a second of a matrix product."""

    bandwidth: float
    rate: float

    def seconds(self, size: int, operations: int) -> float:
        """The least time for that much work."""
        return max(size / self.bandwidth, operations / self.rate)

    def least_seconds(self, work: Work) -> dict[str, float]:
        """Pass → the least seconds it can take, for the passes whose work is defined."""
        return {
            "forward": self.seconds(work.forward_bytes, work.forward_flops),
            "full": self.seconds(work.full_bytes, work.full_flops),
        }


def measure_limits(device: torch.device, dtype: torch.dtype, seconds: float) -> Limits:
    """Measure both; the sizes are far above any cache, and large enough for a product at full rate."""
    return Limits(_bandwidth(device, seconds), _rate(device, dtype, seconds))


def _bandwidth(device: torch.device, seconds: float) -> float:
    size = (256 << 20) if device.type == "cpu" else (1 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (time_call(lambda: target.copy_(source), device, seconds).median_ms / 1e3)


def _rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    width = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    return 2 * width**3 / (time_call(lambda: a @ b, device, seconds).median_ms / 1e3)
