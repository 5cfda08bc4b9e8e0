# SPDX-License-Identifier: Apache-2.0
"""The formulas of the divergences in Triton: terms and slopes of classes, from the maximum and sum of both rows."""

import triton
import triton.language as tl

from liger_core.ops import _divergence as formulas
from liger_core.ops._divergence import FORWARD, MIXTURE, REVERSE, VARIATION
from liger_triton._constants import LN2, LOG2E

# Besides liger_core's formulas: the Jensen-Shannon divergence with beta 1/2, which is even in log p - log q.
EVEN = 1 + max(FORWARD, REVERSE, MIXTURE, VARIATION)
KIND_FORWARD, KIND_REVERSE, KIND_MIXTURE = tl.constexpr(FORWARD), tl.constexpr(REVERSE), tl.constexpr(MIXTURE)
KIND_VARIATION, KIND_EVEN = tl.constexpr(VARIATION), tl.constexpr(EVEN)
FAR, BEHIND = tl.constexpr(formulas.FAR), tl.constexpr(formulas.BEHIND)


@triton.jit
def summed(slopes, slope, q, FORMULA: tl.constexpr):
    """Return Σ q · h of each thread. Only the slope of the reverse KL may be infinite."""
    if FORMULA == KIND_REVERSE:
        slopes += tl.where(q != 0, q * slope, 0.0)
    elif FORMULA != KIND_FORWARD:
        slopes += q * slope
    return slopes


@triton.jit
def steps(far):
    """Return (far - 1 + e, 1 - e - far · e, 1 - e, e), where e = e^-far.

    The first is about far²/2 near 0, and the others follow from it exactly.
    """
    smaller = tl.exp2(far * -LOG2E)
    near = far < 0.5
    over = (
        0.5 * far * far * (1.0 - far * (1.0 / 3 - far * (1.0 / 12 - far * (1.0 / 60 - far * (1.0 / 360 - far / 2520)))))
    )
    over = tl.where(near, over, far - 1.0 + smaller)
    step = tl.where(near, far - over, 1.0 - smaller)
    under = tl.where(near, far * step - over, step - smaller * tl.where(far > FAR, FAR, far))
    return over, under, step, smaller


@triton.jit
def log_series(t):
    """Return t - log(1 + t) for a small t, with s = t / (2 + t)."""
    s = t / (2.0 + t)
    square = s * s
    return t * s - 2.0 * s * square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))))


@triton.jit
def log_ratio(a, b):
    """Return log(a / b), accurate to the last digits even near 0, where the hardware's logarithm is not."""
    difference = (a - b) / b
    return tl.where(tl.abs(difference) < 0.25, difference - log_series(difference), tl.log2(a / b) * LN2)


@triton.jit
def mixed(share, complement, step, smaller):
    """Return (t - log(1 + t), log(1 + t), 1 + t), where 1 + t = share + complement · smaller.

    complement is 1 - share, which float32 would round.
    """
    t = -complement * step
    mixture = share + complement * smaller
    rest = log_series(t)
    close = tl.abs(t) < 0.25
    log = tl.log2(mixture) * LN2
    rest = tl.where(close, rest, t - log)
    return rest, tl.where(close, t - rest, log), mixture


@triton.jit
def mixed_slope(far, ahead, step, smaller, log, mixture, behind, beta, complement, of_teacher, of_student):
    """Return h of a mixture up to a constant, which differs if p/M of the student's largest class is nearly 0."""
    p = tl.where(ahead, 1.0, smaller)
    difference = complement * tl.where(ahead, step, -step)
    ratio = tl.where(behind, p, difference) / mixture
    factor = beta * of_student - complement * of_teacher
    return factor * ratio - of_student * (log + tl.where(ahead, far, 0.0))


@triton.jit
def even_terms(far):
    """Return (e^-far, log M, terms), where M = (1 + e^-far) / 2, all in units of the larger of p and q.

    The terms are twice the divergence, -(1 + e^-far) · log M - far · e^-far. Near 0, they are e^(-far/2) times an even
    function of far, and log M is log cosh(far/2) - far/2. The coefficients minimize the relative error, to below 1e-7.
    """
    root = tl.exp2(far * (-0.5 * LOG2E))
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
    """Return h at the student's largest class, in units of `slope_unit`."""
    h = -first
    if FORMULA == KIND_VARIATION:
        h = tl.where(first == 0, 0.0, tl.where(first > 0, -0.5, 0.5))
    elif FORMULA == KIND_EVEN:
        far = tl.minimum(tl.abs(first), FAR)
        _, log, _ = even_terms(far)
        h = -log - tl.where(first >= 0, far, 0.0)
    elif FORMULA == KIND_MIXTURE:
        ahead = first >= 0
        far = tl.minimum(tl.abs(first), FAR)
        _, _, step, smaller = steps(far)
        _, log, mixture = mixed(tl.where(ahead, beta, complement), tl.where(ahead, complement, beta), step, smaller)
        h = mixed_slope(
            far, ahead, step, smaller, log, mixture, first < BEHIND, beta, complement, of_teacher, of_student
        )
    return h


