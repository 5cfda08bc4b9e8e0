# SPDX-License-Identifier: Apache-2.0
"""When the losses of two training runs count as equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

# float32: both runs compute the same sums in another order.
FLOAT32_BOUND = 1e-3
# Lower precision: a multiple of the effect of a mathematically neutral change on the baseline. Above 1, since Liger
# replaces more operations than that change does, and both differences are the largest of a few dozen random ones.
NOISE_FACTOR = 3.0


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Infinite if a loss is not a number, so that no bound holds."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def bound(noise: float | None) -> float:
    """The largest allowed difference of two runs; `noise` is the effect of that order in a lower precision, None in
    float32."""
    return FLOAT32_BOUND if noise is None else NOISE_FACTOR * noise
