# SPDX-License-Identifier: Apache-2.0
"""The reads of two rows of logits for the divergences in Triton, and the maximum and sum of each row."""

import triton
import triton.language as tl

from liger_triton._constants import LOG2E, LOWEST
from liger_triton._divergence_terms import KIND_FORWARD
from liger_triton._logits import capped, grown, met


@triton.jit
def both(
    base, theirs, column, width, logit_scale, softcap, their_scale, their_softcap,
    HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Load x of the student and the teacher at these columns, -∞ past the last one. PLAIN: x is the logit itself.

    The mask also prevents x, if it is a product, from being fused into x - m, where m is a rounded product.
    """
    mask = column < width
    x = tl.load(base + column, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    y = tl.load(theirs + column, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if not PLAIN:
        x = capped(x, logit_scale, softcap, HAS_SOFTCAP)
        y = capped(y, their_scale, their_softcap, TEACHER_SOFTCAP)
    return tl.where(mask, x, float("-inf")), tl.where(mask, y, float("-inf"))


@triton.jit
def neighbors(pointer, N: tl.constexpr, VECTOR: tl.constexpr, PAIRED: tl.constexpr, POLICY: tl.constexpr):
    """Load adjacent logits as (N, VECTOR) in float32.

    PAIRED: two bfloat16 logits are loaded as one word, which takes one instruction per logit instead of one and a half.
    """
    if PAIRED:
        HALF: tl.constexpr = VECTOR // 2
        offset = tl.arange(0, N)[:, None] * HALF + tl.arange(0, HALF)[None, :]
        word = tl.load(pointer.to(tl.pointer_type(tl.int32)) + offset, eviction_policy=POLICY)
        both = tl.join((word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True))
        return both.reshape(N, VECTOR)
    else:
        offset = tl.arange(0, N)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        return tl.load(pointer + offset, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def halves(pointer, HALF: tl.constexpr, VECTOR: tl.constexpr, PAIRED: tl.constexpr, POLICY: tl.constexpr):
    """Load two adjacent blocks, so each thread does its work per block once for both."""
    first = neighbors(pointer, HALF // VECTOR, VECTOR, PAIRED, POLICY)
    second = neighbors(pointer + HALF, HALF // VECTOR, VECTOR, PAIRED, POLICY)
    return tl.join(first, second).reshape(HALF // VECTOR, 2 * VECTOR)


@triton.jit
def masked_halves(pointer, column, width, HALF: tl.constexpr, POLICY: tl.constexpr):
    """Return (`halves` of the last columns, zeros past the last one; a mask of the valid columns)."""
    first = tl.load(pointer + column, mask=column < width, other=0.0, eviction_policy=POLICY)
    second = tl.load(pointer + column + HALF, mask=column + HALF < width, other=0.0, eviction_policy=POLICY)
    both = tl.join(first, second)
    shape: tl.constexpr = (both.shape[0], 2 * both.shape[1])
    return both.reshape(shape).to(tl.float32), tl.join(column < width, column + HALF < width).reshape(shape)


@triton.jit
def anchored(m, anchor, d, x):
    """Update each thread's maximum, anchor and sum of 2^(x - anchor) with more neighbors.

    The anchor is the maximum in units of base 2, rounded.
    """
    m = tl.maximum(m, tl.max(x, 1))
    # Not a product, which would be fused into the difference from the anchor, unrounded.
    top = tl.fma(m, LOG2E, 0.0)
    return m, top, d * tl.exp2(anchor - top) + tl.sum(tl.exp2(tl.fma(x, LOG2E, -top[:, None])), 1)


@triton.jit
def met_anchored(m, anchor, d):
    """Reduce the threads' values to the maximum of the row and the sum of e^(x - maximum)."""
    top = tl.max(m, 0)
    highest = tl.max(anchor, 0)
    # The select prevents fusing the products into the sum, where each of two threads would fuse its own.
    d = tl.sum(tl.where(d > 0, d * tl.exp2(anchor - highest), d), 0)
    return top, d * tl.exp2(-tl.fma(top, LOG2E, -highest))


@triton.jit
def quick_statistics(base, theirs, width, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PAIRED: tl.constexpr):
    """Return `statistics` of plain logits with half of the instructions.

    If a logit is infinite, NaN or nearly infinite, the sums are 0, infinite or NaN.
    """
    HALF: tl.constexpr = BLOCK // 2
    m = tl.full((HALF // VECTOR,), -1e30, dtype=tl.float32)
    anchor = m * LOG2E
    d = tl.zeros((HALF // VECTOR,), dtype=tl.float32)
    their_m = m
    their_anchor = anchor
    their_d = d
    # The first column of the block in which each thread saw its maximum.
    block = tl.zeros((HALF // VECTOR,), dtype=tl.int32)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = halves(base + start, HALF, VECTOR, PAIRED, "evict_last")
        y = halves(theirs + start, HALF, VECTOR, PAIRED, "evict_last")
        before = m
        m, anchor, d = anchored(m, anchor, d, x)
        their_m, their_anchor, their_d = anchored(their_m, their_anchor, their_d, y)
        block = tl.where(m > before, start, block)
    offset = tl.arange(0, HALF // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    if whole < width:
        x, mask = masked_halves(base, whole + offset, width, HALF, "evict_last")
        y, _ = masked_halves(theirs, whole + offset, width, HALF, "evict_last")
        before = m
        m, anchor, d = anchored(m, anchor, d, tl.where(mask, x, float("-inf")))
        their_m, their_anchor, their_d = anchored(their_m, their_anchor, their_d, tl.where(mask, y, float("-inf")))
        block = tl.where(m > before, whole, block)
    top, exp_sum = met_anchored(m, anchor, d)
    their_top, their_sum = met_anchored(their_m, their_anchor, their_d)
    x, mask = masked_halves(base, block[:, None] + offset, tl.where(m == top, width, 0)[:, None], HALF, "evict_last")
    y, _ = masked_halves(theirs, block[:, None] + offset, tl.where(m == top, width, 0)[:, None], HALF, "evict_last")
    their_first = tl.max(tl.max(tl.where(mask & (x == top), y, float("-inf")), 1), 0)
    return top, exp_sum, their_top, their_sum, their_first


@triton.jit
def statistics(
    base, theirs, width, temperature, logit_scale, softcap, their_scale, their_softcap,
    FORMULA: tl.constexpr, HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Return (student's m, d; teacher's m, d, and x at the student's largest; student's d without temperature)."""
    m = tl.full((BLOCK // VECTOR,), LOWEST, dtype=tl.float32)
    d = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
    their_m = m
    # The teacher's x at the largest x of the student that each thread has seen.
    their_first = m
    their_d = d
    sharp_d = d
    offset = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in range(0, width, BLOCK):
        x, y = both(
            base, theirs, start + offset, width, logit_scale, softcap, their_scale, their_softcap,
            HAS_SOFTCAP, TEACHER_SOFTCAP, PLAIN, "evict_last",
        )  # fmt: skip
        m, d, their_m, their_d, their_first, sharp_d = seen(
            m, d, their_m, their_d, their_first, sharp_d, x, y, temperature, FORMULA, HARD
        )
    top, exp_sum, _, _ = met(m, d, d, d, False, False)
    their_top, their_sum, _, _ = met(their_m, their_d, d, d, False, False)
    sharp_sum = 1.0
    if HARD:
        sharp_sum = tl.sum(sharp_d * tl.exp2((m - top) * temperature * LOG2E), 0)
    their_first = tl.max(tl.where(m == top, their_first, float("-inf")), 0)
    return top, exp_sum, their_top, their_sum, their_first, sharp_sum


@triton.jit
def seen(m, d, their_m, their_d, their_first, sharp_d, x, y, temperature, FORMULA: tl.constexpr, HARD: tl.constexpr):
    """Update each thread's statistics of a row with VECTOR more neighbors of both sides."""
    if FORMULA != KIND_FORWARD:
        highest = tl.max(x, 1)
        first = tl.max(tl.where(x == highest[:, None], y, float("-inf")), 1)
        their_first = tl.where(highest > m, first, tl.where(highest == m, tl.maximum(first, their_first), their_first))
    top, d, _, _ = grown(m, d, d, d, x, False, False)
    their_m, their_d, _, _ = grown(their_m, their_d, d, d, y, False, False)
    if HARD:
        sharp = tl.sum(tl.exp2((x - top[:, None]) * temperature * LOG2E), 1)
        sharp_d = sharp_d * tl.exp2((m - top) * temperature * LOG2E) + sharp
    return top, d, their_m, their_d, their_first, sharp_d
