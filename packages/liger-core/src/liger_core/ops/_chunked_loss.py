# SPDX-License-Identifier: Apache-2.0
"""The chunk loop of linear_cross_entropy, and the part it shares with the loop of per-token results: the matmuls around row passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from liger_core.dtypes import autocast_dtype
from liger_core.kernels import Kernel, Outputs, differentiable
from liger_core.matmul import multiply
from liger_core.ops._inputs import accumulator
from liger_core.ops._softmax_loss import Asked, RowOptions, RowPasses, RowResults, row_results
from liger_core.ops._vocabulary import ALONE, RowSum

Chunk = int | Literal["report"] | None

MiB = 1 << 20

# One H200, V=128256: chunks of 2048 rows and more run all three matmuls at full rate; a float32 dW costs 20 % at 2048 rows, 5 % at
# 4096 and nothing in a single chunk or at 8192, so the default buys one chunk, or several as long.
CHUNK_BYTES = 2150 * MiB
CPU_BYTES = 64 * MiB
LONG_CHUNK = 2048
HALF_CHUNK = 4096


class Chunking(NamedTuple):
    """The number of rows of logits per chunk, and the dtype in which the gradient of weight is summed over the chunks."""

    rows: int
    dtype: torch.dtype


def chunking(
    rows: int,
    width: int,
    classes: int,
    dtype: torch.dtype,
    device: str,
    *,
    chunk: int = 0,
    budget: int = 0,
    accumulate_dtype: torch.dtype | None = None,
) -> Chunking:
    """Chunks of `chunk` rows, by the report's formula for -1, or for 0 those that fit a budget in bytes beyond inputs and gradients.

    The gradients that are required make no difference: matmuls of other sizes round differently, and recomputed logits must match their statistics.
    A single chunk writes dW in its own dtype, which is exact and takes least. With several, dW is summed in float32 where the budget
    holds that sum beside a long chunk, else in its own dtype (in float32 always for float16, which overflows before it is scaled).
    """
    wide = accumulate_dtype or accumulator(dtype)
    once = accumulate_dtype or (accumulator(dtype) if dtype == torch.float16 else dtype)
    count, row = max(rows, 1), classes * dtype.itemsize
    if chunk > 0:
        length = min(chunk, count)
    elif chunk == -1:
        length = 1 << max(0, -(-rows // max(1, -(-classes // width))) - 1).bit_length()
    elif count * row <= (budget or (CPU_BYTES if device == "cpu" else CHUNK_BYTES)):
        length = count
        half = -(-count // 2)
        if (
            not budget
            and device != "cpu"
            and half >= HALF_CHUNK
            and (count - half) * row > classes * width * (wide.itemsize - once.itemsize)
        ):
            # Two halves that share a buffer and the float32 sum take less memory than one chunk, and hardly more time.
            length = half
    elif not budget:
        length = max(1, CPU_BYTES // row) if device == "cpu" else _power_below(CHUNK_BYTES // row)
    else:
        # The sum exists beside the chunks, and at the end beside the gradient that it becomes.
        beside = classes * width * (wide.itemsize - dtype.itemsize)
        if accumulate_dtype is None and dtype != torch.float16 and budget < max(beside + LONG_CHUNK * row, classes * width * wide.itemsize):
            wide, beside = once, 0
        length = _power_below((budget - beside) // row)
    return Chunking(length, once if count <= length else wide)


def _power_below(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def autocast_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of the matmul in autocast's dtype, where it is on."""
    low = autocast_dtype(hidden.device.type)
    if low is None:
        return hidden, weight, bias
    return hidden.to(low), weight.to(low), None if bias is None else bias.to(low)


