# SPDX-License-Identifier: Apache-2.0
"""The forward KL of two rows of logits in one read, in Triton."""

import triton
import triton.language as tl

from liger_triton._constants import LN2, LOG2E
from liger_triton._divergence_rows import halves, masked_halves
from liger_triton._divergence_terms import log_series
from liger_triton._logits import capped


@triton.jit
def moved(s, a, w, v, down, our_down):
    """Return the sums of `streamed` after the anchors grew by down (the teacher's) and our_down, to base 2.

    With α and β the factors of w and v, s becomes α · (a - δ · w - w) + β · v. For a small δ, where that loses digits,
    this is α · (s + (e^δ - 1) · (s - a) + (e^δ - 1 - δ) · w), whose terms are of second order, as s is.
    """
    alpha = tl.exp2(-down)
    beta = tl.exp2(-our_down)
    delta = (down - our_down) * LN2
    drift = alpha * delta
    rest = 1.0 / 6 + delta * (1.0 / 24 + delta * (1.0 / 120 + delta * (1.0 / 720 + delta * (1.0 / 5040))))
    rest = drift * delta * (0.5 + delta * rest)
    near = alpha * s + (drift + rest) * (s - a) + rest * w
    a = alpha * a - drift * w
    w = alpha * w
    v = beta * v
    return tl.where(tl.abs(delta) < 0.5, near, (a - w) + v), a, w, v


@triton.jit
def added(s, a, w, v, mean, m, anchor, their_m, their_anchor, x, y, mask, scale, their_scale):
    """Return the state of `streamed` after one more block."""
    m = tl.maximum(m, tl.max(x, 1))
    their_m = tl.maximum(their_m, tl.max(y, 1))
    # Where the sides are so far apart that e^mean could overflow, no digits cancel.
    mean += a / tl.maximum(w, 1e-30) * LOG2E
    mean = tl.where(mean > 24.0, 24.0, mean)
    top = m * scale - mean
    # Not a product, which would be fused into the difference from the anchor, unrounded.
    their_top = tl.fma(their_m, their_scale, 0.0)
    s, a, w, v = moved(s, a, w, v, their_top - their_anchor, top - anchor)
    # Each difference is rounded once, so that what the logits have in common cancels exactly.
    below = tl.fma(x, scale, -top[:, None])
    beneath = tl.fma(y, their_scale, -their_top[:, None])
    q = tl.exp2(below)
    p = tl.exp2(beneath)
    apart = beneath - below
    moment = p * apart
    near = 0.0138760271 - apart * (0.00192362582 - apart * 0.000222225968)
    near = 0.34657359 - apart * (0.0800755023 - apart * near)
    moment *= LN2
    value = tl.where(tl.abs(apart) < 0.36, moment * apart * near, moment + (q - p))
    if mask is not None:
        moment = tl.where(mask, moment, 0.0)
        value = tl.where(mask, value, 0.0)
    s += tl.sum(value, 1)
    a += tl.sum(moment, 1)
    return s, a, w + tl.sum(p, 1), v + tl.sum(q, 1), mean, m, top, their_m, their_top


