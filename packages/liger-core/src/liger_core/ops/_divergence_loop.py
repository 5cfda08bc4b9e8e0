# SPDX-License-Identifier: Apache-2.0
"""The loop of linear_divergence: chunks of the student's logits, beside which a few rows of the teacher's are held at a time.

The upstream gradient of a row is one factor g. So what is kept of a row for a later backward pass is the gradient G of its logits but
for g, and dX = g · (G @ W), dW = Gᵀ @ (g · X): what meets g has the width of the head, not that of the vocabulary, and G is rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.kernels import Kernel, Outputs, differentiable
from liger_core.ops._chunked_loss import (
    CHUNK_BYTES,
    CPU_BYTES,
    ChunkOptions,
    Counted,
    Gradients,
    Head,
    Packed,
    Running,
    Sums,
    SumsBackward,
    accumulate,
    chunking,
    divides_late,
    logits_of,
)
from liger_core.ops._divergence import DivergenceOptions, DivergencePasses, DivergenceResults, divergence_results
from liger_core.ops._inputs import accumulator, power_of_two_above
from liger_core.ops._token_passes import blocks
from liger_core.ops._vocabulary import RowSum, Vocabulary, end_sum, merge_divergence, start_sum

# Rows of the teacher's logits that are held at a time, and how much of a budget they take at most. 512 rows fill an H200 with several
# waves of tiles; fewer than LEAST are not worth keeping the gradient of the logits for.
THEIR_ROWS, THEIR_SHARE, LEAST = 512, 8, 256
# Elements of main_grad whose sum is held at a time where it has to be scaled, in float16.
SCALED = 1 << 22


class HeadPair(NamedTuple):
    """Rows (N, H) with their head, their targets, and those of the teacher (N, T) with its own."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None

    def student(self) -> Head:
        return Head(self.hidden, self.weight, self.target, self.bias)

    def teacher(self, rows: slice) -> Head:
        return Head(self.teacher_hidden[rows], self.teacher_weight, self.target[rows], self.teacher_bias)


class Cut(NamedTuple):
    """Rows of the student's and of the teacher's logits held at a time, and the dtype in which the gradient of weight is summed."""

    rows: int
    theirs: int
    dtype: torch.dtype


