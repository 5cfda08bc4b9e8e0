# SPDX-License-Identifier: Apache-2.0
"""The gradients of a head, summed tile by tile of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from liger_core.kernels import Kernel, Outputs, multiply, slices
from liger_core.op import accumulator
from liger_core.ops._token_passes import blocks
from liger_core.ops.head.head import CountedRows, Head
from liger_core.ops.head.shards import RowSum, Vocabulary

# Elements of main_grad whose sum is held at a time where it has to be scaled, in float16.
SCALED = 1 << 22


class Gradients(NamedTuple):
    """The gradients of a head; grad_weight is None if main_grad receives it instead."""

    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def new_gradients(head: Head, main_grad: Tensor | None, needs: list[bool]) -> Gradients:
    """Allocate the gradients of a head that are needed."""
    inputs = (head.hidden, head.weight if main_grad is None else None, head.bias)
    return Gradients(
        *(
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if n and t is not None else None
            for n, t in zip(needs, inputs, strict=True)
        )
    )


class Sums(NamedTuple):
    """The gradients of a head before the upstream gradient is known; the weight's has the dtype of the cut."""

    sum_hidden: Tensor | None
    sum_weight: Tensor | None
    sum_bias: Tensor | None


def divides_late(head: Head, divide: Tensor | None) -> bool:
    """Whether 1/divide waits for the backward pass: in float16, a probability divided by the number of tokens
    underflows."""
    return divide is not None and head.hidden.dtype == torch.float16


def new_sums(head: Head, dtype: torch.dtype, needs: list[bool]) -> Sums:
    """Allocate the sums that are needed, the weight's in this dtype."""
    hidden, weight, device = head.hidden, head.weight, head.hidden.device
    return Sums(
        torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if needs[0] else None,
        torch.empty(weight.shape, dtype=dtype, device=device) if needs[1] else None,
        torch.empty(weight.shape[0], dtype=accumulator(hidden.dtype), device=device) if needs[2] else None,
    )


