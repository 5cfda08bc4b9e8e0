# SPDX-License-Identifier: Apache-2.0
"""The gradients of a head, summed tile by tile of logits."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.kernels import Kernel, Outputs, multiply, slices
from liger_core.op import accumulator
from liger_core.ops._softmax_loss import RowPasses
from liger_core.ops._token_passes import blocks
from liger_core.ops.head.head import CountedRows, Head
from liger_core.ops.head.loop import Cut, Tile
from liger_core.ops.head.shards import RowSum, Vocabulary
from liger_core.private_torch import hold_stream

# Elements of main_grad whose sum is held at a time where it has to be scaled, in float16.
SCALED = 1 << 22
# Cycles of the GPU, 10 µs or a little more: the kernel of a collective starts within 4 µs.
HEAD_START = 20_000


class Gradients(NamedTuple):
    """The gradients of a head; grad_weight is None if main_grad receives it instead."""

    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def new_gradients(head: Head, main_grad: Tensor | None, needs: list[bool]) -> Gradients:
    """Allocate the gradients of a head that are needed."""
    inputs = zip(needs, (head.hidden, head.weight if main_grad is None else None, head.bias), strict=True)
    return Gradients._make(t.new_empty(t.shape) if need and t is not None else None for need, t in inputs)


class Sums(NamedTuple):
    """The gradients of a head before the upstream gradient is known. sum_weight has the dtype of `Cut.dtype`.

    scale  in float16 the inverse of the divisor, which the backward pass applies: p / tokens would underflow
    """

    scale: Tensor | None
    sum_hidden: Tensor | None
    sum_weight: Tensor | None
    sum_bias: Tensor | None


def new_sums(head: Head, divide: Tensor | None, dtype: torch.dtype, needs: list[bool]) -> Sums:
    """Allocate the sums that are needed; sum_weight has this dtype."""
    hidden, weight, wide = head.hidden, head.weight, accumulator(head.hidden.dtype)
    return Sums(
        hidden.new_empty((), dtype=wide) if divide is not None and hidden.dtype == torch.float16 else None,
        hidden.new_empty(hidden.shape) if needs[0] else None,
        hidden.new_empty(weight.shape, dtype=dtype) if needs[1] else None,
        hidden.new_empty(weight.shape[0], dtype=wide) if needs[2] else None,
    )


class HeadGradients:
    """The running sums of a head's gradients over tiles: all classes of some rows, then those of the next rows.

    dX is summed over the blocks of classes in float32 or wider, and dW over the groups of rows in `cut.dtype`; both are
    rounded at the end. With a factor (float16, gradients that arrive later), slopes come divided by it, and `finish`
    multiplies the sums by it.
    """

    def __init__(
        self, rows: CountedRows, head: Head, results: Gradients | Sums, vocab: Vocabulary, cut: Cut,
        main_grad: Tensor | None = None, factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Prepare the sums for a head of counted rows, without padding classes."""
        self.counted, self.hidden, self.weight, self.cut, self.factor = rows, head.hidden, head.weight, cut, factor
        *_, self.whole, of_weight, of_bias = results
        self.classes = head.weight.shape[0]
        self.of_hidden: Tensor | None = rows.like(self.whole)
        self.of_weight, self.of_bias = self._without_padding(of_weight), self._without_padding(of_bias)
        # .data hides the write from autograd's version check, which would refuse a second backward pass.
        self.main_grad = None if main_grad is None else main_grad.data[: self.classes]
        # None where this rank has all classes.
        self.ranks: RowSum | None = None
        if vocab.group is not None:
            self.ranks = RowSum(vocab, 0 if self.whole is None else self.whole.shape[0], rows.index, cut.rows)
        self.hidden_sum: Tensor | None = None
        self.weight_sum: Tensor | None = None
        self.bias_sum: Tensor | None = None
        if self.of_bias is not None:
            self.bias_sum = self.of_bias.zero_().to(accumulator(head.hidden.dtype))

    def _without_padding(self, gradient: Tensor | None) -> Tensor | None:
        """Return the rows that are classes, without padding, whose gradient is zero."""
        if gradient is None or gradient.shape[0] == self.classes:
            return gradient
        gradient[self.classes :].zero_()
        return gradient[: self.classes]

    def add(self, tile: Tile) -> None:
        """Add the gradient of the logits of a tile."""
        if self.of_hidden is not None:
            self._add_to_hidden(self.of_hidden, tile)
        self._add_to_weight(tile.rows, tile.classes, tile.slope, self.hidden[tile.rows])
        if self.bias_sum is not None:
            self.bias_sum[tile.classes] += tile.slope.sum(0, dtype=self.bias_sum.dtype)
        if self.of_hidden is not None and tile.classes.stop == self.classes:
            # Round only after the sum over the ranks.
            total = self._total(self.of_hidden, tile.rows)
            if self.ranks is not None:
                self.ranks.end(total)
            if self.hidden_sum is not None:
                self.of_hidden[tile.rows] = total

    def add_unweighted(self, slope: Tensor, row_factor: Tensor) -> None:
        """Add the gradient of all logits, which lacks a factor for each row.

        dX = factor · (slope @ W), dW = slopeᵀ @ (factor · X).
        """
        count = self.hidden.shape[0]
        if self.of_hidden is not None and count:
            size, wide = (min(self.cut.rows, count), self.hidden.shape[1]), accumulator(self.hidden.dtype)
            buffer = self.hidden.new_empty(size, dtype=wide)
            for rows in slices(slice(0, count), self.cut.rows):
                out = buffer[: rows.stop - rows.start]
                multiply(out, slope[rows], self.weight)
                if self.ranks is not None:
                    self.ranks.start(out)
                    self.ranks.end(out)
                torch.mul(out, row_factor[rows, None], out=self.of_hidden[rows])
        if (self.of_weight is not None or self.main_grad is not None) and count:
            # Rounded once.
            hidden = torch.mul(self.hidden, row_factor[:, None], out=torch.empty_like(self.hidden))
            self._add_to_weight(slice(0, count), slice(0, self.classes), slope, hidden)
        if self.bias_sum is not None:
            for rows in blocks(slope):
                self.bias_sum += row_factor[rows] @ slope[rows].to(row_factor.dtype)

    def finish(self) -> None:
        """Round the sums and write the gradients of the counted rows to their positions; without tiles they are 0."""
        count, factor = self.hidden.shape[0], self.factor
        if self.of_weight is not None and not count:
            self.of_weight.zero_()
        for result, total in ((self.of_weight, self.weight_sum), (self.of_bias, self.bias_sum)):
            total = result if total is None else total
            if total is not None and factor is not None:
                total.mul_(factor)
            if result is not None and total is not None and result is not total:
                result.copy_(total)
        if self.of_hidden is not None and factor is not None:
            self.of_hidden.mul_(factor)
        self.counted.scatter(self.of_hidden, self.whole)

    def _add_to_hidden(self, of_hidden: Tensor, tile: Tile) -> None:
        first, last = tile.classes.start == 0, tile.classes.stop == self.classes
        several, wide = not (first and last) or self.ranks is not None, accumulator(of_hidden.dtype)
        if several and of_hidden.dtype != wide and self.hidden_sum is None:
            self.hidden_sum = torch.empty_like(of_hidden[: self.cut.rows], dtype=wide)
        out = self._total(of_hidden, tile.rows)
        multiply(out, tile.slope, self.weight[tile.classes], None if first else out)
        if last and self.ranks is not None:
            # The sum overlaps with the matmul of the gradient of weight, which takes every processor: the sum's kernel
            # must start first.
            self.ranks.start(out)
            if out.is_cuda:
                hold_stream(HEAD_START)

    def _total(self, of_hidden: Tensor, rows: slice) -> Tensor:
        """Return the tensor in which the gradient of these rows is summed."""
        return of_hidden[rows] if self.hidden_sum is None else self.hidden_sum[: rows.stop - rows.start]

    def _add_to_weight(self, rows: slice, classes: slice, slope: Tensor, hidden: Tensor) -> None:
        if self.of_weight is not None:
            first, several = rows.start == 0, rows.stop < self.hidden.shape[0]
            if first and several and self.weight_sum is None and self.cut.dtype != self.of_weight.dtype:
                self.weight_sum = torch.empty_like(self.of_weight, dtype=self.cut.dtype)
            out = (self.of_weight if self.weight_sum is None else self.weight_sum)[classes]
            multiply(out, slope.t(), hidden, None if first else out)
        if self.main_grad is None:
            return
        if self.factor is None:
            out = self.main_grad[classes]
            multiply(out, slope.t(), hidden, out)
            return
        size = max(1, SCALED // hidden.shape[1])
        for out, columns in zip(self.main_grad[classes].split(size), slope.t().split(size), strict=True):
            total = torch.empty_like(out)
            multiply(total, columns, hidden)
            out.addcmul_(total, self.factor)


def sums_backward(passes: RowPasses, name: str, make_kernel: Callable[..., Kernel]) -> Kernel:
    """Return the backward kernel of a loss whose gradients are complete except for the upstream gradient, a scalar."""

    def allocate(
        grad_loss: Tensor, weight: Tensor, sums: Sums, main_grad: Tensor | None, needs: list[bool],
        recycles: bool = False,
    ) -> Outputs:  # fmt: skip
        """Allocate the gradients. With `recycles`, a sum that has their dtype is scaled in place."""
        sums = sums if main_grad is None else sums._replace(sum_weight=None)
        return tuple(
            t if t is None or (recycles and t.dtype == weight.dtype) else torch.empty_like(t, dtype=weight.dtype)
            for t in (t if need else None for need, t in zip(needs, sums[1:], strict=True))
        )

    def launch(
        gradients: Gradients, /, grad_loss: Tensor, weight: Tensor, sums: Sums, main_grad: Tensor | None,
        needs: list[bool],
    ) -> None:  # fmt: skip
        factor = grad_loss if sums.scale is None else grad_loss * sums.scale
        for summed, grad in zip(sums[1:], gradients, strict=True):
            if grad is not None and summed is not None and grad.numel():
                passes.scaled(summed, factor, grad)
        if main_grad is not None and sums.sum_weight is not None and needs[1]:
            # .data hides the write from autograd's version check, which would refuse a second backward pass.
            passes.scaled(sums.sum_weight, factor, main_grad.data, add=True)

    return make_kernel(name, allocate, launch, functools.partial(allocate, recycles=True))
