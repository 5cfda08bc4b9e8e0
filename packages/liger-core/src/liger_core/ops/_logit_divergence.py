# SPDX-License-Identifier: Apache-2.0
"""The op of a divergence between two rows of logits: its kernels, checks, samples and work, but for the formula."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, Literal, ParamSpec

import torch
from torch import Tensor

from liger_core import checks
from liger_core.autograd import differentiable
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError
from liger_core.kernels import Kernel, Outputs
from liger_core.op import Misuse, Sample, Work, Workload, accumulator
from liger_core.ops._composed import ComposedOp, Supported, composed_op
from liger_core.ops._divergence import (
    FORWARD,
    MIXTURE,
    TORCH_DIVERGENCES,
    VARIATION,
    DivergenceOptions,
    DivergencePasses,
    DivergenceResults,
)
from liger_core.ops._inputs import CLASSES, ROWS, misuse_table, normal, row_workloads, sample_table
from liger_core.ops._softmax_loss import check_reduction

P = ParamSpec("P")
Reduction = Literal["mean", "sum", "none", "classes"]


def logit_divergence(
    check: Callable[..., Any] = lambda: None, samples: Callable[..., Iterable[Sample]] = lambda device, dtype: (),
    misuses: Callable[..., Iterable[Misuse]] = lambda device: (),
) -> Callable[[Callable[Concatenate["LogitDivergences", Supported, P], Tensor]], ComposedOp[P, Tensor]]:  # fmt: skip
    """Turn the function of a divergence into an op.

    check, samples, misuses  those of its own options, in addition to what all divergences of logits have
    """

    def describe(function: Callable[Concatenate[LogitDivergences, Supported, P], Tensor]) -> ComposedOp[P, Tensor]:
        name = function.__name__

        def check_all(
            student: Tensor, teacher: Tensor, *, temperature: float = 1.0, reduction: Reduction = "mean",
            normalizer: Tensor | float | None = None, **options: Any,
        ) -> None:  # fmt: skip
            checks.floating(name, 2, student=student, teacher=teacher)
            checks.at_least_one_dimension(name, "student", student)
            if student.shape[-1] == 0:
                checks.misshapen(name, "student must have at least one class", student)
            if teacher.shape != student.shape:
                checks.misshapen(name, f"teacher must have shape {checks.shape(student)} like student", teacher)
            checks.constant(name, teacher=teacher)
            checks.positive(name, "temperature", temperature, ", since the logits are divided by it")
            check_reduction(name, student, reduction, normalizer, "classes")
            check(**options)

        return composed_op(
            TORCH_DIVERGENCES, logit_divergences, check=check_all,
            samples=lambda device, dtype: itertools.chain(_samples(device, dtype), samples(device, dtype)),
            misuses=lambda device: itertools.chain(_misuses(name, device), misuses(device)),
            workloads=_workloads, work=_work,
        )(function)  # fmt: skip

    return describe


def logit_pairs(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function (*shape, scale=1.0) → random logits of a student and of a teacher."""

    def pair(*shape: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return normal(device, dtype, *shape, scale=scale), normal(device, dtype, *shape, scale=scale)

    return pair


logit_samples = functools.partial(sample_table, constants=("teacher", "normalizer"))


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    pair = logit_pairs(device, dtype)
    count = torch.tensor(37.0, device=device)
    yield from logit_samples(
        ("one_block", pair(4, 64), {}, "the vocabulary is one block"),
        ("odd_width", pair(5, 101), {}, "mask on the last block"),
        ("several_blocks", pair(3, 9000), {}, "the row is longer than one block"),
        ("odd_rows", pair(3, 9001), {}, "whole blocks of rows that begin at any number, of which a word holds two"),
        ("leading_shape", pair(2, 3, 40), {}, "any leading shape"),
        ("one_token", pair(40), {}, "no leading shape"),
        ("sum", pair(5, 50), {"reduction": "sum"}, "no normalizer"),
        ("none", pair(5, 50), {"reduction": "none"}, "every row has its own upstream gradient"),
        ("normalizer", pair(5, 50), {"normalizer": count}, "an external count on the device"),
        ("temperature", pair(5, 50), {"temperature": 2.5}, "both sides are divided by the temperature"),
    )
    student = normal(device, dtype, 5, 50)
    near = (student.double() + 0.05 * torch.randn(5, 50, device=device, dtype=torch.float64)).to(dtype)
    peaked, (high, low), (mine, theirs) = pair(4, 60, scale=8.0), pair(4, 60), pair(4, 60)
    mine[:, 40:], theirs[:, 40:] = -torch.inf, -torch.inf
    certain = tuple(x.log_softmax(-1) for x in pair(4, 60))
    yield from logit_samples(
        ("near", (student, near), {}, "a student that is close to its teacher: nothing cancels"),
        ("peaked", peaked, {}, "softmax close to one class on both sides"),
        ("common_offset", (high + 3e4, low - 3e4), {}, "what the logits of a side have in common cancels"),
        ("padded_classes", (mine, theirs), {}, "classes that are impossible on both sides count for nothing"),
        ("log_probabilities", certain, {}, "log-probabilities are logits"),
        ("empty", pair(0, 30), {}, "no rows: the loss is 0 and nothing is launched"),
        ("one_class", pair(4, 1), {}, "a single column: divergence 0"),
    )
    strided = normal(device, dtype, 5, 160)[:, :80], normal(device, dtype, 5, 200)[:, 3:83]
    turned = tuple(x.t() for x in pair(40, 6))
    yield from logit_samples(
        ("strided_rows", strided, {}, "rows are read through their strides"),
        ("transposed", turned, {}, "the last dimension is not contiguous"),
        ("classes", (high, low), {"reduction": "classes", "temperature": 0.5}, "each class has its own gradient"),
        ("classes_padded", (mine, theirs), {"reduction": "classes"}, "impossible classes have no gradient"),
    )


def _misuses(name: str, device: torch.device) -> Iterator[Misuse]:
    x, zero = torch.zeros(3, 8, device=device), "must be a finite number > 0, since the logits are divided by it"
    choices, summed = "must be one of 'mean', 'sum', 'none', 'classes'", {"reduction": "sum", "normalizer": 3.0}
    divides = "normalizer needs reduction='mean', which it divides by, got reduction='sum'"
    constant = "must not require a gradient, since the op does not define one; pass teacher.detach()"
    yield from misuse_table(
        name, (x, x),
        ("teacher_shape", ShapeError, "teacher must have shape (3, 8) like student, got (2, 8)", {}, x, x[:2]),
        ("no_class", ShapeError, "student must have at least one class, got (3, 0)", {}, x[:, :0], x[:, :0]),
        ("integers", DtypeError, "student must have a floating dtype, got torch.int32", {}, x.int(), x),
        ("no_teacher", DtypeError, "teacher must be a tensor, got NoneType", {}, x, None),
        ("temperature", OptionError, f"temperature {zero}, got 0.0", {"temperature": 0.0}),
        ("reduction", OptionError, f"reduction {choices}, got 'batchmean'", {"reduction": "batchmean"}),
        ("normalizer", OptionError, divides, summed),
        ("trainable_teacher", OptionError, f"teacher {constant}", {}, x, x.clone().requires_grad_()),
        ("device", DeviceError, f"teacher must be on {x.device} like student, got meta", {}, x, x.to("meta")),
    )  # fmt: skip


def _workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, rows: int, classes: int) -> tuple[Tensor, ...]:
        # Steep enough that p = q for no class, where the gradient of the total variation jumps.
        return normal(device, dtype, rows, classes, scale=2.0), normal(device, dtype, rows, classes, scale=2.0)

    usual = ((1024, 8192), (8192, 40960), (8192, 128256), (8192, 151936))
    return row_workloads(draw, "NV", usual, quick=(64, 1024), rows=ROWS[:-2], columns=128256, widths=CLASSES)


