# SPDX-License-Identifier: Apache-2.0
"""The row mathematics that the divergences share, and its pure-PyTorch implementation.

For one row, p is the softmax of the teacher's x and q that of the student's, where

    x = logit_scale · a, then softcap · tanh(x / softcap), then x / temperature          M = beta · p + (1 - beta) · q

    forward_kl           KL(p ‖ q)                 reverse_kl           KL(q ‖ p)
    skewed_kl            KL(p ‖ M)                 skewed_reverse_kl    KL(q ‖ M)
    jsd                  beta · KL(p ‖ M) + (1 - beta) · KL(q ‖ M)
    total_variation      ½ Σ |p - q|

Each is Σ f(p, q), and its gradient over the student's x is q · (h - Σ q h) with h = ∂f/∂q. A few rules keep it exact:

* What a row needs of each side are m = max x and d = Σ e^(x - m). Everything else follows from u = log p - log q, a
  difference of differences x - m, whose size does not depend on that of the logits.
* KL(p ‖ M) is summed as Σ (p log(p/M) - p + M), which adds 0 and makes every term ≥ 0. Near p = q nothing cancels, and
  a round-off of d enters squared.
* Of p and q the larger one is factored out, so that the rest is a function of e^-|u| ≤ 1 and cannot overflow.
* h is taken less its value h₀ at the student's largest x. Where that class has nearly all of q, its gradient
  q · (h - Σ q h) would otherwise be the difference of two equal numbers.
* A class at -inf on both sides counts for nothing. At -inf for the student alone it makes KL(p ‖ q) infinite, for the
  teacher alone KL(q ‖ p).
"""

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.op import accumulator
from liger_core.ops._inputs import row_blocks
from liger_core.ops._softmax_loss import RowPasses
from liger_core.ops._token_passes import capped

Kind = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "skewed_kl", "skewed_reverse_kl"]
KINDS: tuple[Kind, ...] = ("forward_kl", "reverse_kl", "jsd", "total_variation", "skewed_kl", "skewed_reverse_kl")
# Those that have a mixture.
MIXED: tuple[Kind, ...] = ("jsd", "skewed_kl", "skewed_reverse_kl")
# Formulas of the row passes: the two KL, all that have a mixture, total variation.
FORWARD, REVERSE, MIXTURE, VARIATION = range(4)
# Numbers a row in the moments: m and d of the student, m and d of the teacher, the teacher's x at the student's
# largest, Σ q (h - h₀), and d of the student without temperature.
MOMENTS = 7
# e^-FAR is 0 in float32 and, with a margin, in float64, so that a distance that is cut here changes nothing but 0 · ∞.
FAR = 800.0
# log p - log q below which p counts as much smaller than q.
BEHIND = -0.7
# Elements of each side that the pure-PyTorch passes work on at a time; they hold some 25 tensors of this size. On the
# CPU these fit in a cache; elsewhere a block outlasts the launches of its hundreds of kernels.
REFERENCE_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 21
# Where series take over from differences that cancel, and their terms in float64.
NEAR, TERMS = 0.5, 14


class DivergenceOptions(NamedTuple):
    """The scalars of the formulas above; scales and caps are divided by the temperature already.

    of_teacher, of_student  factors of KL(p ‖ M) and KL(q ‖ M)
    hard_weight             share of the cross entropy with the target
    partial                 the classes are one shard of the vocabulary; a target outside them is in another shard
    """

    formula: int
    beta: float
    of_teacher: float
    of_student: float
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None
    hard_weight: float = 0.0
    ignore_index: int = -100
    partial: bool = False

    @classmethod
    def from_arguments(cls, kind: Kind, beta: float, temperature: float = 1.0, **more: Any) -> Self:
        """Return the options for the arguments of an op."""
        formula = {"forward_kl": FORWARD, "reverse_kl": REVERSE, "total_variation": VARIATION}.get(kind, MIXTURE)
        skewed = {"skewed_kl": (1.0, 0.0), "skewed_reverse_kl": (0.0, 1.0)}
        of_teacher, of_student = skewed.get(kind, (beta, 1.0 - beta))
        # c · tanh(s·a / c) / T = (c/T) · tanh((s/T)·a / (c/T)): a temperature is part of scale and cap.
        for name in ("logit_scale", "teacher_logit_scale"):
            more[name] = more.get(name, 1.0) / temperature
        for name in ("softcap", "teacher_softcap"):
            more[name] = None if more.get(name) is None else more[name] / temperature
        return cls(formula, beta, of_teacher, of_student, temperature, **more)


