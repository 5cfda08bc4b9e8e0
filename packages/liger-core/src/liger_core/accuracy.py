# SPDX-License-Identifier: Apache-2.0
"""The one accuracy criterion of the project.

With `exact` the reference in float64: an implementation passes if, for every output and every gradient,

    error(implementation) ≤ k · error(reference in the same dtype) + floor(dtype)

where the error is measured twice: relative in the Frobenius norm, and by the largest element relative to the root mean
square of the exact value. k is close to 1, since a kernel may not be less accurate than plain PyTorch in the same
dtype.
"""

from __future__ import annotations

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
    """The error allowed beyond that of the reference: the round-off of one operation (bf16: 2⁻⁹, fp32: a few ulp).

    Low precisions get a fraction of one rounding, since every implementation rounds its results once; float32 gets 16
    roundings, since the order of a sum differs legitimately between implementations.
    """
    epsilon = torch.finfo(dtype).eps
    return {torch.bfloat16: epsilon / 16, torch.float16: epsilon / 16}.get(dtype, 16 * epsilon)


def error(result: Tensor, exact: Tensor) -> Error:
    """The error of a result against the exact value; infinite if one is NaN or infinite where the other is not."""
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
    """The largest error of a correctly rounded result, so that such a one always passes."""
    finite = torch.where(exact.isfinite(), exact, 0.0).detach().double()
    norm = float(finite.norm())
    return torch.finfo(dtype).eps / 2 * float(finite.abs().max()) * exact.numel() ** 0.5 / norm if norm > 0 else 0.0


def judge(
    result: Tensor, reference: Tensor, exact: Tensor, dtype: torch.dtype | None = None, *, leeway: float = 1.0
) -> str | None:
    """None if the result meets the criterion, else a sentence with the figures.

    dtype   the precision that the inputs had (the result itself may be a float32 loss); the result's own by default
    leeway  factor on the reference's error; more than 1 where inputs are so extreme that results consist mostly of
            round-off
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
    # Of a handful of elements the reference may round all luckily; half an ulp of one element is what luck amounts to.
    luck = torch.finfo(result.dtype).eps / 2 / max(result.numel(), 1) ** 0.5
    limits = Error(
        leeway * K * base.frobenius + slack + luck,
        leeway * K_MAXIMUM * base.maximum + 8 * slack + _one_rounding(exact, result.dtype),
    )
    if got.frobenius <= limits.frobenius and got.maximum <= limits.maximum:
        return None
    return (
        f"relative error {got.frobenius:.3g} (allowed {limits.frobenius:.3g}, reference {base.frobenius:.3g}), "
        f"largest {got.maximum:.3g} (allowed {limits.maximum:.3g}, reference {base.maximum:.3g})"
    )
