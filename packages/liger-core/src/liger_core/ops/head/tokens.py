# SPDX-License-Identifier: Apache-2.0
"""The kernels of results for each token: log-probabilities of any classes of a row, and statistics of the softmax.

The upstream gradient of a token arrives in the backward pass. Until then logits are kept or forgotten
(liger_core/ops/head/loop.py).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Kernel, Outputs
from liger_core.op import accumulator
from liger_core.ops._inputs import power_of_two_above
from liger_core.ops._token_passes import MOMENTS, ResultOptions, RowOptions, Slopes, Sums, TokenPasses
from liger_core.ops.head.derivative import HeadDerivative, chosen_slopes
from liger_core.ops.head.gradients import Gradients, HeadGradients, new_gradients
from liger_core.ops.head.head import CountedRows, Head
from liger_core.ops.head.loop import ChunkOptions, Cut, Tiles
from liger_core.ops.head.shards import RowSum, Vocabulary, merge_tokens

# Float32 blocks of logits in the passes of the reference, and the bytes of the numbers of a row.
STATISTICS_BLOCKS, SLOPE_BLOCKS, ROW_BYTES = 4, 7, 40


class TokenResults(NamedTuple):
    """The log-probabilities (N, K), the requested results of each row, and the moments (N, 6)."""

    log_prob: Tensor
    entropy: Tensor | None
    log_normalizer: Tensor | None
    mean_log_prob: Tensor | None
    mean_logit: Tensor | None
    collision: Tensor | None
    prediction: Tensor | None
    moments: Tensor


class Saved(NamedTuple):
    """The tensors that wait for the backward pass, besides the moments: x of the chosen classes (N, K), the number of
    counted rows, on the CPU (-1: all rows are taken), and logits or the derivative with respect to hidden."""

    selected: Tensor
    number: Tensor
    kept_logits: Tensor | None
    derivative: Tensor | None


class Upstream(NamedTuple):
    """The upstream gradients."""

    grad_log_prob: Tensor | None
    grad_entropy: Tensor | None
    grad_log_normalizer: Tensor | None
    grad_mean_log_prob: Tensor | None
    grad_mean_logit: Tensor | None
    grad_collision: Tensor | None


class TokenLoop:
    """The kernels for a backend's row passes.

    tokens  (head with target (N, K), options, chunk options, vocabulary, requested results) → TokenResults
    """

    def __init__(self, passes: TokenPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        backward = self._allocate_backward, self._launch_backward, self._recycle_backward, self._scratch_backward
        self._tokens = differentiable(
            make_kernel("linear_tokens", self._allocate, self._launch, scratch=self._scratch),
            make_kernel("linear_tokens_backward", *backward),
            saves=(*Head._fields, "main_grad", *Saved._fields, "moments", "class_weight", "inverse_temperature"),
            public=len(TokenResults._fields),
        )

    def tokens(self, *args: Any) -> TokenResults:
        """Return the results of a call by name."""
        return TokenResults._make(self._tokens(*args))

    def _allocate(
        self, head: Head, options: RowOptions, chunks: ChunkOptions, vocab: Vocabulary, extras: ResultOptions,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        cut, rows, several = _cut(head, chunks, vocab, extras, needs), head.hidden.shape[0], head.target.shape[1] > 1
        empty, wide = functools.partial(torch.empty, device=head.hidden.device), accumulator(head.hidden.dtype)
        logits = wide if cut.wide else head.hidden.dtype
        return (
            empty(head.target.shape, dtype=wide),
            *(empty(rows, dtype=wide) if asks else None for asks in extras[:5]),
            empty(rows, dtype=torch.int64) if extras.with_prediction else None,
            empty(rows, MOMENTS, dtype=wide),
            empty(head.target.shape, dtype=wide),
            torch.empty((), dtype=torch.int64, device="cpu"),
            empty(rows, cut.kept_classes, dtype=logits) if cut.kept_classes else None,
            empty(head.hidden.shape, dtype=wide if several else head.hidden.dtype) if cut.derives else None,
        )

    def _scratch(
        self, head: Head, options: RowOptions, chunks: ChunkOptions, vocab: Vocabulary, extras: ResultOptions,
        needs: list[bool],
    ) -> int:  # fmt: skip
        cut = _cut(head, chunks, vocab, extras, needs)
        blocks = _blocks(SLOPE_BLOCKS if cut.derives else STATISTICS_BLOCKS, head, chunks, options)
        return ROW_BYTES * head.hidden.shape[0] + cut.scratch(head, needs, blocks, slopes=cut.derives)

    def _launch(
        self, results: TokenResults, saved: Saved, /, head: Head, options: RowOptions, chunks: ChunkOptions,
        vocab: Vocabulary, extras: ResultOptions, needs: list[bool],
    ) -> None:  # fmt: skip
        cut, count = _cut(head, chunks, vocab, extras, needs), head.hidden.shape[0]
        rows, chosen, head, options = _counted(head, options, chunks, vocab)
        saved.number.fill_(rows.number)
        counted, classes = head.target, head.weight.shape[0]
        for memory in (saved.kept_logits, saved.derivative):
            if memory is not None:
                memory[counted.shape[0] :].zero_()
        inner, selected = rows.like(results), rows.like(saved.selected)
        # A class that is out of range is in no tile.
        selected.zero_()
        local, ours = vocab.local(chosen), options.of(slice(None), slice(vocab.start, vocab.start + classes))
        if not classes:
            inner.moments.zero_()[:, 0] = torch.finfo(inner.moments.dtype).min
            if inner.prediction is not None:
                inner.prediction.fill_(vocab.classes)
        derivative = None
        if saved.derivative is not None:
            ranks = RowSum(vocab, count, rows.index, cut.rows)
            derivative = HeadDerivative(self.passes, head, ours, cut, saved.derivative, local, ranks)
        for tile in Tiles(head, cut, saved.kept_logits) if classes else ():
            first, of_tile, moments = tile.classes.start, ours.of(tile.rows, tile.classes), inner.moments[tile.rows]
            if derivative is None:
                sums = Sums(moments, None if inner.prediction is None else inner.prediction[tile.rows], extras)
                self.passes.statistics(tile.logits, counted[tile.rows], of_tile, sums, first)
            self.passes.selected(tile.logits, local[tile.rows], of_tile, selected[tile.rows], first)
            if derivative is not None:
                derivative.add(tile, of_tile, moments)
                if vocab.group is None and tile.classes.stop == classes:
                    derivative.finish(tile.rows, moments, selected[tile.rows])
        weights = ours.weights(classes, inner.moments.dtype)
        merge_tokens(inner.moments, selected, inner.prediction, weights, extras.with_mean, vocab)
        if derivative is not None and vocab.group is not None:
            derivative.finish(slice(0, counted.shape[0]), inner.moments, selected)
        _finish(inner, selected, chosen, counted, vocab.classes, options)
        rows.scatter((*inner, selected), (*results, saved.selected))

    def _allocate_backward(self, upstream: Upstream, head: Head, chunks: ChunkOptions, *rest: Any) -> Outputs:
        return (*new_gradients(head, chunks.main_grad, rest[-1]), None)

    def _recycle_backward(
        self, upstream: Upstream, head: Head, chunks: ChunkOptions, saved: Saved, *rest: Any
    ) -> Outputs:  # fmt: skip
        """Allocate the gradients, but let them overwrite what was kept if it has their dtype."""
        logits, derivative, dtype = saved.kept_logits, saved.derivative, head.hidden.dtype
        if derivative is not None and derivative.dtype == dtype:
            return derivative, None, None, None
        recycled = None if logits is None or logits.dtype != dtype else logits
        return (*new_gradients(head, chunks.main_grad, rest[-1]), recycled)

    def _scratch_backward(self, upstream: Upstream, head: Head, chunks: ChunkOptions, saved: Saved, *rest: Any) -> int:
        (*_, options, vocab, needs), rows = rest, head.hidden.shape[0]
        if saved.derivative is not None:
            return ROW_BYTES * rows
        cut = chunks.tiles(head, vocab)
        summed = needs[1] and cut.rows < rows and cut.dtype != head.weight.dtype
        weight = head.weight.numel() * cut.dtype.itemsize if summed else 0
        return (
            ROW_BYTES * rows
            + weight
            + cut.scratch(head, needs, _blocks(SLOPE_BLOCKS, head, chunks, options), slopes=True)
        )

    def _launch_backward(
        self, gradients: Gradients, scratch: Tensor | None, /, upstream: Upstream, head: Head, chunks: ChunkOptions,
        saved: Saved, moments: Tensor, options: RowOptions, vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        cut = chunks.tiles(head, vocab)
        # The forward pass has the number of counted rows, so the device need not be waited for.
        rows, chosen, head, options = _counted(head, options, chunks, vocab, int(saved.number))
        upstream, moments, selected = map(rows.take, (upstream, moments, saved.selected))
        gradient = _of_chosen(upstream.grad_log_prob, selected, chosen, head.target, vocab.classes, options)
        if saved.derivative is not None:
            # For one class a row, the derivative is complete. For several, it lacks their rows of weight.
            several = slice(None if chosen.shape[1] > 1 else 0)
            slope = (gradient * chosen_slopes(options, selected, head.weight.dtype))[:, several]
            out, derivative = rows.like(gradients.grad_hidden), saved.derivative[: chosen.shape[0]]
            local = vocab.local(chosen)[:, several]
            self.passes.combined(out, derivative, gradient.sum(-1), head.weight, local, slope)
            rows.scatter(out, gradients.grad_hidden)
            return
        slopes, factor = _slopes(upstream, gradient, moments, selected, chosen, head, vocab, options)
        main_grad = chunks.main_grad if needs[1] else None
        totals = HeadGradients(rows, head, gradients, vocab, cut, main_grad, factor)
        ours = options.of(slice(None), slice(vocab.start, vocab.start + head.weight.shape[0]))
        # `scratch` is the kept logits if they may be overwritten.
        for tile in Tiles(head, cut, saved.kept_logits).for_backward(overwrite=scratch is not None):
            if tile.slope.shape[1]:
                of_tile = ours.of(tile.rows, tile.classes)
                self.passes.derivative(tile.logits, slopes.of(tile.rows), of_tile, tile.slope, tile.classes.start)
            totals.add(tile)
        totals.finish()


@functools.cache
def token_loop(passes: TokenPasses, make_kernel: Callable[..., Kernel]) -> TokenLoop:
    """Return the kernels of a backend, which its ops share."""
    return TokenLoop(passes, make_kernel)


def _blocks(most: int, head: Head, chunks: ChunkOptions, options: RowOptions) -> int:
    """Return how many float32 blocks of logits the passes of the reference hold: one less if x is the logits."""
    wide = chunks.wide or head.hidden.dtype == accumulator(head.hidden.dtype)
    return most - (wide and not options.changes())


def _cut(head: Head, chunks: ChunkOptions, vocab: Vocabulary, extras: ResultOptions, needs: list[bool]) -> Cut:
    """Return the cut of a forward pass, which sums the derivative if only hidden needs a gradient, of log-probabilities
    alone, and the logits do not fit."""
    derives = needs == [True, False, False] and not chunks.wide and not any(extras)
    cut = chunks.derivative(head, vocab) if derives else None
    cut = cut or chunks.tiles(head, vocab)
    return cut if any(needs) else cut._replace(kept_classes=0)


def _counted(
    head: Head, options: RowOptions, chunks: ChunkOptions, vocab: Vocabulary, number: int | None = None
) -> tuple[CountedRows, Tensor, Head, RowOptions]:
    """Return the rows in which some class counts, and of these rows the chosen classes, the head, whose target is
    whether they count, without padding, and the options."""
    counted = head.target != options.ignore_index
    counted = counted[:, 0] if counted.shape[1] == 1 else counted.any(-1)
    rows = CountedRows(head.hidden, counted, 0, vocab.usual(), chunks.pack, number)
    chosen, head = rows.take(head.target), head._replace(target=counted).of_classes(vocab.mine(head.weight.shape[0]))
    options = options._replace(inverse_temperature=rows.take(options.inverse_temperature))
    return rows, chosen, head.taken(rows), options


def _finish(
    results: TokenResults, selected: Tensor, chosen: Tensor, counted: Tensor, classes: int, options: RowOptions
) -> None:
    """Compute the results from the moments of rows and x of the chosen classes."""
    top, total, distance, weighted, squares, anchor = results.moments.unbind(-1)
    log_total, mean_weight = total.log(), options.weights(classes, total.dtype) / classes
    log_prob = (selected - top[:, None]) - log_total[:, None]
    log_prob = torch.where((chosen < 0) | (chosen >= classes), float("nan"), log_prob)
    results.log_prob.copy_(torch.where((chosen != options.ignore_index) & counted[:, None], log_prob, 0.0))
    statistics: tuple[tuple[Tensor | None, Callable[[], Tensor]], ...] = (
        (results.entropy, lambda: log_total - distance / total),
        (results.log_normalizer, lambda: top + log_total),
        (results.mean_log_prob, lambda: weighted / classes + ((anchor - top) - log_total) * mean_weight),
        (results.mean_logit, lambda: weighted / classes + anchor * mean_weight),
        (results.collision, lambda: squares / total.square()),
    )
    for out, value in statistics:
        if out is not None:
            out.copy_(torch.where(counted, value(), 0.0))
    if results.prediction is not None:
        results.prediction.masked_fill_(~counted, -1)


def _slopes(
    upstream: Upstream, gradient: Tensor, moments: Tensor, selected: Tensor, chosen: Tensor, head: Head,
    vocab: Vocabulary, options: RowOptions,
) -> tuple[Slopes, Tensor | None]:  # fmt: skip
    """Return the slopes of the gradient of the logits, and in float16 the power of two that divides them."""
    _, of_entropy, of_normalizer, of_mean, of_mean_logit, of_collision = upstream
    classes, counted = vocab.classes, head.target
    a = -gradient.sum(-1)
    b = q = c = torch.zeros_like(a)
    if of_entropy is not None:
        # -p · (log p + H) is -p · (x - m less its mean), whose terms do not cancel.
        b = torch.where(counted, -of_entropy, 0.0)
        a = a - b * (moments[:, 2] / moments[:, 1])
    if of_normalizer is not None:
        a = a + torch.where(counted, of_normalizer, 0.0)
    if of_mean is not None:
        mean = torch.where(counted, of_mean, 0.0)
        a, c = a - mean * (options.weights(classes, mean.dtype) / classes), mean / classes
    if of_mean_logit is not None:
        c = c + torch.where(counted, of_mean_logit, 0.0) / classes
    if of_collision is not None:
        q = torch.where(counted, 2.0 * of_collision, 0.0)
        a = a - q * (moments[:, 4] / moments[:, 1].square())
    terms = torch.stack((a, b, q, c), -1)
    # An ignored class may be one that exists.
    index = torch.where((chosen != options.ignore_index) & counted[:, None], vocab.local(chosen), -1)
    slopes = Slopes(counted, moments, terms, index, selected, gradient)
    if head.weight.dtype != torch.float16 or not terms.numel():
        return slopes, None
    # p · grad underflows where grad is 1/tokens, so a power of two is factored out and put back at the end. Where the
    # gradient is large, as loss scaling makes it, a part of it stays: it keeps the gradients of nearly certain rows
    # from underflow.
    most = torch.maximum(torch.where(counted[:, None], terms, 0.0).abs().amax(), gradient.abs().amax())
    largest = power_of_two_above(most)
    largest = largest / largest.clamp(1.0, 16384.0)
    return slopes._replace(terms=terms / largest, gradient=gradient / largest), largest


def _of_chosen(
    upstream: Tensor | None, selected: Tensor, chosen: Tensor, counted: Tensor, classes: int, options: RowOptions
) -> Tensor:
    """Return the gradients of the log-probabilities that count."""
    named = (chosen != options.ignore_index) & counted[:, None]
    # The gradient at an ignored row may be infinite, as that of a ratio to a probability of 0; it counts for nothing.
    gradient = torch.zeros_like(selected) if upstream is None else torch.where(named, upstream, 0.0)
    # Where a class is out of range its log-probability is NaN, and so is the gradient of the row.
    return torch.where(named & ((chosen < 0) | (chosen >= classes)), float("nan"), gradient)
