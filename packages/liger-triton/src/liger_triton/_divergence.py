# SPDX-License-Identifier: Apache-2.0
"""The row passes of the divergences in Triton: two rows of logits, compared by one program."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.ops._divergence import FORWARD, MIXTURE, DivergenceOptions, DivergenceResults
from liger_triton._constants import LN2
from liger_triton._divergence_rows import both, neighbors, quick_statistics, statistics
from liger_triton._divergence_streamed import streamed
from liger_triton._divergence_terms import (
    EVEN,
    KIND_FORWARD,
    added_up,
    compared,
    difference,
    first_slope,
    log_ratio,
    of_logits,
    pulled,
    summed,
)
from liger_triton._logits import GRADIENT, capped
from liger_triton._softmax_loss import TritonPasses
from liger_triton.launch import VECTOR, Launcher, cdiv, fuses, power_of_two, registers, rows_of


class RowShape(NamedTuple):
    """Columns of a block, warps, neighbors that a thread takes, and the most registers of a thread if that many cost
    too many warps."""

    block: int
    warps: int
    vector: int
    registers: int | None = None


# Milliseconds on one H200, 8192 rows of 40 960 · 128 256 classes in bfloat16 forward, with STREAMED and with MIXED: KL
# by one read .370 · 1.109 and .435 · 1.335, total variation .560 · 1.871 and .614 · 1.991, reverse KL .772 · 2.428 and
# .834 · 2.639, JSD .828 · 2.578 and .794 · 2.452. Without the bound on registers STREAMED takes up to a third more. A
# kernel that does nothing but read each row twice takes .36 · 1.57 at best.
STREAMED, MIXED = RowShape(4096, 8, VECTOR, 64), RowShape(2048, 8, VECTOR // 2)


class TritonDivergencePasses(TritonPasses):
    """One program a row, which reads both sides once for the forward KL alone, else two or three times; but for the
    first from the L2 cache."""

    def divergences(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, results: DivergenceResults,
        options: DivergenceOptions, row_factor: Tensor | None, gradient: bool,
    ) -> None:  # fmt: skip
        rows, width = student.shape
        student, teacher = student if gradient else rows_of(student), rows_of(teacher)
        # A positive scale keeps the largest logit the largest. A gradient written here takes a second read anyway, and
        # the caches hold a narrow row.
        one_read = options.formula == FORWARD and not gradient and not options.hard_weight and width > STREAMED.block
        one_read = one_read and options.logit_scale > 0 and options.teacher_logit_scale > 0
        shape = MIXED if options.formula == MIXTURE else STREAMED
        block = max(2, min(shape.block, power_of_two(width)))
        vector = min(shape.vector, block // 2)
        divergence_launch(
            (rows,), student, teacher, None if target is None else target.contiguous(), row_factor, results.loss,
            results.moments,
            student.stride(0), teacher.stride(0), 0 if row_factor is None else row_factor.stride(0), width,
            *_scalars(options),
            **_forms(options), PAIRED=vector > 1 and _paired(student) and _paired(teacher), GRADIENT=gradient,
            ONE_READ=one_read,
            BLOCK=block, VECTOR=vector, num_warps=shape.warps, enable_fp_fusion=fuses(block),
            **registers(shape.registers, student),
        )  # fmt: skip

    def divergence_gradients(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, moments: Tensor, row_factor: Tensor,
        options: DivergenceOptions, out: Tensor,
    ) -> None:  # fmt: skip
        rows, width = student.shape
        student, teacher = rows_of(student), rows_of(teacher)
        block = min(GRADIENT.block, power_of_two(width))
        gradient_launch(
            (rows, cdiv(width, block)), student, teacher, None if target is None else target.contiguous(), row_factor,
            moments, out,
            student.stride(0), teacher.stride(0), row_factor.stride(0), out.stride(0), width, *_scalars(options),
            **_forms(options), BLOCK=block, num_warps=GRADIENT.warps,
        )  # fmt: skip

    def divergence_sums(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, moments: Tensor, options: DivergenceOptions,
        out: Tensor,
    ) -> None:  # fmt: skip
        rows, width = student.shape
        student, teacher = rows_of(student), rows_of(teacher)
        block = min(MIXED.block, power_of_two(width))
        sums_launch(
            (rows,), student, teacher, None if target is None else target.contiguous(), moments, out, student.stride(0),
            teacher.stride(0),
            width, *_scalars(options), **_forms(options), BLOCK=block, VECTOR=min(MIXED.vector, block),
            num_warps=MIXED.warps,
        )  # fmt: skip


PASSES = TritonDivergencePasses()


def _scalars(options: DivergenceOptions) -> tuple[int | float, ...]:
    return (
        options.ignore_index, options.beta, 1.0 - options.beta, options.of_teacher, options.of_student,
        options.temperature, options.hard_weight,
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
def store_moments(moments, top, exp_sum, their_top, their_sum, their_first, mean, sharp_sum):
    """Store the numbers of a row that its gradient is made of."""
    tl.store(moments, top)
    tl.store(moments + 1, exp_sum)
    tl.store(moments + 2, their_top)
    tl.store(moments + 3, their_sum)
    tl.store(moments + 4, their_first)
    tl.store(moments + 5, mean)
    tl.store(moments + 6, sharp_sum)


@triton.jit
def divergence_kernel(
    student, teacher, target, row_factor, loss, moments, row_stride, their_stride, factor_stride, width, ignore_index,
    beta, complement, of_teacher, of_student, temperature, hard_weight, logit_scale, softcap, their_scale,
    their_softcap, FORMULA: tl.constexpr, HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr, PLAIN: tl.constexpr, PAIRED: tl.constexpr, GRADIENT: tl.constexpr, ONE_READ: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program takes one row: maximum and sum of both sides, then the loss, then, if asked, the gradient over the
    student's logits.

    A thread takes VECTOR neighbors at a time and keeps its own maximum and sum; threads meet only once a row. The
    forward KL needs no Σ q h, so that its gradient is written while its terms are added.
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
                nothing = tl.zeros((BLOCK // VECTOR, VECTOR), dtype=student.dtype.element_ty)
                for start in range(0, width, BLOCK):
                    tl.store(base + start + lane, nothing, mask=start + lane < width)
            return
    if ONE_READ:
        total, top, exp_sum, their_top, their_sum = streamed(
            base, theirs, width, logit_scale, softcap, their_scale, their_softcap,
            HAS_SOFTCAP, TEACHER_SOFTCAP, PAIRED, BLOCK // 2, VECTOR,
        )  # fmt: skip
        # Else a logit is infinite, NaN or nearly as large as a float can be: the passes below know what to make of it.
        if tl.abs(total) < float("inf"):
            tl.store(loss + row, total)
            store_moments(moments, top, exp_sum, their_top, their_sum, their_top, 0.0, 1.0)
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
        value, slope, q = compared(
            x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA
        )
        values += value
        slopes = summed(slopes, slope, q, FORMULA)
        if GRADIENT and FORMULA == KIND_FORWARD:
            pull = of_logits(
                slope * inverse, x - top, tl.where(mask, x, 0.0), factor, sharp_inverse, column, label,
                temperature, hard_weight, softcap, HARD, HAS_SOFTCAP,
            )  # fmt: skip
            tl.store(base + column, pull.to(student.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    # Backward: what was read last is still in the caches, of which a long row fills more than there is.
    for back in range(BLOCK, whole + BLOCK, BLOCK):
        first_column = whole - back
        x = neighbors(base + first_column, BLOCK // VECTOR, VECTOR, PAIRED, "evict_last" if GRADIENT else "evict_first")
        y = neighbors(
            theirs + first_column, BLOCK // VECTOR, VECTOR, PAIRED, "evict_last" if GRADIENT else "evict_first"
        )
        value, slope, q = compared(
            x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA
        )
        values += value
        slopes = summed(slopes, slope, q, FORMULA)
    total, mean = added_up(values, slopes, apart, inverse, FORMULA)
    if HARD:
        hard = tl.log2(sharp_sum) * LN2 - (chosen - top) * temperature
        total = (1.0 - hard_weight) * total + hard_weight * tl.where(in_range, hard, float("nan"))
    tl.store(loss + row, total)
    store_moments(moments, top, exp_sum, their_top, their_sum, their_first, mean, sharp_sum)
    if GRADIENT and FORMULA != KIND_FORWARD:
        for start in range(0, width, BLOCK):
            column = start + lane
            mask = column < width
            x = tl.load(base + column, mask=mask, other=0.0, eviction_policy="evict_first")
            x = capped(x, logit_scale, softcap, HAS_SOFTCAP)
            y = tl.load(theirs + column, mask=mask, other=0.0, eviction_policy="evict_first")
            y = capped(y, their_scale, their_softcap, TEACHER_SOFTCAP)
            x = tl.where(mask, x, 0.0)
            y = tl.where(mask, y, 0.0)
            _, slope, q = compared(
                x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA
            )
            pull = of_logits(
                pulled(slope, q, mean, inverse, FORMULA), x - top, x, factor, sharp_inverse, column, label,
                temperature, hard_weight, softcap, HARD, HAS_SOFTCAP,
            )  # fmt: skip
            tl.store(base + column, pull.to(student.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def gradient_kernel(
    student, teacher, target, row_factor, moments, out, row_stride, their_stride, factor_stride, out_stride, width,
    ignore_index, beta, complement, of_teacher, of_student, temperature, hard_weight, logit_scale, softcap, their_scale,
    their_softcap, FORMULA: tl.constexpr, HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr,
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
    pull = of_logits(
        pull, below, x, factor if HARD or FORMULA == KIND_FORWARD else 1.0, 1.0 / tl.load(moments + 6) if HARD else 1.0,
        column, label, temperature, hard_weight, softcap, HARD, HAS_SOFTCAP,
    )  # fmt: skip
    tl.store(out + row * out_stride + column, pull.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sums_kernel(
    student, teacher, target, moments, out, row_stride, their_stride, width, ignore_index, beta, complement, of_teacher,
    of_student, temperature, hard_weight, logit_scale, softcap, their_scale, their_softcap, FORMULA: tl.constexpr,
    HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PARTIAL: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program adds up one row over a part of its classes, given the moments of all: the divergence, q · (h - h₀),
    and x of the target."""
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
        value, slope, q = compared(
            x - top, y - their_top, apart, first, h, beta, complement, of_teacher, of_student, FORMULA
        )
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