class ChunkOptions(NamedTuple):
    """How many rows of logits are held at a time, as kernels take it: chunk 0 for the budget and -1 for the formula
    of the report, budget 0 for the default.

    main_grad  a sum over batches to which the gradient of weight is added, in its place
    """

    accumulate_dtype: torch.dtype | None
    chunk: int
    budget: int
    pack: bool
    main_grad: Tensor | None

    @classmethod
    def given(cls, accumulate_dtype: torch.dtype | None, chunk: Chunk, budget: int | None, pack: bool, main_grad: Tensor | None) -> Self:
        """From the options of an op."""
        return cls(accumulate_dtype, 0 if chunk is None else -1 if chunk == "report" else chunk, budget or 0, pack, main_grad)

    def chunking(self, hidden: Tensor, weight: Tensor) -> Chunking:
        """For rows that are there."""
        return chunking(
            *(*hidden.shape, weight.shape[0], hidden.dtype, hidden.device.type),
            chunk=self.chunk,
            budget=self.budget,
            accumulate_dtype=self.accumulate_dtype,
        )

    def gradients(self, head: Any, needs: list[bool]) -> Gradients:
        """New memory for the gradients over a head that are needed."""
        given = (head.hidden, head.weight if self.main_grad is None else None, head.bias)
        asked = (t if need else None for need, t in zip(needs, given, strict=True))
        return Gradients(*(None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in asked))


