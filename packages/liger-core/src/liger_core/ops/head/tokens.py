# SPDX-License-Identifier: Apache-2.0
"""The kernels of results for each token: log-probabilities of any classes of a row, and statistics of the softmax.

The upstream gradient of a token arrives in the backward pass. Until then logits are kept or forgotten
(liger_core/ops/head/loop.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Kernel, Outputs
from liger_core.op import accumulator
from liger_core.ops._inputs import power_of_two_above
from liger_core.ops._token_passes import MOMENTS, LogitOptions, ResultOptions, Slopes, Sums, TokenPasses
from liger_core.ops.head.derivative import HeadDerivative, chosen_slopes, derived
from liger_core.ops.head.gradients import Gradients, HeadGradients, new_gradients
from liger_core.ops.head.head import CountedRows, Head
from liger_core.ops.head.loop import ChunkOptions, Cut, Tiles
from liger_core.ops.head.shards import Exchange, RowSum, Vocabulary

# Float32 blocks of logits in the passes of the reference, and the bytes of the numbers of a row.
STATISTICS_BLOCKS, SLOPE_BLOCKS, ROW_BYTES = 4, 7, 40


class TokenResults(NamedTuple):
    """The log-probabilities (N, K), the requested results of each row, and tensors for the backward pass.

    Those are the moments (N, 6), x of the chosen classes, the number of counted rows, on the CPU (-1: all rows are
    taken), and the kept logits or the kept derivative with respect to hidden.
    """

    log_prob: Tensor
    entropy: Tensor | None
    log_normalizer: Tensor | None
    mean_log_prob: Tensor | None
    mean_logit: Tensor | None
    collision: Tensor | None
    prediction: Tensor | None
    moments: Tensor
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

    tokens  (head with target (N, K), options, ignore_index, wide, chunk options, vocabulary, what is asked for) → the
            public part of TokenResults. `wide`: the matmul writes logits in float32
    """

    def __init__(self, passes: TokenPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self._tokens = differentiable(
            make_kernel("linear_tokens", self._allocate, self._launch, scratch=self._scratch),
            make_kernel(
                "linear_tokens_backward",
                self._allocate_backward,
                self._launch_backward,
                self._recycle_backward,
                self._scratch_backward,
            ),
            saves=(
                *Head._fields, "main_grad", "kept_logits", "derivative", "moments", "selected", "number",
                "inverse_temperature", "class_weight",
            ),
            public=10,
        )  # fmt: skip

    def tokens(self, *args: Any) -> TokenResults:
        """Return the results of a call by name."""
        return TokenResults._make((*self._tokens(*args), None, None))

    def _allocate(
        self, head: Head, options: LogitOptions, ignore_index: int, wide: bool, chunks: ChunkOptions, vocab: Vocabulary,
        extras: ResultOptions, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        rows, dtype, device = head.hidden.shape[0], accumulator(head.hidden.dtype), head.hidden.device
        derives = _derivative_cut(head, wide, chunks, vocab, extras, needs) is not None
        kept_classes = chunks.tiles(head, wide, vocab).kept_classes if any(needs) and not derives else 0
        several = head.target.shape[1] > 1
        return TokenResults._make(
            (
                torch.empty(head.target.shape, dtype=dtype, device=device),
                *(torch.empty(rows, dtype=dtype, device=device) if asks else None for asks in extras[:5]),
                torch.empty(rows, dtype=torch.int64, device=device) if extras.with_prediction else None,
                torch.empty(rows, MOMENTS, dtype=dtype, device=device),
                torch.empty(head.target.shape, dtype=dtype, device=device),
                torch.empty((), dtype=torch.int64, device="cpu"),
                torch.empty(rows, kept_classes, dtype=dtype if wide else head.hidden.dtype, device=device)
                if kept_classes
                else None,
                torch.empty(head.hidden.shape, dtype=dtype if several else head.hidden.dtype, device=device)
                if derives
                else None,
            )
        )

    def _scratch(
        self, head: Head, options: LogitOptions, ignore_index: int, wide: bool, chunks: ChunkOptions, vocab: Vocabulary,
        extras: ResultOptions, needs: list[bool],
    ) -> int:  # fmt: skip
        derives = _derivative_cut(head, wide, chunks, vocab, extras, needs)
        cut = derives or chunks.tiles(head, wide, vocab)
        if not any(needs):
            cut = cut._replace(kept_classes=0)
        blocks = SLOPE_BLOCKS if derives else STATISTICS_BLOCKS
        return ROW_BYTES * head.hidden.shape[0] + cut.scratch(head, needs, blocks, slopes=bool(derives), wide=wide)

    def _launch(
        self, results: TokenResults, /, head: Head, options: LogitOptions, ignore_index: int, wide: bool,
        chunks: ChunkOptions,
        vocab: Vocabulary, extras: ResultOptions, needs: list[bool],
    ) -> None:  # fmt: skip
        cut = _derivative_cut(head, wide, chunks, vocab, extras, needs) or chunks.tiles(head, wide, vocab)
        chosen, kept_logits, count = head.target, results.kept_logits, head.hidden.shape[0]
        rows, head, options = _counted(head, options, ignore_index, chunks, vocab)
        results.number.fill_(rows.number)
        chosen, counted, classes = rows.take(chosen), head.target, head.weight.shape[0]
        for memory in (kept_logits, results.derivative):
            if memory is not None:
                memory[counted.shape[0] :].zero_()
        inner = TokenResults._make((*map(rows.like, results[:9]), results.number, None, None))
        # A class that is out of range is in no tile.
        inner.selected.zero_()
        local, ours = vocab.local(chosen), options.of_shard(vocab.start, classes)
        if not classes:
            inner.moments.copy_(
                inner.moments.new_tensor((torch.finfo(inner.moments.dtype).min, *[0.0] * (MOMENTS - 1)))
            )
            if inner.prediction is not None:
                inner.prediction.fill_(vocab.classes)
        derivative = None
        if results.derivative is not None:
            ranks = RowSum(vocab, count, rows.index, cut.rows)
            derivative = HeadDerivative(self.passes, head, ours, cut, results.derivative, local, ranks)
        for tile in Tiles(head, cut, kept_logits, wide) if classes else ():
            tile_rows, first, of_tile = tile.rows, tile.classes.start, ours.of(tile.rows, tile.classes)
            if derivative is None:
                sums = Sums(
                    inner.moments[tile_rows], None if inner.prediction is None else inner.prediction[tile_rows], extras
                )
                self.passes.statistics(tile.logits, counted[tile_rows], of_tile, sums, first)
            self.passes.selected(tile.logits, local[tile_rows], of_tile, inner.selected[tile_rows], first)
            if derivative is not None:
                derivative.add(tile, of_tile, inner.moments[tile_rows])
                if vocab.group is None and tile.classes.stop == classes:
                    derivative.finish(tile_rows, inner.moments[tile_rows], inner.selected[tile_rows])
        Exchange(vocab, extras).merge(
            inner.moments, inner.selected, inner.prediction, ours.weights(classes, inner.moments.dtype)
        )
        if derivative is not None and vocab.group is not None:
            derivative.finish(slice(0, counted.shape[0]), inner.moments, inner.selected)
        _finish(inner, chosen, counted, vocab.classes, options, ignore_index)
        rows.scatter(inner[:9], results[:9])

    def _allocate_backward(self, upstream: Upstream, head: Head, chunks: ChunkOptions, *rest: Any) -> Outputs:
        return (*new_gradients(head, chunks.main_grad, rest[-1]), None)

    def _recycle_backward(
        self,
        upstream: Upstream,
        head: Head,
        chunks: ChunkOptions,
        kept_logits: Tensor | None,
        derivative: Tensor | None,
        *rest: Any,
    ) -> Outputs:
        """Allocate the gradients, but let them overwrite the kept logits if they have their dtype."""
        if derivative is not None and derivative.dtype == head.hidden.dtype:
            return derivative, None, None, None
        recycled = None if kept_logits is None or kept_logits.dtype != head.hidden.dtype else kept_logits
        return (*new_gradients(head, chunks.main_grad, rest[-1]), recycled)

    def _scratch_backward(
        self,
        upstream: Upstream,
        head: Head,
        chunks: ChunkOptions,
        kept_logits: Tensor | None,
        derivative: Tensor | None,
        *rest: Any,
    ) -> int:
        (*_, wide, vocab, needs), rows = rest, head.hidden.shape[0]
        if derivative is not None:
            return ROW_BYTES * rows
        cut = chunks.tiles(head, wide, vocab)
        summed = needs[1] and cut.rows < rows and cut.dtype != head.weight.dtype
        weight = head.weight.numel() * cut.dtype.itemsize if summed else 0
        return ROW_BYTES * rows + weight + cut.scratch(head, needs, SLOPE_BLOCKS, slopes=True, wide=wide)

    def _launch_backward(
        self, gradients: Gradients, scratch: Tensor | None, /, upstream: Upstream, head: Head, chunks: ChunkOptions,
        kept_logits: Tensor | None,
        derivative: Tensor | None, moments: Tensor, selected: Tensor, number: Tensor, options: LogitOptions,
        ignore_index: int, wide: bool,
        vocab: Vocabulary, needs: list[bool],
    ) -> None:  # fmt: skip
        cut, chosen = chunks.tiles(head, wide, vocab), head.target
        # Known since the forward pass, so that the device need not be waited for.
        rows, head, options = _counted(head, options, ignore_index, chunks, vocab, int(number))
        chosen, upstream, moments, selected = map(rows.take, (chosen, upstream, moments, selected))
        if derivative is not None:
            gradient, out = (
                _of_chosen(upstream.grad_log_prob, selected, chosen, head.target, vocab, ignore_index),
                rows.like(gradients.grad_hidden),
            )
            derived(
                self.passes,
                out,
                derivative[: chosen.shape[0]],
                gradient,
                head.weight,
                vocab.local(chosen),
                chosen_slopes(options, selected, head.weight.dtype),
            )
            rows.scatter(out, gradients.grad_hidden)
            return
        slopes, factor = _slopes(
            upstream, moments, selected, chosen, head.target, vocab, options, ignore_index, head.weight.dtype
        )
        main_grad = chunks.main_grad if needs[1] else None
        totals = HeadGradients(rows, head, gradients, vocab, cut.rows, cut.dtype, main_grad, factor)
        ours = options.of_shard(vocab.start, head.weight.shape[0])
        for tile in Tiles(head, cut, kept_logits, wide).again(overwrite=scratch is not None):
            if tile.slope.shape[1]:
                of_tile = ours.of(tile.rows, tile.classes)
                self.passes.derivative(tile.logits, slopes.of(tile.rows), of_tile, tile.slope, tile.classes.start)
            totals.add(tile.rows, tile.classes, tile.slope)
        totals.finish()


@functools.cache
def token_loop(passes: TokenPasses, make_kernel: Callable[..., Kernel]) -> TokenLoop:
    """Return the kernels of a backend, which its ops share."""
    return TokenLoop(passes, make_kernel)


def _counted(
    head: Head,
    options: LogitOptions,
    ignore_index: int,
    chunks: ChunkOptions,
    vocab: Vocabulary,
    number: int | None = None,
) -> tuple[CountedRows, Head, LogitOptions]:
    """Return the rows in which some class counts, the head of these rows without padding, and their options."""
    counted = head.target != ignore_index
    counted = counted[:, 0] if counted.shape[1] == 1 else counted.any(-1)
    rows = CountedRows(head.hidden, counted, 0, vocab.usual(), chunks.pack, number)
    head = head._replace(target=counted).of_classes(vocab.mine(head.weight.shape[0]))
    return rows, head.taken(rows), options._replace(inverse_temperature=rows.take(options.inverse_temperature))


def _finish(
    results: TokenResults, chosen: Tensor, counted: Tensor, classes: int, options: LogitOptions, ignore_index: int
) -> None:
    """Compute the results from the moments of rows and x of the chosen classes."""
    top, total, distance, weighted, squares, anchor = results.moments.unbind(-1)
    log_total = total.log()
    log_prob = (results.selected - top[:, None]) - log_total[:, None]
    log_prob = torch.where((chosen < 0) | (chosen >= classes), float("nan"), log_prob)
    results.log_prob.copy_(torch.where((chosen != ignore_index) & counted[:, None], log_prob, 0.0))

    def store(out: Tensor | None, value: Tensor) -> None:
        if out is not None:
            out.copy_(torch.where(counted, value, 0.0))

    mean_weight = options.weights(classes, top.dtype) / classes
    if results.entropy is not None:
        store(results.entropy, log_total - distance / total)
    if results.log_normalizer is not None:
        store(results.log_normalizer, top + log_total)
    if results.mean_log_prob is not None:
        below = (anchor - top) - log_total
        store(results.mean_log_prob, weighted / classes + below * mean_weight)
    if results.mean_logit is not None:
        store(results.mean_logit, weighted / classes + anchor * mean_weight)
    if results.collision is not None:
        store(results.collision, squares / total.square())
    if results.prediction is not None:
        results.prediction.masked_fill_(~counted, -1)


def _slopes(
    upstream: Upstream, moments: Tensor, selected: Tensor, chosen: Tensor, counted: Tensor, vocab: Vocabulary,
    options: LogitOptions,
    ignore_index: int, dtype: torch.dtype,
) -> tuple[Slopes, Tensor | None]:  # fmt: skip
    """Return the slopes of the gradient for logits of this dtype, and in float16 the power of two that divides them."""
    classes = vocab.classes
    of_chosen, of_entropy, of_normalizer, of_mean, of_mean_logit, of_collision = upstream
    named = (chosen != ignore_index) & counted[:, None]
    gradient = _of_chosen(of_chosen, selected, chosen, counted, vocab, ignore_index)
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
    slopes = Slopes(counted, moments, terms, torch.where(named, vocab.local(chosen), -1), selected, gradient)
    if dtype != torch.float16 or not terms.numel():
        return slopes, None
    # p · grad underflows where grad is 1/tokens, so a power of two is factored out and put back at the end. Where the
    # gradient is large, as loss scaling makes it, a part of it stays: it keeps the gradients of nearly certain rows
    # from underflow.
    largest = power_of_two_above(
        torch.maximum(torch.where(counted[:, None], terms, 0.0).abs().amax(), gradient.abs().amax())
    )
    largest = largest / largest.clamp(1.0, 16384.0)
    return slopes._replace(terms=terms / largest, gradient=gradient / largest), largest


def _of_chosen(
    upstream: Tensor | None, selected: Tensor, chosen: Tensor, counted: Tensor, vocab: Vocabulary, ignore_index: int
) -> Tensor:
    """Return the gradients of the log-probabilities that count."""
    named = (chosen != ignore_index) & counted[:, None]
    # The gradient at an ignored row may be infinite, as that of a ratio to a probability of 0; it counts for nothing.
    gradient = torch.zeros_like(selected) if upstream is None else torch.where(named, upstream, 0.0)
    # Where a class is out of range its log-probability is NaN, and so is the gradient of the row.
    return torch.where(named & ((chosen < 0) | (chosen >= vocab.classes)), float("nan"), gradient)


def _derivative_cut(
    head: Head, wide: bool, chunks: ChunkOptions, vocab: Vocabulary, extras: ResultOptions, needs: list[bool]
) -> Cut | None:
    """Return the cut where only hidden needs a gradient, of log-probabilities alone, and the logits do not fit."""
    return chunks.derivative(head, vocab) if needs == [True, False, False] and not wide and not any(extras) else None