class DivergenceResults(NamedTuple):
    """The loss of each row, and its moments (rows, MOMENTS)."""

    loss: Tensor
    moments: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Self:
        """Allocate the results for as many rows as the tensor has, on its device."""
        empty = functools.partial(torch.empty, dtype=accumulator(like.dtype), device=like.device)
        return cls(empty(like.shape[0]), empty(like.shape[0], MOMENTS))

    def of(self, rows: slice) -> "DivergenceResults":
        return DivergenceResults(self.loss[rows], self.moments[rows])


class DivergencePasses(RowPasses):
    """The passes over two sides in pure PyTorch, a block of rows at a time, in addition to those of the losses; logits
    are (rows, classes)."""

    def divergences(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, results: DivergenceResults,
        options: DivergenceOptions, row_factor: Tensor | None, gradient: bool,
    ) -> None:  # fmt: skip
        """Fill results; with gradient also overwrite student by row_factor · d loss / d student (row_factor is 1 if
        None)."""
        for rows, x, theirs, labels in _blocks(student, teacher, target, options):
            moments, counted = _moments(x, theirs, options), _counted(x, labels, options)
            value, slope, q = _compared(x, theirs, moments, options)
            loss = value.sum(-1)
            if options.formula != FORWARD:
                moments[:, 5] = torch.where(q != 0, q * slope, 0.0).sum(-1)
            if options.hard_weight and labels is not None:
                of_label = (x.gather(-1, _inside(labels, x)[:, None])[:, 0] - moments[:, 0]) * options.temperature
                hard = moments[:, 6].log() - of_label
                hard = torch.where((labels < 0) | (labels >= x.shape[1]), float("nan"), hard)
                loss = (1.0 - options.hard_weight) * loss + options.hard_weight * hard
            results.loss[rows] = torch.where(counted, loss, 0.0)
            results.moments[rows] = moments
            if gradient:
                factor = None if row_factor is None else row_factor[rows]
                student[rows] = _gradient(x, theirs, labels, moments, factor, options).to(student.dtype)

    def divergence_gradients(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, moments: Tensor, row_factor: Tensor,
        options: DivergenceOptions, out: Tensor,
    ) -> None:  # fmt: skip
        """Write row_factor · d loss / d student into out, given the moments of each row; out may be student."""
        for rows, x, theirs, labels in _blocks(student, teacher, target, options):
            out[rows] = _gradient(x, theirs, labels, moments[rows], row_factor[rows], options).to(out.dtype)

    def divergence_sums(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, moments: Tensor, options: DivergenceOptions,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Write sums over these classes into out (rows, 3), given the moments of all classes.

        The columns are the divergence, q · (h - h₀), and x of the target.
        """
        for rows, x, theirs, labels in _blocks(student, teacher, target, options):
            value, slope, q = _compared(x, theirs, moments[rows], options)
            out[rows, 0] = value.sum(-1)
            out[rows, 1] = 0.0 if options.formula == FORWARD else torch.where(q != 0, q * slope, 0.0).sum(-1)
            out[rows, 2] = 0.0
            if options.hard_weight and labels is not None:
                of_label = x.gather(-1, _inside(labels, x)[:, None])[:, 0]
                out[rows, 2] = torch.where((labels >= 0) & (labels < x.shape[1]), of_label, 0.0)


TORCH_DIVERGENCES = DivergencePasses()


def check_mixture(name: str, label: str, value: Any) -> None:
    """Raise OptionError unless the weight is in (0, 1); at 0 and 1 there is no mixture."""
    checks.fraction(name, label, value)
    if not 0.0 < value < 1.0:
        checks.fail(OptionError, name, f"{label} must be a number in (0, 1), got {value!r}")


def _blocks(
    student: Tensor, teacher: Tensor, target: Tensor | None, options: DivergenceOptions
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Yield rows, x of both sides, in the student's accumulator dtype, and the targets."""
    for rows in row_blocks(student, REFERENCE_BLOCK if student.device.type == "cpu" else DEVICE_BLOCK):
        theirs = teacher[rows].to(accumulator(student.dtype))
        theirs = capped(theirs, options.teacher_logit_scale, options.teacher_softcap)
        x = capped(student[rows], options.logit_scale, options.softcap)
        yield rows, x, theirs, None if target is None else target[rows]


def _counted(x: Tensor, target: Tensor | None, options: DivergenceOptions) -> Tensor:
    return x.new_ones(x.shape[0], dtype=torch.bool) if target is None else target != options.ignore_index


def _inside(target: Tensor, x: Tensor) -> Tensor:
    return target.clamp(0, x.shape[1] - 1)


def _moments(x: Tensor, theirs: Tensor, options: DivergenceOptions) -> Tensor:
    moments = x.new_zeros(x.shape[0], MOMENTS)
    for column, side in ((0, x), (2, theirs)):
        moments[:, column] = side.amax(-1)
        moments[:, column + 1] = (side - moments[:, column, None]).exp().sum(-1)
    moments[:, 4] = theirs.gather(-1, x.argmax(-1, keepdim=True))[:, 0]
    moments[:, 6] = 1.0
    if options.hard_weight:
        moments[:, 6] = ((x - moments[:, :1]) * options.temperature).exp().sum(-1)
    return moments


def _compared(x: Tensor, theirs: Tensor, moments: Tensor, options: DivergenceOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return (terms of the divergence, h - h₀, q) of each class; for the forward KL, q · h, which is finite."""
    top, total, their_top, their_total, their_first = moments[:, :5].split(1, -1)
    below, beneath = x - top, theirs - their_top
    q, p = below.exp() / total, beneath.exp() / their_total
    offset = _log_ratio(total, their_total)
    apart = torch.where((below == -torch.inf) & (beneath == -torch.inf), 0.0, (beneath - below) + offset)
    # That of the student's largest x, whose own distance is 0.
    first = (their_first - their_top) + offset
    far, ahead = apart.abs(), apart >= 0
    larger = torch.where(ahead, p, q)
    over, under, step, smaller = _steps(far)
    if options.formula == FORWARD:
        value = torch.where(larger != 0, larger * torch.where(ahead, over, under), 0.0)
        return value, torch.where(ahead, -larger, larger) * step, q
    if options.formula == REVERSE:
        return torch.where(larger != 0, larger * torch.where(ahead, under, over), 0.0), first - apart, q
    if options.formula == VARIATION:
        # The sign of NaN is 0.
        return 0.5 * larger * step, torch.where(offset.isnan(), offset, 0.5 * (first.sign() - apart.sign())), q
    # M = larger · (1 + t).
    share = _either(ahead, options.beta, 1.0 - options.beta, far)
    rest, log, _ = _mixed(share, step, smaller)
    of_larger = _either(ahead, options.of_teacher, options.of_student, far)
    of_smaller = _either(ahead, options.of_student, options.of_teacher, far)
    # The smaller side's KL in units of larger, M - s + s · log(s / M); by its own series where M is close to s.
    above = share * step
    ratio = above / smaller
    far_apart = above - smaller * (log + far.clamp(max=FAR))
    of_other = torch.where(ratio < 0.5 * NEAR, smaller * _log_series(ratio), far_apart)
    value = larger * (of_larger * rest + of_smaller * of_other)
    behind = first < BEHIND
    return value, _slope(apart, behind, options) - _slope(first, behind, options), q


def _log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return log(a / b), accurate to the last digits even near 0, where the sign decides which of two is larger."""
    difference = (a - b) / b
    return torch.where(difference.abs() < 0.5 * NEAR, difference.log1p(), (a / b).log())


def _either(condition: Tensor, value: float, other: float, like: Tensor) -> Tensor:
    """Select one of two numbers, in the dtype of a tensor; from numbers alone, torch.where would return float32."""
    return torch.where(condition, like.new_full((), value), other)


def _steps(far: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (far - 1 + e, 1 - e - far · e, 1 - e, e), where e = e^-far.

    The first is about far²/2 near 0, and the others follow from it exactly.
    """
    smaller, near = (-far).exp(), far < NEAR
    over = torch.where(near, _series(far), far - 1.0 + smaller)
    step = torch.where(near, far - over, 1.0 - smaller)
    under = torch.where(near, far * step - over, step - smaller * far.clamp(max=FAR))
    return over, under, step, smaller


def _mixed(share: Tensor, step: Tensor, smaller: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (t - log(1 + t), log(1 + t), 1 + t), where 1 + t = share + (1 - share) · smaller."""
    t, mixture = (share - 1.0) * step, share + (1.0 - share) * smaller
    close = t.abs() < 0.5 * NEAR
    log = torch.where(close, 0.0, mixture.log())
    rest = torch.where(close, _log_series(t), t - log)
    return rest, torch.where(close, t - rest, log), mixture


def _slope(apart: Tensor, behind: Tensor, options: DivergenceOptions) -> Tensor:
    """Return h of a mixture up to a constant, which differs if p/M of the student's largest class is nearly 0."""
    far, ahead = apart.abs(), apart >= 0
    _, _, step, smaller = _steps(far)
    _, log, mixture = _mixed(_either(ahead, options.beta, 1.0 - options.beta, far), step, smaller)
    factor = (1.0 - options.beta) * options.of_teacher - options.beta * options.of_student
    # 1 - p/M, or -p/M.
    rest = (1.0 - options.beta) * torch.where(ahead, -step, step)
    ratio = torch.where(behind, torch.where(ahead, -1.0, -smaller), rest) / mixture
    return factor * ratio - options.of_student * (log + torch.where(ahead, far.clamp(max=FAR), 0.0))


def _series(far: Tensor) -> Tensor:
    """Return far - 1 + e^-far = far²/2 · (1 - far/3 · (1 - far/4 · (1 - …)))."""
    near = far.clamp(max=NEAR)
    total = torch.ones_like(near)
    for number in range(TERMS, 2, -1):
        total = 1.0 - near / number * total
    return 0.5 * near.square() * total


def _log_series(t: Tensor) -> Tensor:
    """Return t - log(1 + t), with s = t / (2 + t): t·s - 2s³ · (1/3 + s²/5 + s⁴/7 + …)."""
    t = t.clamp(-0.5 * NEAR, 0.5 * NEAR)
    s = t / (2.0 + t)
    total, square = torch.zeros_like(s), s.square()
    for number in range(2 * TERMS + 1, 1, -2):
        total = total * square + 1.0 / number
    return t * s - 2.0 * s * square * total


def _gradient(
    x: Tensor, theirs: Tensor, target: Tensor | None, moments: Tensor, row_factor: Tensor | None,
    options: DivergenceOptions,
) -> Tensor:  # fmt: skip
    """Return row_factor · d loss / d student."""
    _, slope, q = _compared(x, theirs, moments, options)
    if options.formula != FORWARD:
        slope = torch.where(q != 0, q * (slope - moments[:, 5:6]), 0.0)
    factor = torch.full_like(moments[:, 0], options.logit_scale)
    if row_factor is not None:
        factor = row_factor.to(x.dtype) * options.logit_scale
    if options.hard_weight and target is not None:
        sharp = ((x - moments[:, :1]) * options.temperature).exp() / moments[:, 6:7]
        outside = (target < 0) | (target >= x.shape[1])
        hit = torch.where(outside, 0.0, -torch.ones_like(factor))
        sharp.scatter_add_(-1, _inside(target, x)[:, None], hit[:, None])
        slope = (1.0 - options.hard_weight) * slope + options.hard_weight * options.temperature * sharp
        if not options.partial:
            factor = torch.where(outside, float("nan"), factor)
    slope = slope * factor[:, None]
    if options.softcap is not None:
        slope = slope * (1.0 - (x / options.softcap).square())
    # A row that is not counted gets zeros even where its own logits are infinite or NaN.
    return torch.where(_counted(x, target, options)[:, None], slope, 0.0)
