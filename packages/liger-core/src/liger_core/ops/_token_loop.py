# SPDX-License-Identifier: Apache-2.0
"""The loop of the ops with a result for each token: tiles of rows and classes, and the matmuls around a backend's row passes.

The upstream gradient of a token arrives in the backward pass. Logits that fit the budget are kept until then, and their gradient
overwrites them; the others are recomputed tile by tile. So if all fit there are three matmuls, and else up to four. Tiles take all rows
and a block of classes: the gradient of weight is then one matmul a block, rounded once, and what is summed over the blocks in float32
is the gradient of hidden, which is small. Only if that sum does not fit are rows cut, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from liger_core.kernels import Kernel, Outputs, differentiable
from liger_core.matmul import multiply
from liger_core.ops._chunked_loss import CHUNK_BYTES, CPU_BYTES, ChunkOptions, Counted, Head, Packed, accumulate, chunking
from liger_core.ops._inputs import accumulator, power_of_two_above
from liger_core.ops._token_passes import MOMENTS, AskedOfTokens, LogitOptions, Slopes, Sums, TokenPasses
from liger_core.ops._vocabulary import Exchange, RowSum, Vocabulary

# Classes of a block, of which there are BLOCKS at least, fewer classes before rows are cut, and what their number is a multiple of.
# The gradient of hidden is read and written in float32 once a block, which takes 1 % of a step on an H200; 64 classes for each of its
# 132 processors fill these with whole waves of tiles (8192: 3 % slower).
BLOCK, NARROW, BLOCKS, MULTIPLE = 8448, 2048, 4, 128
# Blocks of the gradient where all logits are kept and must stay.
KEPT_BLOCKS = 8


class TokenHead(NamedTuple):
    """Rows (N, H), what makes logits of them, and the classes (N, K) of the whole vocabulary whose log-probabilities are asked for."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chosen: Tensor


class TokenOptions(NamedTuple):
    """wide   the matmul writes logits in float32"""

    ignore_index: int
    logit_scale: float
    softcap: float | None
    inverse_temperature: Tensor | None
    class_weight: Tensor | None
    wide: bool

    def logits_dtype(self, hidden: Tensor) -> torch.dtype:
        return accumulator(hidden.dtype) if self.wide else hidden.dtype

    def among(self, vocab: Vocabulary, classes: int) -> Self:
        """The options for this shard, which has so many classes."""
        if vocab.group is None or self.class_weight is None:
            return self
        return self._replace(class_weight=self.class_weight[vocab.start : vocab.start + classes])

    def logits(self, rows: slice, classes: slice) -> LogitOptions:
        """What the passes need of them for these rows and classes."""
        temperature = None if self.inverse_temperature is None else self.inverse_temperature[rows]
        weight = None if self.class_weight is None else self.class_weight[classes]
        return LogitOptions(self.logit_scale, self.softcap, temperature, weight)