class DivergenceLoop:
    """The kernels for a backend's row passes.

    reduced  (heads, divide, options, chunk options, vocabulary) → summed loss; its gradients are computed in the forward pass
    rows     (heads, options, chunk options, vocabulary) → the loss of each row
    """

    def __init__(self, passes: DivergencePasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.reduced = differentiable(
            make_kernel("linear_divergence", self._allocate_reduced, self._launch_reduced),
            SumsBackward(passes).kernel("linear_divergence_backward", make_kernel),
        )
        self.rows = differentiable(
            make_kernel("linear_divergence_rows", self._allocate_rows, self._launch_rows),
            make_kernel("linear_divergence_rows_backward", self._allocate_rows_backward, self._launch_rows_backward),
        )

    def _walk(
        self, pair: HeadPair, cut: Cut, kept: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Iterator[tuple[slice, Tensor, Tensor]]]]:
        """(rows, logits of the student, (rows, their logits, those of the teacher) part by part) chunk by chunk."""

        def parts(chunk: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
            for rows, theirs in logits_of(pair.teacher(chunk), cut.theirs):
                yield slice(chunk.start + rows.start, chunk.start + rows.stop), logits[rows], theirs

        for chunk, logits in logits_of(pair.student(), cut.rows, kept):
            yield chunk, logits, parts(chunk, logits)

    def _compare(
        self, shard: Shard, part: slice, ours: Tensor, theirs: Tensor, results: DivergenceResults, factor: Tensor | None, gradient: bool
    ) -> None:
        """The results of these rows, and with gradient that of their logits, which overwrites those of the student."""
        results = results.of(part)
        if shard.vocab.group is None:
            self.passes.divergences(ours, theirs, shard.pair.target[part], results, shard.options, factor, gradient)
            return
        options, target, moments = shard.options, shard.local[part], results.moments
        if ours.shape[1]:
            self.passes.divergences(ours, theirs, target, results, options, None, False)
        else:
            moments.zero_()
            moments[:, [0, 2, 4]] = torch.finfo(moments.dtype).min
        # In rows that do not count, kernels leave numbers of their own.
        merge_divergence(moments, options.temperature, options.hard_weight > 0, shard.vocab)
        sums = torch.zeros(moments.shape[0], 3, dtype=moments.dtype, device=moments.device)
        if ours.shape[1]:
            self.passes.divergence_sums(ours, theirs, target, moments, options, sums)
        start_sum(sums, shard.vocab)
        end_sum(sums, shard.vocab)
        moments[:, 5] = sums[:, 1]
        loss = sums[:, 0]
        if options.hard_weight:
            hard = moments[:, 6].log() - (sums[:, 2] - moments[:, 0]) * options.temperature
            loss = (1.0 - options.hard_weight) * loss + options.hard_weight * torch.where(shard.invalid[part], float("nan"), hard)
        results.loss.copy_(torch.where(shard.counted[part], loss, 0.0))
        if gradient:
            self._gradients(shard, part, ours, theirs, moments, torch.ones_like(loss) if factor is None else factor)

    def _gradients(self, shard: Shard, part: slice, ours: Tensor, theirs: Tensor, moments: Tensor, factor: Tensor) -> None:
        """The gradient of these rows' logits, which overwrites those of the student."""
        if not ours.shape[1]:
            return
        if shard.vocab.group is not None and shard.options.hard_weight:
            factor = torch.where(shard.invalid[part], float("nan"), factor)
        self.passes.divergence_gradients(ours, theirs, shard.local[part], moments, factor, shard.options, ours)

    def _allocate_reduced(
        self, pair: HeadPair, divide: Tensor | None, options: DivergenceOptions, chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool]
    ) -> Outputs:
        hidden, weight, wide, device = pair.hidden, pair.weight, accumulator(pair.hidden.dtype), pair.hidden.device
        return (
            torch.empty((), dtype=wide, device=device),
            torch.empty((), dtype=wide, device=device) if divides_late(hidden, divide) else None,
            torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if needs[0] else None,
            torch.empty(weight.shape, dtype=_cut(pair, chunks, vocab).dtype, device=device) if needs[1] else None,
            torch.empty(weight.shape[0], dtype=wide, device=device) if needs[2] else None,
        )

    def _launch_reduced(
        self, loss: Tensor, scale: Tensor | None, sums: Sums, /, pair: HeadPair, divide: Tensor | None, options: DivergenceOptions,
        chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        gradient = any(needs)
        cut = _cut(pair, chunks, vocab)
        inverse = None if divide is None else divide.reciprocal()
        packed, shard, _ = _packed(pair, options, chunks, vocab)
        pair, inner = shard.pair, sums._replace(sum_hidden=packed.like(sums.sum_hidden))
        results = divergence_results(pair.hidden)
        factor = inverse.expand(pair.hidden.shape[0]) if inverse is not None and scale is None else None
        running = Running(_of_classes(inner, pair.weight.shape[0]), shard.ranks(cut.rows))
        for chunk, logits, parts in self._walk(pair, cut if gradient else cut._replace(rows=cut.theirs)):
            for part, ours, theirs in parts:
                self._compare(shard, part, ours, theirs, results, None if factor is None else factor[part], gradient)
            running.add(chunk, logits, packed.head)
        running.finish()
        packed.scatter_rows(running.sums.sum_hidden, sums.sum_hidden)
        torch.sum(results.loss, dim=0, out=loss)
        if inverse is not None:
            loss.mul_(inverse)
            if scale is not None:
                scale.copy_(inverse)

    def _allocate_rows(
        self, pair: HeadPair, options: DivergenceOptions, chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool]
    ) -> Outputs:
        hidden, keeps = pair.hidden, any(needs) and _keeps(pair, chunks, vocab) > 0
        classes = vocab.mine(pair.weight.shape[0])
        return (
            *divergence_results(hidden),
            torch.empty((), dtype=torch.int64, device="cpu"),
            torch.empty(hidden.shape[0], classes, dtype=hidden.dtype, device=hidden.device) if keeps else None,
        )

    def _launch_rows(
        self, loss: Tensor, moments: Tensor, number: Tensor, kept: Tensor | None, /, pair: HeadPair, options: DivergenceOptions,
        chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        whole, cut = DivergenceResults(loss, moments), _cut(pair, chunks, vocab)
        if not any(needs):
            cut = cut._replace(rows=cut.theirs)
        elif kept is not None:
            cut = cut._replace(rows=max(1, pair.hidden.shape[0]), theirs=_keeps(pair, chunks, vocab))
        packed, shard, known = _packed(pair, options, chunks, vocab)
        number.fill_(known)
        pair = shard.pair
        results = DivergenceResults(*map(packed.take, whole)) if packed.index is None else divergence_results(pair.hidden)
        if kept is not None:
            kept[pair.hidden.shape[0] :].zero_()
        for _, _, parts in self._walk(pair, cut, kept):
            for part, ours, theirs in parts:
                self._compare(shard, part, ours, theirs, results, None, kept is not None)
        packed.scatter(results, whole, DivergenceResults._fields)

    def _allocate_rows_backward(
        self, grad_loss: Tensor, pair: HeadPair, moments: Tensor, number: Tensor, kept: Tensor | None, options: DivergenceOptions,
        chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        return chunks.gradients(pair, needs)

    def _launch_rows_backward(
        self, gradients: Gradients, /, grad_loss: Tensor, pair: HeadPair, moments: Tensor, number: Tensor, kept: Tensor | None,
        options: DivergenceOptions, chunks: ChunkOptions, vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        cut = _cut(pair, chunks, vocab)
        packed, shard, _ = _packed(pair, options, chunks, vocab, int(number))
        pair, classes = shard.pair, shard.pair.weight.shape[0]
        factor, largest = _factors(packed.take(grad_loss), shard.counted, pair.hidden.dtype)
        gradients = Gradients(*_of_classes(gradients, classes))
        sums = _summed(packed, pair, gradients, cut.dtype if kept is None and cut.rows < pair.hidden.shape[0] else None)
        # .data has a version counter of its own: a kept graph may add once more.
        main_grad = chunks.main_grad.data[:classes] if chunks.main_grad is not None and needs[1] else None
        if kept is None:
            running, moments = Running(sums, shard.ranks(cut.rows)), packed.take(moments)
            for chunk, logits, parts in self._walk(pair, cut):
                for part, ours, theirs in parts:
                    self._gradients(shard, part, ours, theirs, moments[part], factor[part])
                running.add(chunk, logits, packed.head)
                _add_to(main_grad, logits, pair.hidden[chunk], largest)
            running.finish()
        else:
            kept = kept[: pair.hidden.shape[0]]
            _weighed(kept, factor, shard, sums, _keeps(pair, chunks, vocab))
            if main_grad is not None:
                _add_to(main_grad, kept, _times(pair.hidden, factor), largest)
        _finished(sums, packed, gradients, largest)


@functools.cache
def divergence_loop(passes: DivergencePasses, make_kernel: Callable[..., Kernel]) -> DivergenceLoop:
    """The loop of a backend."""
    return DivergenceLoop(passes, make_kernel)


def _held(pair: HeadPair, chunks: ChunkOptions) -> int:
    return chunks.budget or (CPU_BYTES if pair.hidden.device.type == "cpu" else CHUNK_BYTES)


def _cut(pair: HeadPair, chunks: ChunkOptions, vocab: Vocabulary) -> Cut:
    """How the logits are cut: those of the teacher take a small part of the budget, the rest is as in linear_cross_entropy. Ranks that share
    a vocabulary meet in every part, so that they cut alike.
    """
    hidden, classes = pair.hidden, vocab.usual()
    row = classes * pair.teacher_hidden.dtype.itemsize
    theirs = max(1, min(THEIR_ROWS, _held(pair, chunks) // (THEIR_SHARE * row)))
    rows, dtype = chunking(
        *(*hidden.shape, classes, hidden.dtype, hidden.device.type),
        chunk=chunks.chunk,
        budget=chunks.budget and max(1, chunks.budget - theirs * row),
        accumulate_dtype=chunks.accumulate_dtype,
    )  # fmt: skip
    return Cut(rows, min(rows, THEIR_ROWS if chunks.chunk else theirs), dtype)


def _keeps(pair: HeadPair, chunks: ChunkOptions, vocab: Vocabulary) -> int:
    """How many rows of the teacher's logits fit beside the gradient of all logits, 0 if it is not to be kept."""
    (rows, width), classes = pair.hidden.shape, vocab.usual()
    wide, item = accumulator(pair.hidden.dtype).itemsize, pair.hidden.dtype.itemsize
    spare = _held(pair, chunks) - rows * classes * item
    # The backward pass has a row of the gradient of hidden in float32 instead, and hidden once more.
    fits = min(spare // (classes * pair.teacher_hidden.dtype.itemsize), (spare - rows * width * item) // (width * wide))
    return 0 if chunks.chunk or fits < min(LEAST, max(rows, 1)) else min(fits, THEIR_ROWS)


class Shard(NamedTuple):
    """The rows that count, with those of the weights that are classes; the options for the row passes.

    rows     of hidden, before those that do not count were left out
    taken    those that are left; None for all of them
    local    targets as the passes take them
    counted  which of the rows count
    invalid  which of them have a target outside the vocabulary
    """

    pair: HeadPair
    options: DivergenceOptions
    vocab: Vocabulary
    rows: int
    taken: Tensor | None
    local: Tensor
    counted: Tensor
    invalid: Tensor

    def ranks(self, most: int) -> RowSum:
        """What adds up the gradient of hidden, `most` rows at a time, over the ranks that share the vocabulary."""
        return RowSum(self.vocab, self.rows, self.taken, most)


def _packed(
    pair: HeadPair, options: DivergenceOptions, chunks: ChunkOptions, vocab: Vocabulary, number: int | None = None
) -> tuple[Packed, Shard, int]:
    """The rows that count, and how many they are."""
    if vocab.group is not None:
        mine = vocab.mine(pair.weight.shape[0])
        bias, teacher_bias = (None if b is None else b[:mine] for b in (pair.bias, pair.teacher_bias))
        pair = pair._replace(weight=pair.weight[:mine], bias=bias, teacher_weight=pair.teacher_weight[:mine], teacher_bias=teacher_bias)
    rows, known = pair.hidden.shape[0], Counted(pair.student(), options.ignore_index, chunks.pack, number, vocab.usual())
    packed = Packed(pair.student(), known.index())
    hidden, _, target, _ = packed.head
    pair = pair._replace(hidden=hidden, target=target, teacher_hidden=packed.take(pair.teacher_hidden))
    counted, local = target != options.ignore_index, target
    if vocab.group is not None:
        # Two numbers that stand for no row of weight: an ignored row, and a class of another rank.
        here = (target >= vocab.start) & (target < vocab.start + pair.weight.shape[0])
        local = torch.where(counted, torch.where(here, target - vocab.start, -2), -1)
        options = options._replace(ignore_index=-1, partial=True)
    invalid = (target < 0) | (target >= vocab.classes)
    return packed, Shard(pair, options, vocab, rows, packed.index, local, counted, invalid), known.number or 0


def _of_classes(sums: Sums | Gradients, classes: int) -> Sums:
    """The rows that are classes; those past them are padding, whose gradient is zero."""
    of_hidden, of_weight, of_bias = sums
    for padding in (of_weight, of_bias):
        if padding is not None:
            padding[classes:].zero_()
    return Sums(of_hidden, *(None if t is None else t[:classes] for t in (of_weight, of_bias)))


def _factors(grad_loss: Tensor, counted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The upstream gradient of each row, and in float16 the power of two that it was divided by."""
    # The gradient at an ignored row may be infinite; it counts for nothing.
    factor = torch.where(counted, grad_loss, 0.0)
    if dtype != torch.float16 or not factor.numel():
        return factor, None
    largest = power_of_two_above(factor.abs().amax())
    return factor / largest, largest


def _summed(packed: Packed, pair: HeadPair, gradients: Gradients, dtype: torch.dtype | None) -> Sums:
    """Memory for the sums: the gradients themselves, where nothing has to be rounded afterwards."""
    weight, wide = pair.weight, accumulator(pair.weight.dtype)
    of_weight = gradients.grad_weight
    if of_weight is not None and dtype not in (None, of_weight.dtype):
        of_weight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    of_bias = None if gradients.grad_bias is None else torch.empty(weight.shape[0], dtype=wide, device=weight.device)
    return Sums(packed.like(gradients.grad_hidden), of_weight, of_bias)


def _add_to(main_grad: Tensor | None, gradient: Tensor, hidden: Tensor, largest: Tensor | None) -> None:
    """main_grad += gradientᵀ @ hidden · largest."""
    if main_grad is None or not hidden.shape[0]:
        return
    if largest is None:
        accumulate(main_grad, gradient.t(), hidden, first=False)
        return
    size = max(1, SCALED // main_grad.shape[1])
    for block, columns in zip(main_grad.split(size), gradient.t().split(size), strict=True):
        out = torch.empty_like(block)
        accumulate(out, columns, hidden, first=True)
        block.addcmul_(out, largest)


def _times(hidden: Tensor, factor: Tensor) -> Tensor:
    """Each row times its factor, rounded once."""
    return torch.mul(hidden, factor[:, None], out=torch.empty_like(hidden))


def _weighed(kept: Tensor, factor: Tensor, shard: Shard, sums: Sums, rows: int) -> None:
    """The sums from the gradient of the logits but for the factor of each row."""
    of_hidden, of_weight, of_bias = sums
    hidden, count, ranks = shard.pair.hidden, shard.pair.hidden.shape[0], shard.ranks(rows)
    if of_hidden is not None and count:
        buffer = torch.empty(min(rows, count), hidden.shape[1], dtype=accumulator(hidden.dtype), device=hidden.device)
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            out = buffer[: part.stop - part.start]
            accumulate(out, kept[part], shard.pair.weight, first=True)
            ranks.start(out)
            ranks.end(out)
            torch.mul(out, factor[part, None], out=of_hidden[part])
    if of_weight is not None:
        if count:
            accumulate(of_weight, kept.t(), _times(hidden, factor), first=True)
        else:
            of_weight.zero_()
    if of_bias is not None:
        of_bias.zero_()
        for part in blocks(kept):
            of_bias += factor[part] @ kept[part].to(factor.dtype)


def _finished(sums: Sums, packed: Packed, gradients: Gradients, largest: Tensor | None) -> None:
    """The gradients from the sums."""
    if largest is not None:
        for summed in sums:
            if summed is not None:
                summed.mul_(largest)
    for summed, gradient in zip(sums[1:], gradients[1:], strict=True):
        if summed is not None and gradient is not None and summed is not gradient:
            gradient.copy_(summed)
    packed.scatter_rows(sums.sum_hidden, gradients.grad_hidden)