@triton.jit
def streamed(
    base, theirs, width, logit_scale, softcap, their_scale, their_softcap,
    HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PAIRED: tl.constexpr, HALF: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Return (KL(p ‖ q), m and d of the student, m and d of the teacher) from one read of a row.

    The results are infinite or NaN if a logit is; see the slow passes.

    With any anchors n, n' and w = e^(y - n'), v = e^(x - n), δ = (y - n') - (x - n):

        KL(p ‖ q) = s/W - (u - log(1 + u))        s = Σ (w · δ - w + v), W = Σ w, u = Σ (v - w) / W

    Terms of s are ≥ 0 and, like u², of second order in δ. Near agreement nothing cancels if the distance of the anchors
    is that of most classes. Each thread has anchors near its maxima, at which the mean of δ under p was 0 until now; in
    the end all move to those of the row.
    """
    m = tl.full((HALF // VECTOR,), -1e30, dtype=tl.float32)
    their_m = m
    anchor = m
    their_anchor = m
    s = tl.zeros((HALF // VECTOR,), dtype=tl.float32)
    a = s
    w = s
    v = s
    mean = s
    # To base 2, with the logit scale included; a softcap has already applied it.
    scale = LOG2E if HAS_SOFTCAP else logit_scale * LOG2E
    their = LOG2E if TEACHER_SOFTCAP else their_scale * LOG2E
    offset = tl.arange(0, HALF // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = width // (2 * HALF) * (2 * HALF)
    for start in range(0, whole, 2 * HALF):
        x = halves(base + start, HALF, VECTOR, PAIRED, "evict_first")
        y = halves(theirs + start, HALF, VECTOR, PAIRED, "evict_first")
        if HAS_SOFTCAP:
            x = capped(x, logit_scale, softcap, HAS_SOFTCAP)
        if TEACHER_SOFTCAP:
            y = capped(y, their_scale, their_softcap, TEACHER_SOFTCAP)
        s, a, w, v, mean, m, anchor, their_m, their_anchor = added(
            s, a, w, v, mean, m, anchor, their_m, their_anchor, x, y, None, scale, their
        )
    if whole < width:
        x, mask = masked_halves(base, whole + offset, width, HALF, "evict_first")
        y, _ = masked_halves(theirs, whole + offset, width, HALF, "evict_first")
        if HAS_SOFTCAP:
            x = capped(x, logit_scale, softcap, HAS_SOFTCAP)
        if TEACHER_SOFTCAP:
            y = capped(y, their_scale, their_softcap, TEACHER_SOFTCAP)
        s, a, w, v, mean, m, anchor, their_m, their_anchor = added(
            s, a, w, v, mean, m, anchor, their_m, their_anchor,
            tl.where(mask, x, float("-inf")), tl.where(mask, y, float("-inf")), mask, scale, their,
        )  # fmt: skip
    top = tl.max(m, 0)
    their_top = tl.max(their_m, 0)
    highest = tl.max(anchor, 0)
    their_highest = tl.max(their_anchor, 0)
    down = their_highest - their_anchor
    our_down = highest - anchor
    # The select prevents fusing the products into the sum, where each of two threads would fuse its own.
    exp_sum = tl.sum(tl.where(v > 0, tl.exp2(-our_down) * v, v), 0)
    alpha = tl.exp2(-down)
    their_sum = tl.sum(tl.where(w > 0, alpha * w, w), 0)
    moment = alpha * (a * LOG2E + (our_down - down) * w)
    mean = tl.sum(tl.where(w > 0, moment, w), 0) / their_sum
    mean = tl.where(mean > 24.0, 24.0, mean)
    s, a, w, v = moved(s, a, w, v, down, our_down - mean)
    u = tl.sum(s - a, 0) / their_sum
    log = tl.log2(tl.sum(tl.where(v > 0, v, 0.0), 0) / their_sum) * LN2
    divergence = tl.where(tl.abs(u) < 0.25, tl.sum(s, 0) / their_sum - log_series(u), tl.sum(a, 0) / their_sum + log)
    # The results have the maxima of x itself.
    exp_sum *= tl.exp2(-tl.fma(top, scale, -highest))
    their_sum *= tl.exp2(-tl.fma(their_top, their, -their_highest))
    if not HAS_SOFTCAP:
        rounded = top * logit_scale
        exp_sum *= tl.exp2(tl.fma(top, logit_scale, -rounded) * LOG2E)
        top = rounded
    if not TEACHER_SOFTCAP:
        rounded = their_top * their_scale
        their_sum *= tl.exp2(tl.fma(their_top, their_scale, -rounded) * LOG2E)
        their_top = rounded
    return divergence, top, exp_sum, their_top, their_sum