class TokenResults(NamedTuple):
    """Log-probabilities (N, K), and for each row what is asked for. For the backward pass moments (N, 6), x of the chosen classes, how many
    rows count, on the CPU (-1: all are taken), and the kept logits.
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
    kept: Tensor | None


class Upstream(NamedTuple):
    """The gradients that arrive."""

    grad_log_prob: Tensor | None
    grad_entropy: Tensor | None
    grad_log_normalizer: Tensor | None
    grad_mean_log_prob: Tensor | None
    grad_mean_logit: Tensor | None
    grad_collision: Tensor | None


class Found(NamedTuple):
    """What the backward pass needs of the results."""

    moments: Tensor
    selected: Tensor
    number: Tensor
    kept: Tensor | None


class TokenGradients(NamedTuple):
    """The gradients over a head, and the kept logits where that of the logits may overwrite them."""

    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    scratch: Tensor | None


class Tiling(NamedTuple):
    """How the logits are cut.

    rows     of a tile
    classes  of a tile
    kept     classes before the first tile, whose logits are kept for the backward pass
    dtype    in which gradients of weight are summed over groups of rows
    """

    rows: int
    classes: int
    kept: int
    dtype: torch.dtype

    def blocks(self, total: int) -> list[slice]:
        """The classes that are kept, and those of the tiles."""
        first = [slice(0, self.kept)] if self.kept else []
        return first + [slice(i, min(i + self.classes, total)) for i in range(self.kept, total, self.classes)]


def tiling(
    rows: int, width: int, classes: int, dtype: torch.dtype, device: str, wide: bool, *,
    chunk: int = 0, budget: int = 0, accumulate_dtype: torch.dtype | None = None,
) -> Tiling:  # fmt: skip
    """The tiles for a budget in bytes beyond inputs and gradients, or chunks of rows with all classes where they are asked for."""
    total, once, count = accumulator(dtype), accumulate_dtype or dtype, max(rows, 1)
    if chunk:
        length, summed = chunking(rows, width, classes, dtype, device, chunk=chunk, accumulate_dtype=accumulate_dtype)
        return Tiling(min(length, count), classes, 0, summed)
    held = budget or (CPU_BYTES if device == "cpu" else CHUNK_BYTES)
    # The numbers of a row.
    held -= min(64 * count, held // 64)
    # Logits in float32 are not overwritten by a gradient in another dtype.
    logit = total.itemsize if wide else dtype.itemsize
    item = logit + dtype.itemsize if logit != dtype.itemsize else logit
    if count * classes * item <= held:
        return Tiling(count, classes, classes, once)
    beside = width * total.itemsize if total != dtype else 0
    wanted = min(BLOCK, -(-classes // BLOCKS))
    spare = (held - count * beside) // (count * item)
    if spare >= min(wanted, NARROW):
        kept = (spare - wanted) * item // logit
        return Tiling(count, min(wanted, _rounded(spare, classes)), _rounded(kept, classes - wanted) if kept > 0 else 0, once)
    length = _rounded(held // (beside + wanted * item), count)
    block = _rounded((held - length * beside) // (length * item), classes)
    summed = accumulate_dtype or (total if dtype == torch.float16 or held >= 4 * classes * width * total.itemsize else dtype)
    return Tiling(length, block, 0, summed if length < count else once)


class TokenLoop:
    """The kernels for a backend's row passes: `tokens(head, options, chunks, vocab, asked)` gives the public part of TokenResults."""

    def __init__(self, passes: TokenPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.tokens = differentiable(
            make_kernel("linear_tokens", self._allocate, self._launch),
            make_kernel("linear_tokens_backward", self._allocate_backward, self._launch_backward, self._recycle_backward),
            public=10,
        )

    def _allocate(
        self, head: TokenHead, options: TokenOptions, chunks: ChunkOptions, vocab: Vocabulary, asked: AskedOfTokens, needs: list[bool]
    ) -> Outputs:
        rows, dtype, device = head.hidden.shape[0], accumulator(head.hidden.dtype), head.hidden.device
        kept = _tiling(head, options, chunks, vocab).kept if any(needs) else 0
        return TokenResults._make(
            (
                torch.empty(head.chosen.shape, dtype=dtype, device=device),
                *(torch.empty(rows, dtype=dtype, device=device) if asks else None for asks in asked[:5]),
                torch.empty(rows, dtype=torch.int64, device=device) if asked.with_prediction else None,
                torch.empty(rows, MOMENTS, dtype=dtype, device=device),
                torch.empty(head.chosen.shape, dtype=dtype, device=device),
                torch.empty((), dtype=torch.int64, device="cpu"),
                torch.empty(rows, kept, dtype=options.logits_dtype(head.hidden), device=device) if kept else None,
            )
        )

    def _launch(
        self, results: TokenResults, /, head: TokenHead, options: TokenOptions, chunks: ChunkOptions, vocab: Vocabulary,
        asked: AskedOfTokens, needs: list[bool],
    ) -> None:  # fmt: skip
        tiles = _tiling(head, options, chunks, vocab)
        packed, options, number = _packed(head, options, chunks, vocab)
        results.number.fill_(number)
        chosen, counted = packed.take(head.chosen), packed.head.target
        kept, count, total = results.kept, counted.shape[0], packed.head.weight.shape[0]
        if kept is None:
            tiles = tiles._replace(kept=0)
        else:
            kept[count:].zero_()
        inner = TokenResults._make((*map(packed.like, results[:-2]), results.number, None))
        # A class that is out of range is in no tile.
        inner.selected.zero_()
        local, ours = vocab.local(chosen), options.among(vocab, total)
        if not total:
            inner.moments.copy_(inner.moments.new_tensor((torch.finfo(inner.moments.dtype).min, *[0.0] * (MOMENTS - 1))))
            if inner.prediction is not None:
                inner.prediction.fill_(vocab.classes)
        tile = None
        for part, block in _tiles(count, total, tiles):
            if kept is not None and block.start == 0:
                logits = kept[part]
            else:
                tile = _tile(packed.head, tiles, options.logits_dtype(head.hidden)) if tile is None else tile
                logits = _view(tile, part, block)
            _multiply(packed.head, part, block, logits)
            sums = Sums(inner.moments[part], None if inner.prediction is None else inner.prediction[part], asked)
            given = ours.logits(part, block)
            self.passes.statistics(logits, counted[part], given, sums, block.start)
            self.passes.selected(logits, local[part], given, inner.selected[part], block.start)
        Exchange(vocab, asked).merge(inner.moments, inner.selected, inner.prediction, _weights(ours, total, inner.moments.dtype))
        _finish(inner, chosen, counted, vocab.classes, options)
        packed.scatter(inner[:-2], results[:-2], TokenResults._fields)

    def _allocate_backward(
        self, upstream: Upstream, head: TokenHead, options: TokenOptions, chunks: ChunkOptions, vocab: Vocabulary, found: Found,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        return TokenGradients(*chunks.gradients(head, needs), None)

    def _recycle_backward(
        self, upstream: Upstream, head: TokenHead, options: TokenOptions, chunks: ChunkOptions, vocab: Vocabulary, found: Found,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        """The same, and the kept logits if their gradient has their dtype."""
        fresh = self._allocate_backward(upstream, head, options, chunks, vocab, found, needs)
        return (*fresh[:-1], None if found.kept is None or found.kept.dtype != head.hidden.dtype else found.kept)

    def _launch_backward(
        self, gradients: TokenGradients, /, upstream: Upstream, head: TokenHead, options: TokenOptions, chunks: ChunkOptions,
        vocab: Vocabulary, found: Found, needs: list[bool],
    ) -> None:  # fmt: skip
        tiles, kept = _tiling(head, options, chunks, vocab), found.kept
        # Known since the forward pass, so that the device need not be waited for.
        packed, options, _ = _packed(head, options, chunks, vocab, int(found.number))
        chosen, count, total = packed.take(head.chosen), packed.head.hidden.shape[0], packed.head.weight.shape[0]
        upstream, found = Upstream(*map(packed.take, upstream)), Found._make((*map(packed.take, found[:2]), found.number, kept))
        slopes, largest = _slopes(upstream, found, chosen, packed.head.target, vocab, options, head.weight.dtype)
        ours = options.among(vocab, total)
        stays = 0
        if kept is not None and gradients.scratch is None:
            # Logits that must stay are taken block by block.
            stays, tiles = tiles.kept, tiles._replace(kept=0)
            if tiles.classes == total and kept.dtype == head.hidden.dtype:
                tiles = tiles._replace(classes=_rounded(-(-total // KEPT_BLOCKS), total))
        totals = _Totals(packed, gradients, chunks.main_grad if needs[1] else None, tiles, largest, vocab)
        tile = recomputed = None
        for part, block in _tiles(count, total, tiles, stays):
            if kept is not None and block.stop <= tiles.kept:
                logits = slope = kept[part]
            else:
                tile = _tile(packed.head, tiles, head.hidden.dtype) if tile is None else tile
                logits = slope = _view(tile, part, block)
                if kept is not None and block.stop <= stays:
                    logits = kept[part, block]
                else:
                    if options.wide and head.hidden.dtype != options.logits_dtype(head.hidden):
                        recomputed = torch.empty_like(tile, dtype=options.logits_dtype(head.hidden)) if recomputed is None else recomputed
                        logits = _view(recomputed, part, block)
                    _multiply(packed.head, part, block, logits)
            self.passes.derivative(logits, slopes.of(part), ours.logits(part, block), slope, block.start)
            totals.add(part, block, slope)
        totals.finish()


@functools.cache
def token_loop(passes: TokenPasses, make_kernel: Callable[..., Kernel]) -> TokenLoop:
    """The loop of a backend, which its ops share."""
    return TokenLoop(passes, make_kernel)


def _tiling(head: TokenHead, options: TokenOptions, chunks: ChunkOptions, vocab: Vocabulary) -> Tiling:
    hidden, classes = head.hidden, vocab.mine(head.weight.shape[0])

    def of(classes: int) -> Tiling:
        return tiling(
            *(*hidden.shape, max(1, classes), hidden.dtype, hidden.device.type, options.wide),
            chunk=chunks.chunk, budget=chunks.budget, accumulate_dtype=chunks.accumulate_dtype,
        )  # fmt: skip

    if vocab.group is None:
        return of(classes)
    # Ranks meet once for each group of rows, so that these must be the same on all, however uneven their shards are.
    tiles = of(classes)._replace(rows=of(vocab.usual()).rows)
    return tiles if classes else tiles._replace(kept=0)


def _rounded(classes: int, most: int) -> int:
    """Classes of a block, in whole tiles of a matmul where there are as many."""
    return min(most, max(1, classes // MULTIPLE * MULTIPLE or classes))


def _packed(
    head: TokenHead, options: TokenOptions, chunks: ChunkOptions, vocab: Vocabulary, number: int | None = None
) -> tuple[Packed, TokenOptions, int]:
    """The rows of which some class counts, with that as their target, before those of weight that are classes; the options for them, and
    how many they are.
    """
    counted, mine = head.chosen != options.ignore_index, vocab.mine(head.weight.shape[0])
    bias = None if head.bias is None else head.bias[:mine]
    rows = Head(head.hidden, head.weight[:mine], counted[:, 0] if counted.shape[1] == 1 else counted.any(-1), bias)
    known = Counted(rows, 0, chunks.pack, number, vocab.usual())
    packed = Packed(rows, known.index())
    return packed, options._replace(inverse_temperature=packed.take(options.inverse_temperature)), known.number or 0


def _tiles(rows: int, classes: int, tiles: Tiling, stays: int = 0) -> Iterator[tuple[slice, slice]]:
    """(rows, classes) tile by tile; none reaches over the class `stays`."""
    blocks = tiles.blocks(classes)
    if stays:
        blocks = tiles.blocks(stays) + [slice(i, min(i + tiles.classes, classes)) for i in range(stays, classes, tiles.classes)]
    for start in range(0, rows, tiles.rows):
        for block in blocks:
            yield slice(start, min(start + tiles.rows, rows)), block


def _tile(head: Head, tiles: Tiling, dtype: torch.dtype) -> Tensor:
    """Memory for a tile."""
    return torch.empty(min(tiles.rows, head.hidden.shape[0]) * tiles.classes, dtype=dtype, device=head.hidden.device)


def _view(tile: Tensor, part: slice, block: slice) -> Tensor:
    """The beginning of the memory as a dense matrix."""
    rows, classes = part.stop - part.start, block.stop - block.start
    return tile[: rows * classes].view(rows, classes)


def _multiply(head: Head, part: slice, block: slice, logits: Tensor) -> None:
    """The logits of a tile."""
    rows, classes = head.hidden[part], head.weight[block].t()
    bias = None if head.bias is None else head.bias[block]
    if logits.dtype == rows.dtype:
        multiply(logits, rows, classes, bias)
        return
    accumulate(logits, rows, classes, first=True)
    if bias is not None:
        logits.add_(bias)


def _finish(results: TokenResults, chosen: Tensor, counted: Tensor, classes: int, options: TokenOptions) -> None:
    """The results from the moments of rows and x of the chosen classes."""
    top, total, distance, weighted, squares, anchor = results.moments.unbind(-1)
    log_total = total.log()
    log_prob = (results.selected - top[:, None]) - log_total[:, None]
    log_prob = torch.where((chosen < 0) | (chosen >= classes), float("nan"), log_prob)
    results.log_prob.copy_(torch.where((chosen != options.ignore_index) & counted[:, None], log_prob, 0.0))

    def store(out: Tensor | None, value: Tensor) -> None:
        if out is not None:
            out.copy_(torch.where(counted, value, 0.0))

    if results.entropy is not None:
        store(results.entropy, log_total - distance / total)
    if results.log_normalizer is not None:
        store(results.log_normalizer, top + log_total)
    if results.mean_log_prob is not None:
        below = (anchor - top) - log_total
        store(results.mean_log_prob, weighted / classes + below * _mean_weight(options, classes, top.dtype))
    if results.mean_logit is not None:
        store(results.mean_logit, weighted / classes + anchor * _mean_weight(options, classes, top.dtype))
    if results.collision is not None:
        store(results.collision, squares / total.square())
    if results.prediction is not None:
        results.prediction.masked_fill_(~counted, -1)


def _weights(options: TokenOptions, classes: int, dtype: torch.dtype) -> Tensor | float:
    """Σ w over the classes that the options are for."""
    weight = options.class_weight
    return float(classes) if weight is None else weight.sum(dtype=dtype)


def _mean_weight(options: TokenOptions, classes: int, dtype: torch.dtype) -> Tensor | float:
    """Σ w / V."""
    return _weights(options, classes, dtype) / classes


def _slopes(
    upstream: Upstream, found: Found, chosen: Tensor, counted: Tensor, vocab: Vocabulary, options: TokenOptions, dtype: torch.dtype
) -> tuple[Slopes, Tensor | None]:
    """What the gradient of logits of this dtype is made of, and in float16 the power of two that it was divided by."""
    classes, moments = vocab.classes, found.moments
    of_chosen, of_entropy, of_normalizer, of_mean, of_mean_logit, of_collision = upstream
    named = (chosen != options.ignore_index) & counted[:, None]
    # The gradient at an ignored row may be infinite, as that of a ratio to a probability of 0; it counts for nothing.
    given = torch.zeros_like(found.selected) if of_chosen is None else torch.where(named, of_chosen, 0.0)
    # Where a class is out of range its log-probability is NaN, and so is the gradient of the row.
    given = torch.where(named & ((chosen < 0) | (chosen >= classes)), float("nan"), given)
    a = -given.sum(-1)
    b = q = c = torch.zeros_like(a)
    if of_entropy is not None:
        # -p · (log p + H) is -p · (x - m less its mean), whose terms do not cancel.
        b = torch.where(counted, -of_entropy, 0.0)
        a = a - b * (moments[:, 2] / moments[:, 1])
    if of_normalizer is not None:
        a = a + torch.where(counted, of_normalizer, 0.0)
    if of_mean is not None:
        mean = torch.where(counted, of_mean, 0.0)
        a, c = a - mean * _mean_weight(options, classes, mean.dtype), mean / classes
    if of_mean_logit is not None:
        c = c + torch.where(counted, of_mean_logit, 0.0) / classes
    if of_collision is not None:
        q = torch.where(counted, 2.0 * of_collision, 0.0)
        a = a - q * (moments[:, 4] / moments[:, 1].square())
    terms = torch.stack((a, b, q, c), -1)
    # An ignored class may be one that exists.
    slopes = Slopes(counted, moments, terms, torch.where(named, vocab.local(chosen), -1), found.selected, given)
    if dtype != torch.float16 or not terms.numel():
        return slopes, None
    # p · grad underflows where grad is 1/tokens, so a power of two is factored out and put back at the end. Where the gradient is large,
    # as loss scaling makes it, a part of it stays: it keeps the gradients of nearly certain rows from underflow.
    largest = power_of_two_above(torch.maximum(torch.where(counted[:, None], terms, 0.0).abs().amax(), given.abs().amax()))
    largest = largest / largest.clamp(1.0, 16384.0)
    return slopes._replace(terms=terms / largest, gradient=given / largest), largest


class _Totals:
    """The gradients over a head while the tiles go by."""

    def __init__(
        self, packed: Packed, gradients: TokenGradients, main_grad: Tensor | None, tiles: Tiling, largest: Tensor | None, vocab: Vocabulary
    ) -> None:
        self.packed, self.tiles, self.largest = packed, tiles, largest
        hidden, weight, bias = packed.head.hidden, packed.head.weight, gradients.grad_bias
        # Rows of weight past the classes are padding.
        classes = weight.shape[0]
        for padding in (gradients.grad_weight, bias):
            if padding is not None:
                padding[classes:].zero_()
        self.weight = None if gradients.grad_weight is None else gradients.grad_weight[:classes]
        self.bias = None if bias is None else bias[:classes]
        self.main_grad = None if main_grad is None else main_grad.data[:classes]
        wide, count = accumulator(hidden.dtype), hidden.shape[0]
        self.grad_hidden, self.hidden = gradients.grad_hidden, packed.like(gradients.grad_hidden)
        self.ranks = RowSum(vocab, 0 if self.grad_hidden is None else self.grad_hidden.shape[0], packed.index, tiles.rows)
        # A gradient that several tiles or ranks add to is summed in float32 before it is rounded.
        several = len(tiles.blocks(classes)) > 1 or self.ranks.shared
        self.hidden_sum = (
            hidden.new_empty(min(tiles.rows, count), hidden.shape[1], dtype=wide) if several and hidden.dtype != wide else None
        )
        self.weight_sum = None
        if tiles.rows < count and self.weight is not None and tiles.dtype != weight.dtype:
            self.weight_sum = torch.empty(weight.shape, dtype=tiles.dtype, device=weight.device)
        self.bias_sum = None if self.bias is None else weight.new_zeros(classes, dtype=wide)

    def add(self, part: slice, block: slice, slope: Tensor) -> None:
        """Take in the gradient of a tile of logits."""
        head, last = self.packed.head, block.stop == self.packed.head.weight.shape[0]
        if self.hidden is not None:
            out = self.rows(part)
            accumulate(out, slope, head.weight[block], first=block.start == 0)
            if last:
                # While the gradient of weight is computed.
                self.ranks.start(out)
        of_weight = self.weight if self.weight_sum is None else self.weight_sum
        if of_weight is not None:
            accumulate(of_weight[block], slope.t(), head.hidden[part], first=part.start == 0)
        if self.main_grad is not None:
            out = self.main_grad[block] if self.largest is None else torch.empty_like(self.main_grad[block])
            accumulate(out, slope.t(), head.hidden[part], first=self.largest is not None)
            if self.largest is not None:
                self.main_grad[block].addcmul_(out, self.largest)
        if self.bias_sum is not None:
            self.bias_sum[block] += slope.sum(0, dtype=self.bias_sum.dtype)
        if last:
            self.round(part)

    def rows(self, part: slice) -> Tensor:
        """Where the gradient of these rows is summed."""
        assert self.hidden is not None
        return self.hidden[part] if self.hidden_sum is None else self.hidden_sum[: part.stop - part.start]

    def round(self, part: slice) -> None:
        """The gradient of these rows is whole, once what the ranks add is."""
        if self.hidden is None:
            return
        self.ranks.end(self.rows(part))
        if self.hidden_sum is not None:
            self.hidden[part] = self.rows(part)

    def without_classes(self) -> None:
        """The gradient of hidden is that of the other ranks alone."""
        for start in range(0, 0 if self.hidden is None else self.hidden.shape[0], self.tiles.rows):
            part = slice(start, min(start + self.tiles.rows, self.packed.head.hidden.shape[0]))
            self.ranks.start(self.rows(part).zero_())
            self.round(part)

    def finish(self) -> None:
        """Round what was summed; without any tile the sums are zero."""
        if not self.packed.head.weight.shape[0]:
            self.without_classes()
        if self.weight is not None and not self.packed.head.hidden.shape[0]:
            self.weight.zero_()
        elif self.weight is not None and self.weight_sum is not None:
            self.weight.copy_(self.weight_sum if self.largest is None else self.weight_sum.mul_(self.largest))
        elif self.weight is not None and self.largest is not None:
            self.weight.mul_(self.largest)
        if self.hidden is not None and self.largest is not None:
            self.hidden.mul_(self.largest)
        if self.bias is not None and self.bias_sum is not None:
            self.bias.copy_(self.bias_sum if self.largest is None else self.bias_sum.mul_(self.largest))
        self.packed.scatter_rows(self.hidden, self.grad_hidden)