class HeadGradients:
    """The running sums of a head's gradients over tiles: all classes of some rows, then those of the next rows.

    Several tiles are summed before rounding: those of a row for hidden, in float32 or wider, and those of a class for
    weight, in `dtype`. In float16, the slopes are divided by a factor, and `finish` multiplies the sums by it.
    """

    def __init__(
        self, rows: CountedRows, head: Head, results: Gradients | Sums, vocab: Vocabulary, most: int,
        dtype: torch.dtype,
        main_grad: Tensor | None = None, factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Prepare the sums for a head of counted rows, without padding classes; at most `most` rows come at a time."""
        self.counted, self.hidden, self.weight, self.dtype, self.factor = rows, head.hidden, head.weight, dtype, factor
        self.whole, of_weight, of_bias = results
        self.classes = head.weight.shape[0]
        self.of_hidden: Tensor | None = rows.like(self.whole)
        self.of_weight, self.of_bias = self._without_padding(of_weight), self._without_padding(of_bias)
        # .data has a version counter of its own: a kept graph may add once more.
        self.main_grad = None if main_grad is None else main_grad.data[: self.classes]
        # None where this rank has all classes.
        self.ranks: RowSum | None = None
        if vocab.group is not None:
            self.ranks = RowSum(vocab, 0 if self.whole is None else self.whole.shape[0], rows.index, most)
        self.most = most
        self.hidden_sum: Tensor | None = None
        self.weight_sum: Tensor | None = None
        self.bias_sum: Tensor | None = None
        if self.of_bias is not None:
            wide = accumulator(head.hidden.dtype)
            self.bias_sum = (
                self.of_bias.zero_() if self.of_bias.dtype == wide else torch.zeros_like(self.of_bias, dtype=wide)
            )

    def _without_padding(self, gradient: Tensor | None) -> Tensor | None:
        """Return the rows that are classes, without padding, whose gradient is zero."""
        if gradient is None or gradient.shape[0] == self.classes:
            return gradient
        gradient[self.classes :].zero_()
        return gradient[: self.classes]

    def add(self, rows: slice, classes: slice, slope: Tensor) -> None:
        """Add the gradient of the logits of a tile."""
        if self.of_hidden is not None:
            self._add_to_hidden(rows, classes, slope)
        self._add_to_weight(rows, classes, slope, self.hidden[rows])
        if self.bias_sum is not None:
            self.bias_sum[classes] += slope.sum(0, dtype=self.bias_sum.dtype)
        if self.of_hidden is not None and classes.stop == self.classes:
            self._round(rows)

    def add_unweighted(self, slope: Tensor, row_factor: Tensor) -> None:
        """Add the gradient of all logits, given without a factor for each row.

        dX = factor · (slope @ W), dW = slopeᵀ @ (factor · X).
        """
        count = self.hidden.shape[0]
        if self.of_hidden is not None and count:
            buffer = self.hidden.new_empty(
                min(self.most, count), self.hidden.shape[1], dtype=accumulator(self.hidden.dtype)
            )
            for rows in slices(slice(0, count), self.most):
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

    def _add_to_hidden(self, rows: slice, classes: slice, slope: Tensor) -> None:
        first, last = classes.start == 0, classes.stop == self.classes
        out = self._sum_of(rows, several=not (first and last) or self.ranks is not None)
        multiply(out, slope, self.weight[classes], None if first else out)
        if last and self.ranks is not None:
            # While the gradient of weight is computed.
            self.ranks.start(out)

    def _sum_of(self, rows: slice, several: bool) -> Tensor:
        """Return the tensor in which the gradient of these rows is summed."""
        assert self.of_hidden is not None
        wide = accumulator(self.of_hidden.dtype)
        if not several or self.of_hidden.dtype == wide:
            return self.of_hidden[rows]
        if self.hidden_sum is None:
            self.hidden_sum = torch.empty_like(self.of_hidden[: self.most], dtype=wide)
        return self.hidden_sum[: rows.stop - rows.start]

    def _round(self, rows: slice) -> None:
        """Store the gradient of these rows, once the ranks have added theirs."""
        assert self.of_hidden is not None
        total = self.of_hidden[rows] if self.hidden_sum is None else self.hidden_sum[: rows.stop - rows.start]
        if self.ranks is not None:
            self.ranks.end(total)
        if self.hidden_sum is not None:
            self.of_hidden[rows] = total

    def _add_to_weight(self, rows: slice, classes: slice, slope: Tensor, hidden: Tensor) -> None:
        if self.of_weight is not None:
            first = rows.start == 0
            if (
                first
                and self.weight_sum is None
                and rows.stop < self.hidden.shape[0]
                and self.dtype != self.of_weight.dtype
            ):
                self.weight_sum = torch.empty_like(self.of_weight, dtype=self.dtype)
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


class ScalingPass(Protocol):
    """The pass that the backward of a summed loss needs from a backend."""

    def scaled(self, tensor: Tensor, scale: Tensor, out: Tensor, add: bool = False) -> None: ...


class SumsBackward:
    """The backward pass of a loss whose gradients are complete except for the upstream gradient, a scalar."""

    def __init__(self, passes: ScalingPass) -> None:
        self.passes = passes

    def kernel(self, name: str, make_kernel: Callable[..., Kernel]) -> Kernel:
        return make_kernel(name, self.allocate, self.launch, self.recycle)

    def allocate(
        self, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sums: Sums, main_grad: Tensor | None,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        wanted = zip(needs, sums if main_grad is None else sums._replace(sum_weight=None), strict=True)
        return tuple(torch.empty_like(t, dtype=weight.dtype) if need and t is not None else None for need, t in wanted)

    def recycle(
        self, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sums: Sums, main_grad: Tensor | None,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        """Reuse sums that have the dtype of the gradient: scaling them in place saves a copy."""
        fresh = [need and t is not None and t.dtype != weight.dtype for need, t in zip(needs, sums, strict=True)]
        grads = self.allocate(grad_loss, weight, scale, sums, main_grad, fresh)
        reused = sums if main_grad is None else sums._replace(sum_weight=None)
        return tuple(t if need and new is None else new for need, t, new in zip(needs, reused, grads, strict=True))

    def launch(
        self, gradients: Gradients, /, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sums: Sums,
        main_grad: Tensor | None,
        needs: list[bool],
    ) -> None:  # fmt: skip
        factor = grad_loss if scale is None else grad_loss * scale
        for summed, grad in zip(sums, gradients, strict=True):
            if grad is not None and summed is not None and grad.numel():
                self.passes.scaled(summed, factor, grad)
        if main_grad is not None and sums.sum_weight is not None and needs[1]:
            # .data has a version counter of its own: a kept graph may add once more.
            self.passes.scaled(sums.sum_weight, factor, main_grad.data, add=True)
