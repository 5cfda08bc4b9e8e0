# SPDX-License-Identifier: Apache-2.0
"""The one accuracy criterion of the project.

With `exact` the reference in float64: an implementation passes if, for every output and every gradient,

    error(implementation) ≤ k · error(reference in the same dtype) + floor(dtype)

where the error is measured twice: relative in the Frobenius norm, and by the largest element relative to the root mean
square of the exact value. k is close to 1: a kernel must be as accurate as plain PyTorch in the same dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

K = 1.1
K_MAXIMUM = 2.0


@dataclass(frozen=True)
class Error:
    """Relative Frobenius error, and largest absolute error over the root mean square of the exact value."""

    frobenius: float
    maximum: float


def floor(dtype: torch.dtype) -> float:
    """Return the error allowed beyond the reference's: the round-off of one operation (bf16: 2⁻⁹, fp32: a few ulp).

    Low precisions get a fraction of one rounding, because every implementation rounds its results once. float32 gets 16
    roundings, because implementations may sum in different orders.
    """
    epsilon = torch.finfo(dtype).eps
    return {torch.bfloat16: epsilon / 16, torch.float16: epsilon / 16}.get(dtype, 16 * epsilon)


def error(result: Tensor, exact: Tensor) -> Error:
    """Return the error of a result; infinite if it or the exact value is NaN or infinite where the other is not."""
    a, b = result.detach().double().flatten(), exact.detach().double().flatten().to(result.device)
    if a.numel() == 0:
        return Error(0.0, 0.0)
    same = (a == b) | (a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    if not bool((same | finite).all()):
        return Error(float("inf"), float("inf"))
    difference = torch.where(same, 0.0, a - b)
    magnitude = torch.where(b.isfinite(), b, 0.0)
    norm = magnitude.norm()
    scale = torch.where(norm > 0, norm, torch.ones_like(norm))
    rms = scale / max(b.numel(), 1) ** 0.5
    return Error(float(difference.norm() / scale), float(difference.abs().max() / rms))


def _one_rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of a correctly rounded result, which must always pass."""
    finite = torch.where(exact.isfinite(), exact, 0.0).detach().double()
    norm = float(finite.norm())
    return torch.finfo(dtype).eps / 2 * float(finite.abs().max()) * exact.numel() ** 0.5 / norm if norm > 0 else 0.0


def judge(
    result: Tensor, reference: Tensor, exact: Tensor, dtype: torch.dtype | None = None, *, leeway: float = 1.0
) -> str | None:
    """Return None if the result meets the criterion, else a sentence with the figures.

    dtype   the precision of the inputs (the result itself may be a float32 loss); that of the result by default
    leeway  factor on the reference's error, above 1 for inputs so extreme that results are mostly round-off
    """
    if result.shape != exact.shape:
        return f"shape {tuple(exact.shape)} expected, got {tuple(result.shape)}"
    if result.dtype != reference.dtype:
        return f"dtype {reference.dtype} expected, got {result.dtype}"
    if not result.is_floating_point():
        wrong = int((result != exact.to(result)).sum())
        return f"{wrong} of {result.numel()} elements differ" if wrong else None
    got, base = error(result, exact), error(reference, exact)
    slack = floor(dtype or result.dtype)
    # With few elements, the reference may happen to round every one favorably, so allow half an ulp of one.
    half_ulp = torch.finfo(result.dtype).eps / 2 / max(result.numel(), 1) ** 0.5
    limits = Error(
        leeway * K * base.frobenius + slack + half_ulp,
        leeway * K_MAXIMUM * base.maximum + 8 * slack + _one_rounding(exact, result.dtype),
    )
    if got.frobenius <= limits.frobenius and got.maximum <= limits.maximum:
        return None
    figures = [
        f"relative error {got.frobenius:.3g} (allowed {limits.frobenius:.3g}, reference {base.frobenius:.3g})",
        f"largest {got.maximum:.3g} (allowed {limits.maximum:.3g}, reference {base.maximum:.3g})",
    ]
    # First the figure that exceeds its limit.
    return ", ".join(figures if got.frobenius > limits.frobenius else reversed(figures))