class Head(NamedTuple):
    """Rows (N, H), the weights that turn them into logits, and the target class of each (N,)."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None


class Sums(NamedTuple):
    """The gradients over a head before the upstream gradient is known; that of weight is summed in the dtype of its chunking."""

    sum_hidden: Tensor | None
    sum_weight: Tensor | None
    sum_bias: Tensor | None


class Gradients(NamedTuple):
    """The gradients over a head; that of weight is missing where main_grad takes it."""

    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


class Loop:
    """The kernels of summed losses of a head, for a backend's row passes; those of per-token results are in _token_loop.py.

    reduced  (head, token_weight, divide, row options, chunk options, statistics asked for) → summed loss and the results of rows. Its
           gradients are computed chunk by chunk in the forward pass, without the upstream gradient
    """

    def __init__(self, passes: RowPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.reduced = differentiable(
            make_kernel("linear_cross_entropy", self._allocate_reduced, self._launch_reduced),
            SumsBackward(passes).kernel("linear_cross_entropy_backward", make_kernel),
            public=4,
        )

    def _allocate_reduced(
        self, head: Head, token_weight: Tensor | None, divide: Tensor | None, options: RowOptions, chunks: ChunkOptions, asked: Asked,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        hidden, weight = head[:2]
        wide, device = accumulator(hidden.dtype), hidden.device
        return (
            torch.empty((), dtype=wide, device=device),
            *row_results(hidden, asked)[1:],
            torch.empty((), dtype=wide, device=device) if divides_late(hidden, divide) else None,
            torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if needs[0] else None,
            torch.empty(weight.shape, dtype=chunks.chunking(hidden, weight).dtype, device=device) if needs[1] else None,
            torch.empty(weight.shape[0], dtype=wide, device=device) if needs[2] else None,
        )

    def _launch_reduced(
        self, results: RowResults, scale: Tensor | None, sums: Sums, /, head: Head, token_weight: Tensor | None, divide: Tensor | None,
        options: RowOptions, chunks: ChunkOptions, asked: Asked, needs: list[bool],
    ) -> None:  # fmt: skip
        counted = Counted(head, options.ignore_index, chunks.pack)
        rows = chunks.chunking(head.hidden, head.weight).rows
        gradient = any(needs)
        inverse = None if divide is None else divide.reciprocal()
        factors = token_weight
        if inverse is not None and scale is None and gradient:
            factors = inverse.expand(head.hidden.shape[0]) if token_weight is None else token_weight * inverse
        loss, results = results.loss, results._replace(loss=results.statistics.new_empty(head.hidden.shape[0]))
        packed = Packed(head, counted.index())
        factors = packed.take(factors)
        inner, running = packed.results(results), Running(sums._replace(sum_hidden=packed.like(sums.sum_hidden)))
        for part, logits in logits_of(packed.head, rows):
            factor = None if factors is None else factors[part]
            self.passes.losses(logits, packed.head.target[part], _part(inner, part), options, factor, gradient)
            running.add(part, logits, packed.head)
        running.finish()
        packed.scatter(inner, results, RowResults._fields)
        packed.scatter_rows(running.sums.sum_hidden, sums.sum_hidden)
        torch.sum(results.loss if token_weight is None else results.loss * token_weight, dim=0, out=loss)
        if inverse is not None:
            loss.mul_(inverse)
            if scale is not None:
                scale.copy_(inverse)


class SumsBackward:
    """The backward pass of a loss whose gradients are complete except for the upstream gradient, a scalar."""

    def __init__(self, passes: RowPasses) -> None:
        self.passes = passes

    def kernel(self, name: str, make_kernel: Callable[..., Kernel]) -> Kernel:
        return make_kernel(name, self.allocate, self.launch, self.recycle)

    def allocate(
        self, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sums: Sums, main_grad: Tensor | None, needs: list[bool]
    ) -> Outputs:
        wanted = zip(needs, sums if main_grad is None else sums._replace(sum_weight=None), strict=True)
        return tuple(torch.empty_like(t, dtype=weight.dtype) if need and t is not None else None for need, t in wanted)

    def recycle(
        self, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sums: Sums, main_grad: Tensor | None, needs: list[bool]
    ) -> Outputs:
        """The sums themselves if they have the dtype of the gradient: scaling them in place saves a copy."""
        fresh = [need and t is not None and t.dtype != weight.dtype for need, t in zip(needs, sums, strict=True)]
        made = self.allocate(grad_loss, weight, scale, sums, main_grad, fresh)
        kept = sums if main_grad is None else sums._replace(sum_weight=None)
        return tuple(t if need and new is None else new for need, t, new in zip(needs, kept, made, strict=True))

    def launch(
        self, gradients: Gradients, /, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sums: Sums, main_grad: Tensor | None,
        needs: list[bool],
    ) -> None:  # fmt: skip
        factor = grad_loss if scale is None else grad_loss * scale
        for summed, grad in zip(sums, gradients, strict=True):
            if grad is not None and summed is not None and grad.numel():
                self.passes.scaled(summed, factor, grad)
        if main_grad is not None and sums.sum_weight is not None and needs[1]:
            # .data has a version counter of its own: a kept graph may add once more.
            self.passes.scaled(sums.sum_weight, factor, main_grad.data, add=True)


@functools.cache
def loop_of(passes: RowPasses, make_kernel: Callable[..., Kernel]) -> Loop:
    """The chunk loop of a backend, shared by its ops."""
    return Loop(passes, make_kernel)


def divides_late(hidden: Tensor, divide: Tensor | None) -> bool:
    """1/normalizer waits for the backward pass in float16, where a probability divided by the number of tokens underflows."""
    return divide is not None and hidden.dtype == torch.float16


def _part(results: RowResults, part: slice) -> RowResults:
    return RowResults(*(None if r is None else r[part] for r in results))  # type: ignore[arg-type]


def logits_of(head: Head, rows: int, buffer: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """(rows, logits) chunk by chunk, in one reused buffer."""
    count, classes = head.hidden.shape[0], head.weight.shape[0]
    if buffer is None:
        buffer = torch.empty(min(rows, count), classes, dtype=head.hidden.dtype, device=head.hidden.device)
    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        logits = buffer[: part.stop - part.start]
        multiply(logits, head.hidden[part], head.weight.t(), head.bias)
        yield part, logits


class Running:
    """The running sums over the chunks; `ranks` add up the gradient of hidden if they share the vocabulary."""

    def __init__(self, sums: Sums, ranks: RowSum = ALONE) -> None:
        self.sums, self.ranks = sums, ranks
        self.first = True

    def add(self, part: slice, gradient: Tensor, head: Head) -> None:
        """Add the gradient of one chunk of logits."""
        of_hidden, of_weight, of_bias = self.sums
        out = None
        if of_hidden is not None:
            out = of_hidden[part]
            # The parts of the ranks are added in float32, while the gradient of weight is computed.
            out = torch.empty_like(out, dtype=accumulator(out.dtype)) if self.ranks.shared else out
            accumulate(out, gradient, head.weight, first=True)
            self.ranks.start(out)
        if of_weight is not None:
            accumulate(of_weight, gradient.t(), head.hidden[part], self.first)
        if of_hidden is not None and out is not None and self.ranks.shared:
            self.ranks.end(out)
            of_hidden[part] = out
        if of_bias is not None:
            column = gradient.sum(0, dtype=of_bias.dtype)
            _ = of_bias.copy_(column) if self.first else of_bias.add_(column)
        self.first = False

    def finish(self) -> None:
        """Without chunks, the sums are zero."""
        if self.first:
            for summed in self.sums[1:]:
                if summed is not None:
                    summed.zero_()


def accumulate(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out (+)= a @ b, summed in the dtype of out."""
    multiply(out, a, b, None if first else out)


