# SPDX-License-Identifier: Apache-2.0
"""The roofline of the machine, measured in the same run as the results."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_bench.bench.timing import time_call
from liger_core.op import Product, Work

# At full power, matmuls lower the clocks within this time, as they do in a training step.
WARM_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """The limits of a machine.

    bandwidth  the bytes per second of a large copy, read and written
    rate       the floating-point operations per second of a large matmul
    measured   returns the seconds of a matmul, measured in each call
    copied     returns the seconds of a copy of that many bytes
    """

    bandwidth: float
    rate: float
    measured: Callable[[Product], float]
    copied: Callable[[int], float]

    def copy_seconds(self, work: Work) -> dict[str, float]:
        """Return, for each pass of memory-bound work, the seconds of a plain copy of as many bytes.

        A short copy does not reach the bandwidth of a long one, so a kernel that moves as few bytes cannot either.
        """
        if work.full_products:
            return {}
        sizes = {"forward": work.forward_bytes, "evaluation": work.forward_bytes, "full": work.full_bytes}
        taken = {size: self.copied(size) for size in set(sizes.values())}
        return {name: taken[size] for name, size in sizes.items()}

    def least_seconds(self, work: Work, trained: Collection[str] = ()) -> dict[str, float]:
        """Return the least seconds of each pass whose work is defined; trained arguments get a gradient."""
        wanted = tuple(p for p in work.full_products if not p.gradient or p.gradient in trained)
        # A matmul that is in both passes is measured once.
        taken = {p: self.measured(p) for p in dict.fromkeys((*work.forward_products, *wanted))}
        forward = self._least(work.forward_bytes, work.forward_flops, [taken[p] for p in work.forward_products])
        full = self._least(work.full_bytes, work.full_flops, [taken[p] for p in wanted])
        return {"forward": forward, "evaluation": forward, "full": full}

    def _least(self, size: int, operations: int, products: list[float]) -> float:
        return max(size / self.bandwidth, sum(products) if products else operations / self.rate)


def measure_limits(device: torch.device, dtype: torch.dtype, seconds: float) -> Limits:
    """Measure the limits with sizes far above any cache, at which matmuls reach their full rate."""

    return Limits(
        _bandwidth(device, seconds),
        _rate(device, dtype, seconds),
        lambda product: _product_seconds(product, device, dtype, 0.0),
        lambda size: _copy_seconds(size // 2, device, seconds / 5),
    )


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
    timing = time_call(lambda: torch.mm(left, right, out=out), device, seconds, least=3, warm=WARM_SECONDS)
    return timing.median_ms / 1e3


def _operand(rows: int, columns: int, transposed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    if transposed:
        return torch.randn(columns, rows, device=device, dtype=dtype).t()
    return torch.randn(rows, columns, device=device, dtype=dtype)
