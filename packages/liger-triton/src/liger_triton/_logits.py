# SPDX-License-Identifier: Apache-2.0
"""The parts that row passes over logits share: launch shapes, the scale and cap of a logit, and the online softmax."""

from typing import NamedTuple

import triton
import triton.language as tl

from liger_triton._constants import LOG2E


class Shape(NamedTuple):
    """The columns of a block, the warps and the pipeline stages of one pass."""

    block: int
    warps: int
    stages: int = 1


# Log-sum-exp, on one H200: .98 of copy bandwidth at 40960 classes (bf16), more than 1 above, as nothing is written.
STATISTICS = Shape(4096, 8)
# Gradient alone: .94 of copy bandwidth, as with most shapes.
GRADIENT = Shape(2048, 4)


def exponentials_shape(width: int) -> Shape:
    """Return the shape of a pass that overwrites rows of logits in place.

    It reads a row twice, the second time from the cache. More warps have fewer rows there at a time, which pays if rows
    are wide: .87 of the bandwidth of an in-place product on one H200 at 21,376 and at 32,128 classes.
    """
    return Shape(8192, 16) if width < 28672 else Shape(4096, 32)


@triton.jit
def tanh(u):
    """Compute tanh from the exponential, or from its series near 0; the hardware's approximation is off by 2⁻¹¹."""
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


@triton.jit
def grown(m, d, distance, squares, x, ENTROPY: tl.constexpr, COLLISION: tl.constexpr):
    """Continue the sums of an online softmax with x (threads, VECTOR), so many neighbors for each thread.

    They are the maximum m, which begins at LOWEST, d = Σ e^(x - m), with ENTROPY distance = Σ e^(x - m) · (x - m) in
    units of base 2, and with COLLISION squares = Σ e^(2(x - m)). A thread moves its sums to the new maximum by one
    exponential and adds one for each neighbor; threads are reduced once per row. Differences are taken before they are
    scaled to base 2, so that what logits have in common cancels exactly.
    """
    highest = tl.max(x, 1)
    top = tl.where(highest > m, highest, m)
    step = (m - top) * LOG2E
    shrink = tl.exp2(step)
    below = (x - top[:, None]) * LOG2E
    e = tl.exp2(below)
    if ENTROPY:
        distance = (distance + d * bounded(step)) * shrink + tl.sum(e * bounded(below), 1)
    if COLLISION:
        squares = squares * (shrink * shrink) + tl.sum(e * e, 1)
    return top, d * shrink + tl.sum(e, 1), distance, squares


@triton.jit
def met(m, d, distance, squares, ENTROPY: tl.constexpr, COLLISION: tl.constexpr):
    """Reduce the sums of `grown` of the threads to those of the row.

    A NaN among the logits shows in d; the maximum may skip it.
    """
    top = tl.max(m, 0)
    step = (m - top) * LOG2E
    shrink = tl.exp2(step)
    if ENTROPY:
        distance = tl.sum((distance + d * bounded(step)) * shrink, 0)
    if COLLISION:
        squares = tl.sum(squares * (shrink * shrink), 0)
    return top, tl.sum(d * shrink, 0), distance, squares


@triton.jit
def bounded(exponent):
    """Cut an exponent of 2 at -1000, which changes nothing but ∞ · 0; NaN stays NaN."""
    return tl.where(exponent < -1000.0, -1000.0, exponent)