@triton.jit
def compared(below, beneath, offset, first, h, beta, complement, of_teacher, of_student, FORMULA: tl.constexpr):
    """Return (terms of `added_up`, h minus h of the student's largest class, q) of classes; for the forward KL, q · h.

    All but h are in units of 1/d of the student. As in liger_core/ops/_divergence.py: the larger of p and q times a
    function of far = |log p - log q|, by a series where it is small.
    """
    ours = below * LOG2E
    theirs = tl.fma(beneath, LOG2E, offset * LOG2E)
    # In this order, classes at nearly equal distances are rounded alike, and the difference h - h₀ is exact.
    apart = (beneath - below) + offset
    if FORMULA == KIND_VARIATION:
        q = tl.exp2(ours)
        # e^apart - 1 by its series, because p - q would cancel.
        series = apart * (1.0 + apart * (0.5 + apart * (1.0 / 6 + apart * (1.0 / 24 + apart * (1.0 / 120)))))
        value = tl.abs(tl.where(tl.abs(apart) < 0.125, q * series, tl.exp2(theirs) - q))
        # -½, 0 or ½, minus h, for every size of apart.
        slope = tl.minimum(tl.maximum(tl.fma(apart, -1e38, -h), -0.5 - h), 0.5 - h)
    elif FORMULA == KIND_EVEN:
        # The cut also replaces NaN, where both are at -∞.
        far = tl.minimum(tl.abs(apart), FAR)
        q = tl.exp2(ours)
        _, log, value = even_terms(far)
        value = tl.exp2(tl.maximum(ours, theirs)) * value
        slope = -(log + tl.where(apart >= 0, far, 0.0)) - h
    else:
        ahead = apart >= 0
        far = tl.abs(apart)
        larger = tl.exp2(tl.maximum(ours, theirs))
        if FORMULA == KIND_MIXTURE:
            # The KLs may be infinite.
            far = tl.minimum(far, FAR)
        over, under, step, smaller = steps(far)
        if FORMULA == KIND_FORWARD:
            value = tl.where(larger != 0, larger * tl.where(ahead, over, under), 0.0)
            slope = tl.where(larger != 0, tl.where(ahead, -larger, larger) * step, 0.0)
        elif FORMULA == KIND_MIXTURE:
            share = tl.where(ahead, beta, complement)
            rest, log, mixture = mixed(share, tl.where(ahead, complement, beta), step, smaller)
            # The smaller side's KL in units of larger, M - s + s · log(s / M), by a series where M is close to s.
            above = share * step
            ratio = above / smaller
            of_other = tl.where(ratio < 0.25, smaller * log_series(ratio), above - smaller * (log + far))
            of_larger = tl.where(ahead, of_teacher, of_student)
            of_smaller = tl.where(ahead, of_student, of_teacher)
            value = larger * (of_larger * rest + of_smaller * of_other)
            slope = (
                mixed_slope(
                    far, ahead, step, smaller, log, mixture, first < BEHIND, beta, complement, of_teacher, of_student
                )
                - h
            )
        else:
            value = tl.where(larger != 0, larger * tl.where(ahead, under, over), 0.0)
            slope = first - apart
        q = tl.where(ahead, larger * smaller, larger)
    return value, slope, q


@triton.jit
def slope_unit(FORMULA: tl.constexpr):
    """Return the unit of the slopes of `compared`: EVEN computes twice the slope."""
    return 0.5 if FORMULA == KIND_EVEN else 1.0


@triton.jit
def added_up(values, slopes, offset, inverse, FORMULA: tl.constexpr):
    """Return (divergence, Σ q (h - h₀)) of a row from the terms of its threads, which VARIATION and EVEN double.

    A NaN among the logits always shows in the offset, the difference of the logarithms of both sums.
    """
    total = tl.sum(tl.sum(values, 1), 0) * inverse * (0.5 if FORMULA >= KIND_VARIATION else 1.0)
    mean = tl.sum(tl.sum(slopes, 1), 0) * inverse * slope_unit(FORMULA)
    known = offset == offset
    return tl.where(known, total, offset), tl.where(known, mean, offset)


@triton.jit
def difference(below, inverse, beneath, their_inverse, offset):
    """Return q - p, by a series where they are nearly equal."""
    q = tl.exp2(below * LOG2E) * inverse
    p = tl.exp2(beneath * LOG2E) * their_inverse
    apart = (beneath - below) + offset
    series = 1.0 + apart * (0.5 + apart * (1.0 / 6 + apart * (1.0 / 24 + apart * (1.0 / 120 + apart * (1.0 / 720)))))
    return tl.where(tl.abs(apart) < 0.25, -q * apart * series, q - p)


@triton.jit
def pulled(slope, q, mean, inverse, FORMULA: tl.constexpr):
    """Return the gradient with respect to the student's x."""
    mean = mean / slope_unit(FORMULA)
    inverse = inverse * slope_unit(FORMULA)
    if FORMULA == KIND_REVERSE:
        return tl.where(q != 0, q * (slope - mean), 0.0) * inverse
    else:
        return q * (slope - mean) * inverse


@triton.jit
def sharpened(below, sharp_inverse, column, label, temperature):
    """Return the gradient of the cross entropy: the softmax without temperature, minus 1 at the label."""
    sharp = tl.exp2(below * temperature * LOG2E) * sharp_inverse
    return temperature * tl.where(column == label, sharp - 1.0, sharp)


@triton.jit
def of_logits(
    pull, below, x, factor, sharp_inverse, column, label, temperature, hard_weight, softcap,
    HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Turn the gradient of the divergence over x into that of the loss over the logits."""
    if HARD:
        pull = (1.0 - hard_weight) * pull + hard_weight * sharpened(below, sharp_inverse, column, label, temperature)
    pull = pull * factor
    if HAS_SOFTCAP:
        u = x * (1.0 / softcap)
        pull = pull * (1.0 - u * u)
    return pull
