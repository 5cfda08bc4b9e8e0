# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at best, measured in the run whose results are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from liger_bench.bench.timing import time_call
from liger_core.op import Product, Work


@dataclass(frozen=True)
class Limits:
    """Bytes a second of a copy (read and written) and floating-point operations a second of a matrix product.

    measured  gives the seconds of one product; by default that is its operations over the rate
    """

    bandwidth: float
    rate: float
    measured: Callable[[Product], float] | None = None

    def seconds(self, size: int, operations: int) -> float:
        """The least time for that much work."""
        return max(size / self.bandwidth, operations / self.rate)

    def product_seconds(self, product: Product) -> float:
        """The time of one product alone."""
        if self.measured is None:
            return 2 * product.rows * product.inner * product.columns / self.rate
        # The same product may be needed for another gradient elsewhere.
        return self.measured(product._replace(gradient=""))

    def least_seconds(self, work: Work, trained: Collection[str] = ()) -> dict[str, float]:
        """Pass → the least seconds it can take, for the passes whose work is defined; trained arguments get a gradient."""
        forward = self._least(work.forward_bytes, work.forward_flops, work.forward_products)
        wanted = tuple(p for p in work.full_products if not p.gradient or p.gradient in trained)
        return {
            "forward": forward,
            "evaluation": forward,
            "full": self._least(work.full_bytes, work.full_flops, wanted),
        }

    def _least(self, size: int, operations: int, products: tuple[Product, ...]) -> float:
        if not products:
            return self.seconds(size, operations)
        return max(size / self.bandwidth, sum(self.product_seconds(p) for p in products))


def measure_limits(device: torch.device, dtype: torch.dtype, seconds: float) -> Limits:
    """Measure them, products each shape once; the sizes are far above any cache, and large enough for a product at full rate."""

    @cache
    def measured(product: Product) -> float:
        return _product_seconds(product, device, dtype, seconds)

    return Limits(_bandwidth(device, seconds), _rate(device, dtype, seconds), measured)


def _bandwidth(device: torch.device, seconds: float) -> float:
    size = (256 << 20) if device.type == "cpu" else (1 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (time_call(lambda: target.copy_(source), device, seconds).median_ms / 1e3)


def _rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    width = 1024 if device.type == "cpu" else 8192
    return 2 * width**3 / _product_seconds(Product(width, width, width), device, dtype, seconds)


def _product_seconds(product: Product, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    left = _operand(product.rows, product.inner, product.transposed == "left", device, dtype)
    right = _operand(product.inner, product.columns, product.transposed == "right", device, dtype)
    out = torch.empty(product.rows, product.columns, device=device, dtype=dtype)
    return time_call(lambda: torch.mm(left, right, out=out), device, seconds).median_ms / 1e3


def _operand(rows: int, columns: int, transposed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    if transposed:
        return torch.randn(columns, rows, device=device, dtype=dtype).t()
    return torch.randn(rows, columns, device=device, dtype=dtype)
