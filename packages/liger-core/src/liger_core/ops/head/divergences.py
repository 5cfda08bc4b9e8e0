# SPDX-License-Identifier: Apache-2.0
"""The kernels of linear_divergence: chunks of the student's logits, beside which a few rows of the teacher's are held
at a time.

The upstream gradient of a row is one factor g. So what is kept of a row for a later backward pass is the gradient G of
its logits but for g, and dX = g · (G @ W), dW = Gᵀ @ (g · X): what meets g has the width of the head, not that of the
vocabulary, and G is rounded once. Where G does not fit and hidden alone needs a gradient, the forward pass computes
G @ W, and the backward pass only scales it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Kernel, Outputs, slices
from liger_core.op import accumulator
from liger_core.ops._divergence import DivergenceOptions, DivergencePasses, DivergenceResults
from liger_core.ops._inputs import power_of_two_above
from liger_core.ops.head.gradients import Gradients, HeadGradients, Sums, new_gradients, new_sums, sums_backward
from liger_core.ops.head.head import CountedRows, Head
from liger_core.ops.head.loop import ChunkOptions, Cut, Tiles, held_bytes
from liger_core.ops.head.shards import Vocabulary, end_sum, merge_divergence, start_sum

# Rows of the teacher's logits that are held at a time, and how much of a budget they take at most. 512 rows fill an
# H200 with several waves of tiles; fewer than LEAST are not worth keeping the gradient of the logits for.
THEIR_ROWS, THEIR_SHARE, LEAST = 512, 8, 256


class Teacher(NamedTuple):
    """The same rows (N, T) of the teacher with its own head."""

    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None


class Pair:
    """Both heads: the rows that count, and the rows of their weights that are classes.

    local    targets as the passes take them
    counted  which of the rows count
    invalid  which of them have a target outside the vocabulary
    """

    def __init__(
        self, passes: DivergencePasses, head: Head, teacher: Teacher, options: DivergenceOptions, chunks: ChunkOptions,
        vocab: Vocabulary, number: int | None = None,
    ) -> None:  # fmt: skip
        self.passes, self.options, self.vocab = passes, options, vocab
        self.rows = CountedRows(head.hidden, head.target, options.ignore_index, vocab.usual(), chunks.pack, number)
        other = Head(teacher.teacher_hidden, teacher.teacher_weight, head.target, teacher.teacher_bias)
        if vocab.group is not None:
            mine = vocab.mine(head.weight.shape[0])
            head, other = head.of_classes(mine), other.of_classes(mine)
        self.head, self.teacher = head.taken(self.rows), other.taken(self.rows)
        self.local = target = self.head.target
        self.counted = target != options.ignore_index
        self.invalid = (target < 0) | (target >= vocab.classes)
        if vocab.group is not None:
            # Two numbers that stand for no row of weight: an ignored row, and a class of another rank.
            here = (target >= vocab.start) & (target < vocab.start + self.head.weight.shape[0])
            self.local = torch.where(self.counted, torch.where(here, target - vocab.start, -2), -1)
            self.options = options._replace(ignore_index=-1, partial=True)

    def walk(
        self, cut: Cut, theirs: int, sums: HeadGradients, visit: Callable[[slice, Tensor, Tensor], None],
        memory: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Visit some rows after the others, over all classes, with the logits of both sides, and add what a visit has
        left of those of the student to the sums."""
        every = slice(0, self.head.weight.shape[0])
        cut = cut._replace(classes=max(1, every.stop), kept_classes=every.stop)
        teacher = Tiles(self.teacher, cut._replace(rows=theirs))
        for tile in Tiles(self.head, cut, memory):
            for rows in slices(tile.rows, theirs):
                ours = tile.logits[rows.start - tile.rows.start : rows.stop - tile.rows.start]
                visit(rows, ours, teacher.logits(rows, every))
            sums.add(tile)
        sums.finish()

    def compare(
        self, results: DivergenceResults, factor: Tensor | None, gradient: bool, rows: slice, ours: Tensor,
        theirs: Tensor,
    ) -> None:  # fmt: skip
        """Compute the results of these rows, and with gradient that of their logits, which overwrites those of the
        student."""
        of_rows, options, target = results.of(rows), self.options, self.local[rows]
        if self.vocab.group is None:
            of_row = None if factor is None else factor[rows]
            self.passes.divergences(ours, theirs, target, of_rows, options, of_row, gradient)
            return
        moments = of_rows.moments
        if ours.shape[1]:
            self.passes.divergences(ours, theirs, target, of_rows, options, None, False)
        else:
            moments.zero_()
            moments[:, [0, 2, 4]] = torch.finfo(moments.dtype).min
        # In rows that do not count, kernels leave numbers of their own.
        merge_divergence(moments, options.temperature, options.hard_weight > 0, self.vocab)
        sums = torch.zeros(moments.shape[0], 3, dtype=moments.dtype, device=moments.device)
        if ours.shape[1]:
            self.passes.divergence_sums(ours, theirs, target, moments, options, sums)
        start_sum(sums, self.vocab)
        end_sum(sums, self.vocab)
        moments[:, 5] = sums[:, 1]
        loss = sums[:, 0]
        if options.hard_weight:
            hard = moments[:, 6].log() - (sums[:, 2] - moments[:, 0]) * options.temperature
            hard = torch.where(self.invalid[rows], float("nan"), hard)
            loss = (1.0 - options.hard_weight) * loss + options.hard_weight * hard
        of_rows.loss.copy_(torch.where(self.counted[rows], loss, 0.0))
        if gradient:
            factor = torch.ones_like(results.loss) if factor is None else factor
            self.differentiate(results.moments, factor, rows, ours, theirs)

    def differentiate(self, moments: Tensor, factor: Tensor, rows: slice, ours: Tensor, theirs: Tensor) -> None:
        """Overwrite the student's logits of these rows by their gradient, given moments and factors of the rows."""
        if not ours.shape[1]:
            return
        factor, options, target = factor[rows], self.options, self.local[rows]
        if self.vocab.group is not None and options.hard_weight:
            factor = torch.where(self.invalid[rows], float("nan"), factor)
        self.passes.divergence_gradients(ours, theirs, target, moments[rows], factor, options, ours)