def _work(student: Tensor, teacher: Tensor, **options: Any) -> Work:
    """Return the minimal work: forward reads both tensors; backward reads both again and writes a gradient."""
    return Work(student.nbytes + teacher.nbytes, 3 * student.nbytes + 2 * teacher.nbytes)


class LogitDivergences:
    """The kernels of the divergences of logits, for a backend's row passes."""

    def __init__(self, passes: DivergencePasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.rows = differentiable(
            make_kernel("divergence", self._allocate, self._launch),
            make_kernel("divergence_backward", self._allocate_backward, self._launch_backward),
            saves=("student", "teacher", "moments"),
        )

    def _allocate(self, student: Tensor, teacher: Tensor, options: DivergenceOptions) -> Outputs:
        return DivergenceResults.empty(student)

    def _launch(
        self, results: DivergenceResults, /, student: Tensor, teacher: Tensor, options: DivergenceOptions
    ) -> None:
        if student.shape[0]:
            self.passes.divergences(student, teacher, None, results, options, None, False)

    def _allocate_backward(self, grad_loss: Tensor, student: Tensor, *rest: Any) -> Outputs:
        return (torch.empty(student.shape, dtype=student.dtype, device=student.device),)

    def _launch_backward(
        self, grad_student: Tensor, /, grad_loss: Tensor, student: Tensor, teacher: Tensor, moments: Tensor,
        options: DivergenceOptions, needs: list[bool],
    ) -> None:  # fmt: skip
        if student.shape[0]:
            self.passes.divergence_gradients(student, teacher, None, moments, grad_loss, options, grad_student)

    def __call__(
        self, student: Tensor, teacher: Tensor, options: DivergenceOptions, reduction: Reduction,
        normalizer: Tensor | float | None,
    ) -> Tensor:  # fmt: skip
        """Return the reduced divergence over the last dimension."""
        if reduction == "classes":
            return _of_classes(student, teacher, options)
        rows, theirs = (t.reshape(-1, t.shape[-1]) for t in (student, teacher))
        loss: Tensor = self.rows(rows, theirs, options)
        if reduction == "none":
            return loss.reshape(student.shape[:-1])
        loss = loss.sum()
        return loss if reduction == "sum" else loss / (max(rows.shape[0], 1) if normalizer is None else normalizer)


def _of_classes(student: Tensor, teacher: Tensor, options: DivergenceOptions) -> Tensor:
    """Return the term of each class. As large as the logits in float32, it leaves no memory to save by a kernel."""
    x, theirs = (side.to(accumulator(student.dtype)) * options.logit_scale for side in (student, teacher))
    log_q, log_p = x.log_softmax(-1), theirs.log_softmax(-1)
    if options.formula == VARIATION:
        return 0.5 * (log_p.exp() - log_q.exp()).abs()
    if options.formula != MIXTURE:
        return _terms(log_p, log_q) if options.formula == FORWARD else _terms(log_q, log_p)
    nowhere = (log_p == -torch.inf) & (log_q == -torch.inf)
    shares = ((log_p, options.beta), (log_q, 1.0 - options.beta))
    mixture = torch.logaddexp(*(torch.where(nowhere, 0.0, side) + math.log(share) for side, share in shares))
    return options.of_teacher * _terms(log_p, mixture) + options.of_student * _terms(log_q, mixture)


def _terms(log_first: Tensor, log_second: Tensor) -> Tensor:
    """Return the terms of a KL divergence, 0 without a gradient where the first probability is 0."""
    possible = log_first != -torch.inf
    first, second = (torch.where(possible, side, 0.0) for side in (log_first, log_second))
    return torch.where(possible, first.exp() * (first - second), 0.0)


@functools.cache
def logit_divergences(passes: DivergencePasses, make_kernel: Callable[..., Kernel]) -> LogitDivergences:
    """Return the kernels of a backend, which its ops share."""
    return LogitDivergences(passes, make_kernel)
