# SPDX-License-Identifier: Apache-2.0
"""The row passes of the divergences in Triton: two rows of logits, compared by one program."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.ops._divergence import FORWARD, MIXTURE, REVERSE, VARIATION, DivergenceOptions, DivergenceResults
from liger_triton._logits import GRADIENT, capped
from liger_triton._softmax_loss import TritonPasses
from liger_triton.launch import VECTOR, Launcher, cdiv, fuses, power_of_two, registers, rows_of


class RowShape(NamedTuple):
    """Columns of a block, warps, neighbors that a thread takes, and the most registers of a thread if that many cost too many warps."""

    block: int
    warps: int
    vector: int
    registers: int | None = None


# Milliseconds on one H200, 8192 rows of 40 960 · 128 256 classes in bfloat16 forward, with STREAMED and with MIXED: KL by one read .370 · 1.109 and
# .435 · 1.335, total variation .560 · 1.871 and .614 · 1.991, reverse KL .772 · 2.428 and .834 · 2.639, JSD .828 · 2.578 and .794 · 2.452. Without
# the bound on registers STREAMED takes up to a third more. A kernel that does nothing but read each row twice takes .36 · 1.57 at best.
STREAMED, MIXED = RowShape(4096, 8, VECTOR, 64), RowShape(2048, 8, VECTOR // 2)
# After those of liger_core: the Jensen-Shannon divergence with beta 1/2, a mixture whose formula is even in log p - log q, and much shorter.
EVEN = 1 + max(FORWARD, REVERSE, MIXTURE, VARIATION)
KIND_FORWARD, KIND_REVERSE, KIND_MIXTURE = tl.constexpr(FORWARD), tl.constexpr(REVERSE), tl.constexpr(MIXTURE)
KIND_VARIATION, KIND_EVEN = tl.constexpr(VARIATION), tl.constexpr(EVEN)


class TritonDivergencePasses(TritonPasses):
    """One program a row, which reads both sides once for the forward KL alone, else two or three times; but for the first from the L2 cache."""

    def divergences(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, results: DivergenceResults, options: DivergenceOptions,
        row_factor: Tensor | None, gradient: bool,
    ) -> None:  # fmt: skip
        rows, width = student.shape
        if rows == 0:
            return
        student, teacher = student if gradient else rows_of(student), rows_of(teacher)
        # A positive scale keeps the largest logit the largest. A gradient written here takes a second read anyway, and the caches hold a
        # narrow row.
        one_read = options.formula == FORWARD and not gradient and not options.hard_weight and width > STREAMED.block
        one_read = one_read and options.logit_scale > 0 and options.teacher_logit_scale > 0
        shape = MIXED if options.formula == MIXTURE else STREAMED
        block = max(2, min(shape.block, power_of_two(width)))
        vector = min(shape.vector, block // 2)
        divergence_launch(
            (rows,), student, teacher, None if target is None else target.contiguous(), row_factor, results.loss, results.moments,
            student.stride(0), teacher.stride(0), 0 if row_factor is None else row_factor.stride(0), width, *_scalars(options),
            **_forms(options), PAIRED=vector > 1 and _paired(student) and _paired(teacher), GRADIENT=gradient, ONE_READ=one_read,
            BLOCK=block, VECTOR=vector, num_warps=shape.warps, enable_fp_fusion=fuses(block), **registers(shape.registers, student),
        )  # fmt: skip

    def divergence_gradients(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, moments: Tensor, row_factor: Tensor, options: DivergenceOptions,
        out: Tensor,
    ) -> None:  # fmt: skip
        rows, width = student.shape
        if rows == 0:
            return
        student, teacher = rows_of(student), rows_of(teacher)
        block = min(GRADIENT.block, power_of_two(width))
        gradient_launch(
            (rows, cdiv(width, block)), student, teacher, None if target is None else target.contiguous(), row_factor, moments, out,
            student.stride(0), teacher.stride(0), row_factor.stride(0), out.stride(0), width, *_scalars(options),
            **_forms(options), BLOCK=block, num_warps=GRADIENT.warps,
        )  # fmt: skip

    def divergence_sums(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, moments: Tensor, options: DivergenceOptions, out: Tensor
    ) -> None:
        rows, width = student.shape
        if rows == 0:
            return
        student, teacher = rows_of(student), rows_of(teacher)
        block = min(MIXED.block, power_of_two(width))
        sums_launch(
            (rows,), student, teacher, None if target is None else target.contiguous(), moments, out, student.stride(0), teacher.stride(0),
            width, *_scalars(options), **_forms(options), BLOCK=block, VECTOR=min(MIXED.vector, block), num_warps=MIXED.warps,
        )  # fmt: skip


PASSES = TritonDivergencePasses()


def _scalars(options: DivergenceOptions) -> tuple[int | float, ...]:
    return (
        options.ignore_index, options.beta, 1.0 - options.beta, options.of_teacher, options.of_student, options.temperature, options.hard_weight,
        options.logit_scale, options.softcap or 1.0, options.teacher_logit_scale, options.teacher_softcap or 1.0,
    )  # fmt: skip


def _forms(options: DivergenceOptions) -> dict[str, int | bool]:
    even = options.formula == MIXTURE and options.beta == options.of_teacher == options.of_student == 0.5
    capped = options.softcap is not None, options.teacher_softcap is not None
    return {
        "FORMULA": EVEN if even else options.formula,
        "HARD": options.hard_weight > 0,
        "HAS_SOFTCAP": capped[0],
        "TEACHER_SOFTCAP": capped[1],
        "PARTIAL": options.partial,
        "PLAIN": not any(capped) and options.logit_scale == options.teacher_logit_scale == 1.0,
    }


def _paired(x: Tensor) -> bool:
    """Whether each row begins with a whole word of two logits."""
    return x.dtype == torch.bfloat16 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0


@triton.jit
def grown(m, d, x):
    """The maximum and the sum of e^(x - m) of each thread, with VECTOR neighbors more."""
    top = tl.maximum(m, tl.max(x, 1))
    return top, d * tl.exp2((m - top) * 1.4426950408889634) + tl.sum(tl.exp2((x - top[:, None]) * 1.4426950408889634), 1)


@triton.jit
def met(m, d):
    """The maximum and the sum of a row from those of its threads. A NaN among the logits shows in the sum."""
    top = tl.max(m, 0)
    return top, tl.sum(d * tl.exp2((m - top) * 1.4426950408889634), 0)


@triton.jit
def both(
    base, theirs, column, width, logit_scale, softcap, their_scale, their_softcap,
    HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """x of the student and the teacher at these columns, -∞ past the last one. PLAIN: they are the logits.

    The mask also keeps the product that x may be from being fused into x - m, where m is a rounded one.
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
    """(N, VECTOR) adjacent logits in float32. PAIRED: two of bfloat16 come as one word, so that each takes one instruction, not one and a half."""
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
    """Two blocks beside each other: what a thread does once a block it does once for both."""
    first = neighbors(pointer, HALF // VECTOR, VECTOR, PAIRED, POLICY)
    second = neighbors(pointer + HALF, HALF // VECTOR, VECTOR, PAIRED, POLICY)
    return tl.join(first, second).reshape(HALF // VECTOR, 2 * VECTOR)


@triton.jit
def masked_halves(pointer, column, width, HALF: tl.constexpr, POLICY: tl.constexpr):
    """(`halves` of the last columns, whatever is past the last one, and which are not)."""
    first = tl.load(pointer + column, mask=column < width, other=0.0, eviction_policy=POLICY)
    second = tl.load(pointer + column + HALF, mask=column + HALF < width, other=0.0, eviction_policy=POLICY)
    both = tl.join(first, second)
    shape: tl.constexpr = (both.shape[0], 2 * both.shape[1])
    return both.reshape(shape).to(tl.float32), tl.join(column < width, column + HALF < width).reshape(shape)


@triton.jit
def anchored(m, anchor, d, x):
    """The maximum of each thread, its anchor, which is the maximum to base 2 and rounded, and the sum of 2^(x - anchor), with more neighbors."""
    m = tl.maximum(m, tl.max(x, 1))
    top = m * 1.4426950408889634
    return m, top, d * tl.exp2(anchor - top) + tl.sum(tl.exp2(tl.fma(x, 1.4426950408889634, -top[:, None])), 1)


@triton.jit
def met_anchored(m, anchor, d):
    """The maximum of a row and the sum of e^(x - maximum), from those of its threads."""
    top = tl.max(m, 0)
    highest = tl.max(anchor, 0)
    # Selected, so that no product is fused into a sum of two threads, of which each would fuse its own.
    d = tl.sum(tl.where(d > 0, d * tl.exp2(anchor - highest), d), 0)
    return top, d * tl.exp2(-tl.fma(top, 1.4426950408889634, -highest))


@triton.jit
def quick_statistics(base, theirs, width, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PAIRED: tl.constexpr):
    """`statistics` of plain logits, by half of the instructions. The sums are 0, infinite or NaN if a logit is, or is nearly as large."""
    HALF: tl.constexpr = BLOCK // 2
    m = tl.full((HALF // VECTOR,), -1e30, dtype=tl.float32)
    anchor = m * 1.4426950408889634
    d = tl.zeros((HALF // VECTOR,), dtype=tl.float32)
    their_m = m
    their_anchor = anchor
    their_d = d
    # Where each thread found its largest.
    found = tl.zeros((HALF // VECTOR,), dtype=tl.int32)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = halves(base + start, HALF, VECTOR, PAIRED, "evict_last")
        y = halves(theirs + start, HALF, VECTOR, PAIRED, "evict_last")
        before = m
        m, anchor, d = anchored(m, anchor, d, x)
        their_m, their_anchor, their_d = anchored(their_m, their_anchor, their_d, y)
        found = tl.where(m > before, start, found)
    offset = tl.arange(0, HALF // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    if whole < width:
        x, mask = masked_halves(base, whole + offset, width, HALF, "evict_last")
        y, _ = masked_halves(theirs, whole + offset, width, HALF, "evict_last")
        before = m
        m, anchor, d = anchored(m, anchor, d, tl.where(mask, x, float("-inf")))
        their_m, their_anchor, their_d = anchored(their_m, their_anchor, their_d, tl.where(mask, y, float("-inf")))
        found = tl.where(m > before, whole, found)
    top, exp_sum = met_anchored(m, anchor, d)
    their_top, their_sum = met_anchored(their_m, their_anchor, their_d)
    x, mask = masked_halves(base, found[:, None] + offset, tl.where(m == top, width, 0)[:, None], HALF, "evict_last")
    y, _ = masked_halves(theirs, found[:, None] + offset, tl.where(m == top, width, 0)[:, None], HALF, "evict_last")
    their_first = tl.max(tl.max(tl.where(mask & (x == top), y, float("-inf")), 1), 0)
    return top, exp_sum, their_top, their_sum, their_first


@triton.jit
def statistics(
    base, theirs, width, temperature, logit_scale, softcap, their_scale, their_softcap, FORMULA: tl.constexpr, HARD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(m and d of the student, those of the teacher, the teacher's x at the student's largest, d of the student without temperature)."""
    # The lowest finite number, so that a masked lane or a class at -inf gives exponents of -∞ and never ∞ - ∞.
    m = tl.full((BLOCK // VECTOR,), -3.4028234663852886e38, dtype=tl.float32)
    d = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
    their_m = m
    # The teacher's x at each thread's largest of the student.
    their_first = m
    their_d = d
    sharp_d = d
    offset = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in range(0, width, BLOCK):
        x, y = both(
            base, theirs, start + offset, width, logit_scale, softcap, their_scale, their_softcap,
            HAS_SOFTCAP, TEACHER_SOFTCAP, PLAIN, "evict_last",
        )  # fmt: skip
        m, d, their_m, their_d, their_first, sharp_d = seen(m, d, their_m, their_d, their_first, sharp_d, x, y, temperature, FORMULA, HARD)
    top, exp_sum = met(m, d)
    their_top, their_sum = met(their_m, their_d)
    sharp_sum = 1.0
    if HARD:
        sharp_sum = tl.sum(sharp_d * tl.exp2((m - top) * temperature * 1.4426950408889634), 0)
    their_first = tl.max(tl.where(m == top, their_first, float("-inf")), 0)
    return top, exp_sum, their_top, their_sum, their_first, sharp_sum


@triton.jit
def seen(m, d, their_m, their_d, their_first, sharp_d, x, y, temperature, FORMULA: tl.constexpr, HARD: tl.constexpr):
    """What each thread knows of a row, with VECTOR neighbors of both sides more."""
    if FORMULA != KIND_FORWARD:
        highest = tl.max(x, 1)
        there = tl.max(tl.where(x == highest[:, None], y, float("-inf")), 1)
        their_first = tl.where(highest > m, there, tl.where(highest == m, tl.maximum(there, their_first), their_first))
    if HARD:
        top = tl.maximum(m, tl.max(x, 1))
        sharp = tl.sum(tl.exp2((x - top[:, None]) * temperature * 1.4426950408889634), 1)
        sharp_d = sharp_d * tl.exp2((m - top) * temperature * 1.4426950408889634) + sharp
    m, d = grown(m, d, x)
    their_m, their_d = grown(their_m, their_d, y)
    return m, d, their_m, their_d, their_first, sharp_d


@triton.jit
def summed(slopes, slope, q, FORMULA: tl.constexpr):
    """Σ q · h of each thread. Only the slope of the reverse KL may be infinite."""
    if FORMULA == KIND_REVERSE:
        slopes += tl.where(q != 0, q * slope, 0.0)
    elif FORMULA != KIND_FORWARD:
        slopes += q * slope
    return slopes


@triton.jit
def steps(far):
    """(far - 1 + e, 1 - e - far · e, 1 - e, e) where e = e^-far; the first is far²/2 near 0, and from it follow the others exactly."""
    smaller = tl.exp2(far * -1.4426950408889634)
    near = far < 0.5
    over = 0.5 * far * far * (1.0 - far * (1.0 / 3 - far * (1.0 / 12 - far * (1.0 / 60 - far * (1.0 / 360 - far / 2520)))))
    over = tl.where(near, over, far - 1.0 + smaller)
    step = tl.where(near, far - over, 1.0 - smaller)
    # e^-800 is 0, so that the cut changes nothing but 0 · ∞.
    under = tl.where(near, far * step - over, step - smaller * tl.where(far > 800.0, 800.0, far))
    return over, under, step, smaller


@triton.jit
def log_series(t):
    """t - log(1 + t) for a small t, with s = t / (2 + t)."""
    s = t / (2.0 + t)
    square = s * s
    return t * s - 2.0 * s * square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))))


@triton.jit
def log_ratio(a, b):
    """log(a / b), exact to the last digits also where it is nearly 0: there the hardware's logarithm has absolute errors only."""
    difference = (a - b) / b
    return tl.where(tl.abs(difference) < 0.25, difference - log_series(difference), tl.log2(a / b) * 0.6931471805599453)


@triton.jit
def mixed(share, complement, step, smaller):
    """(t - log(1 + t), log(1 + t), 1 + t) where 1 + t = share + complement · smaller; complement is 1 - share, which float32 would round."""
    t = -complement * step
    mixture = share + complement * smaller
    rest = log_series(t)
    close = tl.abs(t) < 0.25
    log = tl.log2(mixture) * 0.6931471805599453
    rest = tl.where(close, rest, t - log)
    return rest, tl.where(close, t - rest, log), mixture


@triton.jit
def mixed_slope(far, ahead, step, smaller, log, mixture, behind, beta, complement, of_teacher, of_student):
    """h of a mixture but for a constant, which is another one in rows where p/M of the student's largest class is nearly 0."""
    one = tl.where(ahead, 1.0, smaller)
    difference = complement * tl.where(ahead, step, -step)
    ratio = tl.where(behind, one, difference) / mixture
    factor = beta * of_student - complement * of_teacher
    return factor * ratio - of_student * (log + tl.where(ahead, far, 0.0))


@triton.jit
def even_terms(far):
    """(e^-far, log M, terms) where M = (1 + e^-far) / 2, all in units of the larger of p and q.

    The terms are twice the divergence, -(1 + e^-far) · log M - far · e^-far, which near 0 is e^(-far/2) times an even function of far, and
    log M is there log cosh(far/2) - far/2. The coefficients are those of the least relative error, which is below 1e-7.
    """
    root = tl.exp2(far * -0.7213475204444817)
    smaller = root * root
    log = 0.331652671 - smaller * (0.23766446 - smaller * (0.150801832 - smaller * 0.0562537405))
    log = smaller * (0.999997096 - smaller * (0.499887304 - smaller * log)) - 0.693147168
    square = far * far
    near = 0.124999994 - square * (0.00520808667 - square * (0.000345675389 - square * 0.0000231982289))
    close = far < 0.9
    log = tl.where(close, square * near - 0.5 * far, log)
    even = square * (0.25 + square * square * (0.000216487055 - square * 0.00000977985405))
    return smaller, log, tl.where(close, root * even, -log - smaller * (log + far))


@triton.jit
def first_slope(first, beta, complement, of_teacher, of_student, FORMULA: tl.constexpr):
    """h at the student's largest class, in units of `slope_unit`."""
    h = -first
    if FORMULA == KIND_VARIATION:
        h = tl.where(first == 0, 0.0, tl.where(first > 0, -0.5, 0.5))
    elif FORMULA == KIND_EVEN:
        far = tl.minimum(tl.abs(first), 800.0)
        _, log, _ = even_terms(far)
        h = -log - tl.where(first >= 0, far, 0.0)
    elif FORMULA == KIND_MIXTURE:
        ahead = first >= 0
        far = tl.minimum(tl.abs(first), 800.0)
        _, _, step, smaller = steps(far)
        _, log, mixture = mixed(tl.where(ahead, beta, complement), tl.where(ahead, complement, beta), step, smaller)
        h = mixed_slope(far, ahead, step, smaller, log, mixture, first < -0.7, beta, complement, of_teacher, of_student)
    return h


@triton.jit
def compared(below, beneath, offset, first, h, beta, complement, of_teacher, of_student, FORMULA: tl.constexpr):
    """(the terms of `added_up`, h less that of the student's largest class, q) of classes, or q · h for the forward KL.

    All but h are in units of 1/d of the student. As in liger_core/ops/_divergence.py: the larger of p and q times a function of
    far = |log p - log q|, by a series where it is small.
    """
    ours = below * 1.4426950408889634
    theirs = tl.fma(beneath, 1.4426950408889634, offset * 1.4426950408889634)
    # In this order classes of nearly equal distances are rounded alike, and their difference, of which h - h₀ is made, is exact.
    apart = (beneath - below) + offset
    if FORMULA == KIND_VARIATION:
        q = tl.exp2(ours)
        # e^apart - 1, for want of which p - q would lose digits.
        series = apart * (1.0 + apart * (0.5 + apart * (1.0 / 6 + apart * (1.0 / 24 + apart * (1.0 / 120)))))
        value = tl.abs(tl.where(tl.abs(apart) < 0.125, q * series, tl.exp2(theirs) - q))
        # -½, 0 or ½ less h, whatever the size of apart.
        slope = tl.minimum(tl.maximum(tl.fma(apart, -1e38, -h), -0.5 - h), 0.5 - h)
    elif FORMULA == KIND_EVEN:
        # e^-800 is 0, so that the cut changes nothing but ∞ · 0, and NaN where both are at -∞.
        far = tl.minimum(tl.abs(apart), 800.0)
        q = tl.exp2(ours)
        _, log, value = even_terms(far)
        value = tl.exp2(tl.maximum(ours, theirs)) * value
        slope = -(log + tl.where(apart >= 0, far, 0.0)) - h
    else:
        ahead = apart >= 0
        far = tl.abs(apart)
        larger = tl.exp2(tl.maximum(ours, theirs))
        if FORMULA == KIND_MIXTURE:
            # As above. The KLs may be infinite.
            far = tl.minimum(far, 800.0)
        over, under, step, smaller = steps(far)
        if FORMULA == KIND_FORWARD:
            value = tl.where(larger != 0, larger * tl.where(ahead, over, under), 0.0)
            slope = tl.where(larger != 0, tl.where(ahead, -larger, larger) * step, 0.0)
        elif FORMULA == KIND_MIXTURE:
            share = tl.where(ahead, beta, complement)
            rest, log, mixture = mixed(share, tl.where(ahead, complement, beta), step, smaller)
            # The smaller side's KL in units of larger, M - s + s · log(s / M); by its own series where M is close to s.
            above = share * step
            ratio = above / smaller
            of_other = tl.where(ratio < 0.25, smaller * log_series(ratio), above - smaller * (log + far))
            of_larger = tl.where(ahead, of_teacher, of_student)
            of_smaller = tl.where(ahead, of_student, of_teacher)
            value = larger * (of_larger * rest + of_smaller * of_other)
            slope = mixed_slope(far, ahead, step, smaller, log, mixture, first < -0.7, beta, complement, of_teacher, of_student) - h
        else:
            value = tl.where(larger != 0, larger * tl.where(ahead, under, over), 0.0)
            slope = first - apart
        q = tl.where(ahead, larger * smaller, larger)
    return value, slope, q


@triton.jit
def slope_unit(FORMULA: tl.constexpr):
    """What a slope of `compared` is counted in: EVEN has twice the slope."""
    return 0.5 if FORMULA == KIND_EVEN else 1.0


@triton.jit
def added_up(values, slopes, offset, inverse, FORMULA: tl.constexpr):
    """(divergence, Σ q (h - h₀)) of a row from the terms of its threads, of which VARIATION and EVEN have twice as much.

    A NaN among the logits of either side shows in the offset, the difference of the logarithms of both sums, if nowhere else.
    """
    total = tl.sum(tl.sum(values, 1), 0) * inverse * (0.5 if FORMULA >= KIND_VARIATION else 1.0)
    mean = tl.sum(tl.sum(slopes, 1), 0) * inverse * slope_unit(FORMULA)
    known = offset == offset
    return tl.where(known, total, offset), tl.where(known, mean, offset)


@triton.jit
def difference(below, inverse, beneath, their_inverse, offset):
    """q - p, by a series where they are nearly equal."""
    q = tl.exp2(below * 1.4426950408889634) * inverse
    p = tl.exp2(beneath * 1.4426950408889634) * their_inverse
    apart = (beneath - below) + offset
    series = 1.0 + apart * (0.5 + apart * (1.0 / 6 + apart * (1.0 / 24 + apart * (1.0 / 120 + apart * (1.0 / 720)))))
    return tl.where(tl.abs(apart) < 0.25, -q * apart * series, q - p)


@triton.jit
def pulled(slope, q, mean, inverse, FORMULA: tl.constexpr):
    """The gradient over x of the student."""
    mean = mean / slope_unit(FORMULA)
    inverse = inverse * slope_unit(FORMULA)
    if FORMULA == KIND_REVERSE:
        return tl.where(q != 0, q * (slope - mean), 0.0) * inverse
    else:
        return q * (slope - mean) * inverse


@triton.jit
def sharpened(below, sharp_inverse, column, label, temperature):
    """The gradient of the cross entropy: the softmax without temperature, less 1 at the label."""
    sharp = tl.exp2(below * temperature * 1.4426950408889634) * sharp_inverse
    return temperature * tl.where(column == label, sharp - 1.0, sharp)


@triton.jit
def moved(s, a, w, v, down, our_down):
    """The sums of `streamed` after the anchors grew by down (the teacher's) and our_down, to base 2.

    With α and β the factors of w and v, s becomes α · (a - δ · w - w) + β · v, or α · (s + (e^δ - 1) · (s - a) + (e^δ - 1 - δ) · w), whose
    parts are of second order as s is, and which loses no digits where δ is small.
    """
    alpha = tl.exp2(-down)
    beta = tl.exp2(-our_down)
    delta = (down - our_down) * 0.6931471805599453
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
    """The state of `streamed` with a block more."""
    m = tl.maximum(m, tl.max(x, 1))
    their_m = tl.maximum(their_m, tl.max(y, 1))
    # Where the sides are so far apart that e^mean could overflow, no digits cancel.
    mean += a / tl.maximum(w, 1e-30) * 1.4426950408889634
    mean = tl.where(mean > 24.0, 24.0, mean)
    top = m * scale - mean
    their_top = their_m * their_scale
    s, a, w, v = moved(s, a, w, v, their_top - their_anchor, top - anchor)
    # Rounded once, so that the anchors are exactly what is subtracted, and what logits have in common cancels.
    below = tl.fma(x, scale, -top[:, None])
    beneath = tl.fma(y, their_scale, -their_top[:, None])
    q = tl.exp2(below)
    p = tl.exp2(beneath)
    apart = beneath - below
    moment = p * apart
    near = 0.0138760271 - apart * (0.00192362582 - apart * 0.000222225968)
    near = 0.34657359 - apart * (0.0800755023 - apart * near)
    moment *= 0.6931471805599453
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
    HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PAIRED: tl.constexpr, HALF: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(KL(p ‖ q), m and d of the student, m and d of the teacher) by one read of a row. Infinite or NaN if a logit is; see the slow passes.

    With any anchors n, n' and w = e^(y - n'), v = e^(x - n), δ = (y - n') - (x - n):

        KL(p ‖ q) = s/W - (u - log(1 + u))        s = Σ (w · δ - w + v), W = Σ w, u = Σ (v - w) / W

    Terms of s are ≥ 0 and, as u², of second order in δ, so near agreement nothing cancels as long as the anchors are about as far apart as
    most classes are. Each thread has its own, near the maxima of what it read, at which the mean of δ under p was 0 until now; in the end all
    move to those of the row.
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
    # To base 2. The scale of a logit is part of the exponential's; what a cap gives has no scale left.
    scale = 1.4426950408889634
    their = 1.4426950408889634
    if not HAS_SOFTCAP:
        scale *= logit_scale
    if not TEACHER_SOFTCAP:
        their *= their_scale
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
    # Selected, so that no product is fused into a sum of two threads, of which each would fuse its own.
    exp_sum = tl.sum(tl.where(v > 0, tl.exp2(-our_down) * v, v), 0)
    alpha = tl.exp2(-down)
    their_sum = tl.sum(tl.where(w > 0, alpha * w, w), 0)
    moment = alpha * (a * 1.4426950408889634 + (our_down - down) * w)
    mean = tl.sum(tl.where(w > 0, moment, w), 0) / their_sum
    mean = tl.where(mean > 24.0, 24.0, mean)
    s, a, w, v = moved(s, a, w, v, down, our_down - mean)
    u = tl.sum(s - a, 0) / their_sum
    log = tl.log2(tl.sum(tl.where(v > 0, v, 0.0), 0) / their_sum) * 0.6931471805599453
    divergence = tl.where(tl.abs(u) < 0.25, tl.sum(s, 0) / their_sum - log_series(u), tl.sum(a, 0) / their_sum + log)
    # The moments have maxima of x itself.
    exp_sum *= tl.exp2(-tl.fma(top, scale, -highest))
    their_sum *= tl.exp2(-tl.fma(their_top, their, -their_highest))
    if not HAS_SOFTCAP:
        rounded = top * logit_scale
        exp_sum *= tl.exp2(tl.fma(top, logit_scale, -rounded) * 1.4426950408889634)
        top = rounded
    if not TEACHER_SOFTCAP:
        rounded = their_top * their_scale
        their_sum *= tl.exp2(tl.fma(their_top, their_scale, -rounded) * 1.4426950408889634)
        their_top = rounded
    return divergence, top, exp_sum, their_top, their_sum


@triton.jit
def divergence_kernel(
    student, teacher, target, row_factor, loss, moments, row_stride, their_stride, factor_stride, width,
    ignore_index, beta, complement, of_teacher, of_student, temperature, hard_weight, logit_scale, softcap, their_scale, their_softcap,
    FORMULA: tl.constexpr, HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PARTIAL: tl.constexpr,
    PLAIN: tl.constexpr, PAIRED: tl.constexpr, GRADIENT: tl.constexpr, ONE_READ: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program takes one row: maximum and sum of both sides, then the loss, then, if asked, the gradient over the student's logits.

    A thread takes VECTOR neighbors at a time and keeps its own maximum and sum; threads meet only once a row. The forward KL needs no
    Σ q h, so that its gradient is written while its terms are added.
    """
    row = tl.program_id(0).to(tl.int64)
    base = student + row * row_stride
    theirs = teacher + row * their_stride
    moments += 7 * row
    lane = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    label = 0
    factor = logit_scale
    if target is not None:
        label = tl.load(target + row)
        if label == ignore_index:
            number = tl.arange(0, 8)
            tl.store(loss + row, 0.0)
            tl.store(moments + number, ((number == 1) | (number == 3) | (number == 6)).to(tl.float32), mask=number < 7)
            if GRADIENT:
                for start in range(0, width, BLOCK):
                    column = start + lane
                    tl.store(base + column, tl.zeros((BLOCK // VECTOR, VECTOR), dtype=student.dtype.element_ty), mask=column < width)
            return
    if ONE_READ:
        total, top, exp_sum, their_top, their_sum = streamed(
            base, theirs, width, logit_scale, softcap, their_scale, their_softcap, HAS_SOFTCAP, TEACHER_SOFTCAP, PAIRED, BLOCK // 2, VECTOR
        )
        # Else a logit is infinite, NaN or nearly as large as a float can be: the passes below know what to make of it.
        if tl.abs(total) < float("inf"):
            tl.store(loss + row, total)
            tl.store(moments, top)
            tl.store(moments + 1, exp_sum)
            tl.store(moments + 2, their_top)
            tl.store(moments + 3, their_sum)
            tl.store(moments + 4, their_top)
            tl.store(moments + 5, 0.0)
            tl.store(moments + 6, 1.0)
            return
    if row_factor is not None:
        factor = factor * tl.load(row_factor + row * factor_stride).to(tl.float32)
    if PLAIN and not HARD:
        top, exp_sum, their_top, their_sum, their_first = quick_statistics(base, theirs, width, BLOCK, VECTOR, PAIRED)
        if not ((exp_sum > 0) & (exp_sum < float("inf")) & (their_sum > 0) & (their_sum < float("inf"))):
            top, exp_sum, their_top, their_sum, their_first, _ = statistics(
                base, theirs, width, temperature, logit_scale, softcap, their_scale, their_softcap,
                FORMULA, HARD, HAS_SOFTCAP, TEACHER_SOFTCAP, PLAIN, BLOCK, VECTOR,
            )  # fmt: skip
        sharp_sum = 1.0
    else:
        top, exp_sum, their_top, their_sum, their_first, sharp_sum = statistics(
            base, theirs, width, temperature, logit_scale, softcap, their_scale, their_softcap,
            FORMULA, HARD, HAS_SOFTCAP, TEACHER_SOFTCAP, PLAIN, BLOCK, VECTOR,
        )  # fmt: skip
    inverse = 1.0 / exp_sum
    sharp_inverse = 1.0 / sharp_sum
    apart = log_ratio(exp_sum, their_sum)
    first = (their_first - their_top) + apart
    h = first_slope(first, beta, complement, of_teacher, of_student, FORMULA)
    in_range = (label >= 0) & (label < width)
    chosen = 0.0
    if HARD:
        factor = tl.where(in_range, factor, float("nan"))
        chosen = capped(tl.load(base + tl.where(in_range, label, 0)), logit_scale, softcap, HAS_SOFTCAP)
    values = tl.zeros((BLOCK // VECTOR, VECTOR), dtype=tl.float32)
    slopes = tl.zeros((BLOCK // VECTOR, VECTOR), dtype=tl.float32)
    whole = width // BLOCK * BLOCK if PLAIN and not (GRADIENT and FORMULA == KIND_FORWARD) else 0
    for start in range(whole, width, BLOCK):
        column = start + lane
        mask = column < width
        x, y = both(
            base, theirs, column, width, logit_scale, softcap, their_scale, their_softcap,
            HAS_SOFTCAP, TEACHER_SOFTCAP, PLAIN, "evict_last",
        )  # fmt: skip
        value, slope, q = compared(x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA)
        values += value
        slopes = summed(slopes, slope, q, FORMULA)
        if GRADIENT and FORMULA == KIND_FORWARD:
            pull = slope * inverse
            if HARD:
                pull = (1.0 - hard_weight) * pull + hard_weight * sharpened(x - top, sharp_inverse, column, label, temperature)
            pull = pull * factor
            if HAS_SOFTCAP:
                u = tl.where(mask, x * (1.0 / softcap), 0.0)
                pull = pull * (1.0 - u * u)
            tl.store(base + column, pull.to(student.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    # Backward: what was read last is still in the caches, of which a long row fills more than there is.
    for back in range(BLOCK, whole + BLOCK, BLOCK):
        x = neighbors(base + (whole - back), BLOCK // VECTOR, VECTOR, PAIRED, "evict_last" if GRADIENT else "evict_first")
        y = neighbors(theirs + (whole - back), BLOCK // VECTOR, VECTOR, PAIRED, "evict_last" if GRADIENT else "evict_first")
        value, slope, q = compared(x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA)
        values += value
        slopes = summed(slopes, slope, q, FORMULA)
    total, mean = added_up(values, slopes, apart, inverse, FORMULA)
    if HARD:
        hard = tl.log2(sharp_sum) * 0.6931471805599453 - (chosen - top) * temperature
        total = (1.0 - hard_weight) * total + hard_weight * tl.where(in_range, hard, float("nan"))
    tl.store(loss + row, total)
    tl.store(moments, top)
    tl.store(moments + 1, exp_sum)
    tl.store(moments + 2, their_top)
    tl.store(moments + 3, their_sum)
    tl.store(moments + 4, their_first)
    tl.store(moments + 5, mean)
    tl.store(moments + 6, sharp_sum)
    if GRADIENT and FORMULA != KIND_FORWARD:
        for start in range(0, width, BLOCK):
            column = start + lane
            mask = column < width
            x = capped(tl.load(base + column, mask=mask, other=0.0, eviction_policy="evict_first"), logit_scale, softcap, HAS_SOFTCAP)
            y = tl.load(theirs + column, mask=mask, other=0.0, eviction_policy="evict_first")
            y = capped(y, their_scale, their_softcap, TEACHER_SOFTCAP)
            x = tl.where(mask, x, 0.0)
            y = tl.where(mask, y, 0.0)
            _, slope, q = compared(x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA)
            pull = pulled(slope, q, mean, inverse, FORMULA)
            if HARD:
                pull = (1.0 - hard_weight) * pull + hard_weight * sharpened(x - top, sharp_inverse, column, label, temperature)
            pull = pull * factor
            if HAS_SOFTCAP:
                u = x * (1.0 / softcap)
                pull = pull * (1.0 - u * u)
            tl.store(base + column, pull.to(student.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def gradient_kernel(
    student, teacher, target, row_factor, moments, out, row_stride, their_stride, factor_stride, out_stride, width,
    ignore_index, beta, complement, of_teacher, of_student, temperature, hard_weight, logit_scale, softcap, their_scale, their_softcap,
    FORMULA: tl.constexpr, HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PARTIAL: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one block of one row's gradient, from the moments that the forward pass kept.

    PARTIAL: a label that is none of these classes is another rank's.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    label = 0
    factor = logit_scale * tl.load(row_factor + row * factor_stride).to(tl.float32)
    if target is not None:
        label = tl.load(target + row)
        if label == ignore_index:
            tl.store(out + row * out_stride + column, tl.zeros((BLOCK,), dtype=out.dtype.element_ty), mask=mask)
            return
    if HARD and not PARTIAL:
        factor = tl.where((label >= 0) & (label < width), factor, float("nan"))
    moments += 7 * row
    exp_sum = tl.load(moments + 1)
    their_sum = tl.load(moments + 3)
    apart = log_ratio(exp_sum, their_sum)
    x = tl.load(student + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(teacher + row * their_stride + column, mask=mask, other=0.0).to(tl.float32)
    if not PLAIN:
        # The mask keeps the product that x may be from being fused into x - m, where m is a rounded one.
        x = tl.where(mask, capped(x, logit_scale, softcap, HAS_SOFTCAP), 0.0)
        y = tl.where(mask, capped(y, their_scale, their_softcap, TEACHER_SOFTCAP), 0.0)
    below = x - tl.load(moments)
    their_top = tl.load(moments + 2)
    beneath = y - their_top
    if FORMULA == KIND_FORWARD:
        pull = difference(below, 1.0 / exp_sum, beneath, 1.0 / their_sum, apart)
    else:
        first = (tl.load(moments + 4) - their_top) + apart
        h = first_slope(first, beta, complement, of_teacher, of_student, FORMULA)
        _, slope, q = compared(below, beneath, apart, first, h, beta, complement, of_teacher, of_student, FORMULA)
        pull = pulled(slope, q, tl.load(moments + 5), (1.0 if HARD else factor) / exp_sum, FORMULA)
    if HARD:
        sharp_inverse = 1.0 / tl.load(moments + 6)
        pull = (1.0 - hard_weight) * pull + hard_weight * sharpened(below, sharp_inverse, column, label, temperature)
    if HARD or FORMULA == KIND_FORWARD:
        pull = pull * factor
    if HAS_SOFTCAP:
        u = x * (1.0 / softcap)
        pull = pull * (1.0 - u * u)
    tl.store(out + row * out_stride + column, pull.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sums_kernel(
    student, teacher, target, moments, out, row_stride, their_stride, width,
    ignore_index, beta, complement, of_teacher, of_student, temperature, hard_weight, logit_scale, softcap, their_scale, their_softcap,
    FORMULA: tl.constexpr, HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PARTIAL: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program adds up one row over a part of its classes, given the moments of all: the divergence, q · (h - h₀), and x of the target."""
    row = tl.program_id(0).to(tl.int64)
    base = student + row * row_stride
    theirs = teacher + row * their_stride
    out += 3 * row
    label = 0
    if target is not None:
        label = tl.load(target + row)
        if label == ignore_index:
            number = tl.arange(0, 4)
            tl.store(out + number, tl.zeros((4,), dtype=tl.float32), mask=number < 3)
            return
    moments += 7 * row
    top = tl.load(moments)
    exp_sum = tl.load(moments + 1)
    their_top = tl.load(moments + 2)
    their_sum = tl.load(moments + 3)
    apart = log_ratio(exp_sum, their_sum)
    first = (tl.load(moments + 4) - their_top) + apart
    h = first_slope(first, beta, complement, of_teacher, of_student, FORMULA)
    values = tl.zeros((BLOCK // VECTOR, VECTOR), dtype=tl.float32)
    slopes = tl.zeros((BLOCK // VECTOR, VECTOR), dtype=tl.float32)
    lane = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in range(0, width, BLOCK):
        x, y = both(
            base, theirs, start + lane, width, logit_scale, softcap, their_scale, their_softcap,
            HAS_SOFTCAP, TEACHER_SOFTCAP, PLAIN, "evict_first",
        )  # fmt: skip
        value, slope, q = compared(x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA)
        values += value
        slopes = summed(slopes, slope, q, FORMULA)
    total, mean = added_up(values, slopes, apart, 1.0 / exp_sum, FORMULA)
    chosen = 0.0
    if HARD:
        inside = (label >= 0) & (label < width)
        x = capped(tl.load(base + tl.where(inside, label, 0)), logit_scale, softcap, HAS_SOFTCAP)
        chosen = tl.where(inside, x, 0.0)
    tl.store(out, total)
    tl.store(out + 1, mean)
    tl.store(out + 2, chosen)


divergence_launch = Launcher(divergence_kernel)
sums_launch = Launcher(sums_kernel)
gradient_launch = Launcher(gradient_kernel)