class DivergenceLoop:
    """The kernels for a backend's row passes.

    reduced  (head, teacher, divide, options, chunk options, vocabulary) → summed loss; its gradients are computed in
             the forward pass
    rows     (head, teacher, options, chunk options, vocabulary) → the loss of each row
    """

    def __init__(self, passes: DivergencePasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.reduced = differentiable(
            make_kernel("linear_divergence", self._allocate_reduced, self._launch_reduced),
            sums_backward(passes, "linear_divergence_backward", make_kernel),
            saves=("weight", *Sums._fields, "main_grad"),
        )
        self.rows = differentiable(
            make_kernel("linear_divergence_rows", self._allocate_rows, self._launch_rows),
            make_kernel(
                "linear_divergence_rows_backward",
                self._allocate_rows_backward,
                self._launch_rows_backward,
                self._recycle_rows_backward,
            ),
            saves=(*Head._fields, *Teacher._fields, "moments", "number", "slopes", "derivative", "main_grad"),
        )

    def _allocate_reduced(
        self, head: Head, teacher: Teacher, divide: Tensor | None, options: DivergenceOptions, chunks: ChunkOptions,
        vocab: Vocabulary, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        cut, _ = _cut(head, teacher, chunks, vocab)
        loss = head.hidden.new_empty((), dtype=accumulator(head.hidden.dtype))
        return (loss, *new_sums(head, divide, cut.dtype, needs))

    def _launch_reduced(
        self, loss: Tensor, sums: Sums, /, head: Head, teacher: Teacher, divide: Tensor | None,
        options: DivergenceOptions, chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        gradient = any(needs)
        cut, theirs = _cut(head, teacher, chunks, vocab)
        inverse = None if divide is None else torch.reciprocal(divide, out=sums.scale)
        pair = Pair(self.passes, head, teacher, options, chunks, vocab)
        results = DivergenceResults.empty(pair.head.hidden)
        factor = inverse.expand(pair.head.hidden.shape[0]) if inverse is not None and sums.scale is None else None
        gradients = HeadGradients(pair.rows, pair.head, sums, vocab, cut)
        visit = functools.partial(pair.compare, results, factor, gradient)
        pair.walk(cut if gradient else cut._replace(rows=theirs), theirs, gradients, visit)
        torch.sum(results.loss, dim=0, out=loss)
        if inverse is not None:
            loss.mul_(inverse)

    def _allocate_rows(
        self, head: Head, teacher: Teacher, options: DivergenceOptions, chunks: ChunkOptions, vocab: Vocabulary,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        hidden, keeps = head.hidden, any(needs) and _keeps(head, teacher, chunks, vocab) > 0
        slopes = hidden.new_empty(hidden.shape[0], vocab.mine(head.weight.shape[0])) if keeps else None
        derivative = hidden.new_empty(hidden.shape) if needs == [True, False, False] and not keeps else None
        number = torch.empty((), dtype=torch.int64, device="cpu")
        return (*DivergenceResults.empty(hidden), number, slopes, derivative)

    def _launch_rows(
        self, whole: DivergenceResults, number: Tensor, slopes: Tensor | None, derivative: Tensor | None, /, head: Head,
        teacher: Teacher, options: DivergenceOptions, chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        (cut, theirs), gradient = _cut(head, teacher, chunks, vocab), slopes is not None or derivative is not None
        if not any(needs):
            cut = cut._replace(rows=theirs)
        elif slopes is not None:
            cut, theirs = cut._replace(rows=max(1, head.hidden.shape[0])), _keeps(head, teacher, chunks, vocab)
        pair = Pair(self.passes, head, teacher, options, chunks, vocab)
        number.fill_(pair.rows.number)
        results = pair.rows.like(whole)
        if slopes is not None:
            slopes[pair.head.hidden.shape[0] :].zero_()
        sums = HeadGradients(pair.rows, pair.head, Gradients(derivative, None, None), vocab, cut)
        pair.walk(cut, theirs, sums, functools.partial(pair.compare, results, None, gradient), slopes)
        pair.rows.scatter(results, whole)

    def _allocate_rows_backward(self, grad_loss: Tensor, head: Head, *rest: Any) -> Outputs:
        *_, chunks, _, needs = rest
        return new_gradients(head, chunks.main_grad, needs)

    def _recycle_rows_backward(self, grad_loss: Tensor, head: Head, *rest: Any) -> Outputs:
        *_, derivative, _, _, _, _ = rest
        return self._allocate_rows_backward(grad_loss, head, *rest) if derivative is None else (derivative, None, None)

    def _launch_rows_backward(
        self, gradients: Gradients, /, grad_loss: Tensor, head: Head, teacher: Teacher, moments: Tensor, number: Tensor,
        slopes: Tensor | None, derivative: Tensor | None, options: DivergenceOptions, chunks: ChunkOptions,
        vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        if derivative is not None:
            factor = torch.where(head.target == options.ignore_index, 0.0, grad_loss)
            torch.mul(derivative, factor[:, None], out=gradients.grad_hidden)
            return
        cut, theirs = _cut(head, teacher, chunks, vocab)
        pair = Pair(self.passes, head, teacher, options, chunks, vocab, int(number))
        factor, largest = _factors(pair.rows.take(grad_loss), pair.counted, head.hidden.dtype)
        if slopes is not None:
            cut = cut._replace(rows=_keeps(pair.head, teacher, chunks, vocab))
        main_grad = chunks.main_grad if needs[1] else None
        sums = HeadGradients(pair.rows, pair.head, gradients, vocab, cut, main_grad, largest)
        if slopes is None:
            pair.walk(cut, theirs, sums, functools.partial(pair.differentiate, pair.rows.take(moments), factor))
        else:
            sums.add_unweighted(slopes[: pair.head.hidden.shape[0]], factor)
            sums.finish()


@functools.cache
def divergence_loop(passes: DivergencePasses, make_kernel: Callable[..., Kernel]) -> DivergenceLoop:
    """Return the kernels of a backend."""
    return DivergenceLoop(passes, make_kernel)


def _cut(head: Head, teacher: Teacher, chunks: ChunkOptions, vocab: Vocabulary) -> tuple[Cut, int]:
    """Return the cut of the student's logits, and how many rows of the teacher's are held at a time: those of the
    teacher take a small part of the budget, the rest is as in linear_cross_entropy. Ranks that share a vocabulary meet
    in every part, so that they cut alike.
    """
    row = vocab.usual() * teacher.teacher_hidden.dtype.itemsize
    theirs = max(1, min(THEIR_ROWS, held_bytes(chunks.budget, head.hidden.device.type) // (THEIR_SHARE * row)))
    left = chunks.budget and max(1, chunks.budget - theirs * row)
    cut = chunks._replace(budget=left).chunks(head.hidden, vocab.usual())
    return cut, min(cut.rows, THEIR_ROWS if chunks.chunk else theirs)


def _keeps(head: Head, teacher: Teacher, chunks: ChunkOptions, vocab: Vocabulary) -> int:
    """Return how many rows of the teacher's logits fit beside the gradient of all logits, 0 if it is not to be kept."""
    (rows, width), classes, dtype = head.hidden.shape, vocab.usual(), head.hidden.dtype
    spare = held_bytes(chunks.budget, head.hidden.device.type) - rows * classes * dtype.itemsize
    # The backward pass has a row of the gradient of hidden in float32 instead, and hidden once more.
    their_row = classes * teacher.teacher_hidden.dtype.itemsize
    fits = min(spare // their_row, (spare - rows * width * dtype.itemsize) // (width * accumulator(dtype).itemsize))
    return 0 if chunks.chunk or fits < min(LEAST, max(rows, 1)) else min(fits, THEIR_ROWS)


def _factors(grad_loss: Tensor, counted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The upstream gradient of each row, and in float16 the power of two that it was divided by."""
    # The gradient at an ignored row may be infinite; it counts for nothing.
    factor = torch.where(counted, grad_loss, 0.0)
    if dtype != torch.float16 or not factor.numel():
        return factor, None
    largest = power_of_two_above(factor.abs().amax())
    return factor / largest, largest
