# SPDX-License-Identifier: Apache-2.0
"""The parts that row passes over logits share: launch shapes, and the scale and cap of a logit before the softmax."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Shape(NamedTuple):
    """The columns of a block, the warps and the pipeline stages of one pass."""

    block: int
    warps: int
    stages: int = 1


# Share of copy bandwidth on one H200 at 8192 rows (bf16) for V = 40960 · 128256 · 163840, kernels alone.
# Log-sum-exp (more than 1, since nothing is written): .98 · 1.06 · 1.07; blocks of 1024 on 4 warps .92 · 1.00 · 1.01.
# One thread a column, with an exponential and nine operations for each, .84 · .89 · .89.
STATISTICS = Shape(4096, 8)
# Gradient alone: .94 · .94 · .94; most shapes do.
GRADIENT = Shape(2048, 4)
# In place: .97 of a copy with hints for the cache, .68 without; few rows at a time, which fit in it.
EXPONENTIALS = Shape(4096, 16)


@triton.jit
def tanh(u):
    """Compute tanh from the exponential, or near 0, where that cancels, from the series.

    The hardware's approximation is off by 2⁻¹¹.
    """
    size = tl.abs(u)
    decay = tl.exp(-2.0 * size)
    square = u * u
    series = 1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 - square * 0.05396825396825397))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < 0.1, u * series, tl.where(u < 0, -far, far))


@triton.jit
def capped(logits, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return logit_scale · logits, then softcap · tanh(· / softcap), in float32."""
    x = logits.to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        x = softcap * tanh(x * (1.0 / softcap))
    return x


@triton.jit
def bend(logits, logit_scale, softcap):
    """Return 1 - tanh², the derivative of the cap, from the exponential: that does not cancel."""
    decay = tl.exp(-2.0 * tl.abs(logits.to(tl.float32) * logit_scale * (1.0 / softcap)))
    share = 1.0 / (1.0 + decay)
    return 4.0 * decay * share * share


@triton.jit
def through_cap(slope, logits, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Turn the gradient over x into that over the logits."""
    slope = slope * logit_scale
    if HAS_SOFTCAP:
        slope = slope * bend(logits, logit_scale, softcap)
    return slope