# Where a matmul takes less than this, about 0.15 ms on an H200, waiting for the number of ignored rows costs more than they do.
PACK_FLOPS = 10**11
# Packed rows come in whole tiles of a matmul, and copying the others' rows pays from 1/32 of ignored ones on.
PACK_TILE = 128
PACK_SHARE = 32


class Counted:
    """The rows whose target counts. Their number is requested at once and waited for as late as possible, unless it is known.

    number   of rows that count; -1 if all are taken, None if it is not known
    classes  that a matmul of each rank has
    """

    def __init__(self, head: Head, ignore_index: int, pack: bool, number: int | None = None, classes: int | None = None) -> None:
        self.mask: Tensor | None = None
        self.number, target = number, head.target
        if not pack or number == -1:
            return
        if target.is_cuda:
            # A CUDA graph cannot wait, so it keeps all rows.
            if 2 * head.hidden.numel() * (classes or head.weight.shape[0]) < PACK_FLOPS or torch.cuda.is_current_stream_capturing():
                return
            self.mask = target != ignore_index
            if number is None:
                self.arriving = self.mask.sum().to("cpu", non_blocking=True)
                self.arrived = torch.cuda.Event()
                self.arrived.record()
        elif target.device.type == "cpu":
            self.mask = target != ignore_index

    def index(self) -> Tensor | None:
        """The rows to keep, or None for all of them."""
        if self.mask is None:
            self.number = -1
            return None
        rows = self.mask.shape[0]
        if not self.mask.is_cuda:
            index = self.mask.nonzero()[:, 0]
            self.number = index.shape[0]
            return index if index.shape[0] < rows else None
        if self.number is None:
            self.arrived.synchronize()
            self.number = int(self.arriving)
        kept = -(-self.number // PACK_TILE) * PACK_TILE
        if kept > rows - rows // PACK_SHARE:
            return None
        # Ignored rows fill the last tile; they have neither loss nor gradient.
        return self.mask.to(torch.uint8).argsort(descending=True, stable=True)[:kept]


class Packed:
    """The rows that count: those of ignored targets are left out of every matmul."""

    def __init__(self, head: Head, index: Tensor | None) -> None:
        self.head, self.index = head, index
        if index is not None:
            self.head = head._replace(hidden=head.hidden[index], target=head.target[index])

    def take(self, full: Any) -> Any:
        """The packed rows of a tensor with all rows, or None."""
        return full if self.index is None or full is None else full[self.index]

    def like(self, full: Tensor | None) -> Tensor | None:
        """A tensor for the packed rows: the given one itself when nothing was left out."""
        if full is None or self.index is None:
            return full
        return full.new_empty(self.index.shape[0], *full.shape[1:])

    def results(self, full: RowResults) -> RowResults:
        return RowResults(*(self.like(t) for t in full))  # type: ignore[arg-type]

    def scatter(self, inner: Sequence[Tensor | None], full: Sequence[Tensor | None], names: Sequence[str]) -> None:
        """Put packed results of these names in their rows; the others have 0, and no prediction."""
        if self.index is None:
            return
        for name, part, whole in zip(names, inner, full, strict=False):
            if part is not None and whole is not None:
                whole.fill_(-1 if name == "prediction" else 0).index_copy_(0, self.index, part)

    def scatter_rows(self, inner: Tensor | None, full: Tensor | None) -> None:
        """Put packed gradients in their rows; the others get zero."""
        if inner is not None and full is not None and self.index is not None:
            full.zero_().index_copy_(0, self.index, inner)
