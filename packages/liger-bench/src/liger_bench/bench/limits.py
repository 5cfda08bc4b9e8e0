# SPDX-License-Identifier: Apache-2.0
"""The roofline of the machine, measured in the run whose results are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_bench.bench.timing import time_call
from liger_core.op import Product, Work

# A matmul at full power lowers the clocks within this time, as it does in a training step.
WARM_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """The copy bandwidth in bytes per second (read and written), and the floating-point operations per second of a
    large matmul.

    measured  gives the seconds of a matmul; by default, its operations divided by the rate
    copied    gives the seconds of a copy of that many bytes; by default, the bytes divided by the bandwidth
    """

    bandwidth: float
    rate: float
    measured: Callable[[Product], float] | None = None
    copied: Callable[[int], float] | None = None

    def seconds(self, size: int, operations: int) -> float:
        """The least time for that much work."""
        return max(size / self.bandwidth, operations / self.rate)

    def product_seconds(self, product: Product) -> float:
        """The time of one matmul alone, measured at each call."""
        if self.measured is None:
            return 2 * product.rows * product.inner * product.columns / self.rate
        return self.measured(product)

    def copy_seconds(self, work: Work) -> dict[str, float]:
        """Pass → the seconds of a plain copy that moves as many bytes, for work that is bound by memory.

        A short copy does not reach the bandwidth of a long one, and no kernel that moves as little can be expected to.
        """
        if work.full_products:
            return {}
        sizes = {"forward": work.forward_bytes, "evaluation": work.forward_bytes, "full": work.full_bytes}
        taken = {
            size: size / self.bandwidth if self.copied is None else self.copied(size) for size in set(sizes.values())
        }
        return {name: taken[size] for name, size in sizes.items()}

    def least_seconds(self, work: Work, trained: Collection[str] = ()) -> dict[str, float]:
        """The least seconds that each pass can take, where its work is defined; trained arguments get a gradient."""
        wanted = tuple(p for p in work.full_products if not p.gradient or p.gradient in trained)
        # A matmul of both passes is measured once: the time of a pass is the sum of the times of its matmuls.
        taken = {p: self.product_seconds(p) for p in dict.fromkeys((*work.forward_products, *wanted))}
        forward = self._least(work.forward_bytes, work.forward_flops, [taken[p] for p in work.forward_products])
        return {
            "forward": forward,
            "evaluation": forward,
            "full": self._least(work.full_bytes, work.full_flops, [taken[p] for p in wanted]),
        }

    def _least(self, size: int, operations: int, products: list[float]) -> float:
        return max(size / self.bandwidth, sum(products)) if products else self.seconds(size, operations)


def measure_limits(device: torch.device, dtype: torch.dtype, seconds: float) -> Limits:
    """Measure them; the sizes are far above any cache, and large enough for matmuls at full rate."""

    def measured(product: Product) -> float:
        return _product_seconds(product, device, dtype, 0.0)

    def copied(size: int) -> float:
        return _copy_seconds(size // 2, device, seconds / 5)

    return Limits(_bandwidth(device, seconds), _rate(device, dtype, seconds), measured, copied)


def _bandwidth(device: torch.device, seconds: float) -> float:
    size = (256 << 20) if device.type == "cpu" else (1 << 30)
    return 2 * size / _copy_seconds(size, device, seconds)


def _copy_seconds(size: int, device: torch.device, seconds: float) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return time_call(lambda: target.copy_(source), device, seconds).median_ms / 1e3


def _rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    width = 1024 if device.type == "cpu" else 8192
    return 2 * width**3 / _product_seconds(Product(width, width, width), device, dtype, seconds)


def _product_seconds(product: Product, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    left = _operand(product.rows, product.inner, product.transposed == "left", device, dtype)
    right = _operand(product.inner, product.columns, product.transposed == "right", device, dtype)
    out = torch.empty(product.rows, product.columns, device=device, dtype=dtype)
    return (
        time_call(lambda: torch.mm(left, right, out=out), device, seconds, least=3, warm=WARM_SECONDS).median_ms / 1e3
    )


def _operand(rows: int, columns: int, transposed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    if transposed:
        return torch.randn(columns, rows, device=device, dtype=dtype).t()
    return torch.randn(rows, columns, device=device, dtype=dtype)
