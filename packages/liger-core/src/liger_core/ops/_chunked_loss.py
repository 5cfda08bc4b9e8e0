# SPDX-License-Identifier: Apache-2.0
"""The chunk loop of linear_cross_entropy: the products around a backend's row passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_core.kernels import Kernel, Outputs, differentiable
from liger_core.ops._inputs import accumulator
from liger_core.ops._softmax_loss import RowOptions, RowPasses, RowResults

MiB = 1 << 20

# One H200, V=128256: chunks of 2048 rows and more run all three products at full rate; a float32 dW costs 20 % at 2048 rows, 5 % at
# 4096 and nothing in a single chunk, so the budget buys one chunk first, then long ones.
SINGLE_CHUNK_BYTES = 2150 * MiB
CHUNK_BYTES = 1074 * MiB
CPU_BYTES = 64 * MiB


def chunk_rows(rows: int, width: int, classes: int, chunk: int, element: int, device: str) -> int:
    """Rows of logits to hold at a time: chunk itself, the report's formula for -1, by memory budget for 0."""
    if chunk > 0:
        return min(chunk, max(rows, 1))
    if chunk == -1:
        pieces = -(-rows // max(1, -(-classes // width)))
        return 1 << max(0, pieces - 1).bit_length()
    row = classes * element
    if device == "cpu":
        return max(1, min(max(rows, 1), CPU_BYTES // row))
    if rows * row <= SINGLE_CHUNK_BYTES:
        return max(rows, 1)
    fitting = max(1, CHUNK_BYTES // row)
    return 1 << (fitting.bit_length() - 1)


SCALARS = "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale"
INPUTS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight"
RESULTS = "Tensor loss, Tensor lse, Tensor? prediction, Tensor? entropy"
GRADIENTS = "(Tensor? grad_hidden, Tensor? grad_weight, Tensor? grad_bias)"


def chunked(passes: RowPasses, kernel: Callable[..., Kernel]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(total, rows): the summed loss with its gradients from the forward pass, and the per-row loss that recomputes."""
    loop = _Loop(passes)
    total = differentiable(
        kernel(
            f"linear_cross_entropy({INPUTS}, Tensor? token_weight, Tensor? divide, {SCALARS}, ScalarType? accumulate_dtype, int chunk, "
            f"bool metrics, bool[3] needs) -> ({RESULTS}, Tensor scale, Tensor? sum_hidden, Tensor? sum_weight, Tensor? sum_bias)",
            loop.allocate_total,
            loop.total,
        ),
        kernel(
            "linear_cross_entropy_backward(Tensor grad_loss, Tensor weight, Tensor scale, Tensor? sum_hidden, Tensor? sum_weight, "
            f"Tensor? sum_bias, bool[3] needs) -> {GRADIENTS}",
            loop.allocate_total_backward,
            loop.total_backward,
        ),
        public=4,
    )
    rows = differentiable(
        kernel(
            f"linear_cross_entropy_rows({INPUTS}, {SCALARS}, ScalarType? accumulate_dtype, int chunk, bool metrics) -> ({RESULTS})",
            loop.allocate_rows,
            loop.rows,
        ),
        kernel(
            f"linear_cross_entropy_rows_backward(Tensor grad_loss, {INPUTS}, Tensor lse, {SCALARS}, ScalarType? accumulate_dtype, int chunk, "
            f"bool[3] needs) -> {GRADIENTS}",
            loop.allocate_rows_backward,
            loop.rows_backward,
        ),
        public=4,
    )
    return total, rows


class _Loop:
    """Allocators and launchers of the four kernels."""

    def __init__(self, passes: RowPasses) -> None:
        self.passes = passes

    # -- the summed loss: gradients are computed chunk by chunk in the forward pass, without the upstream gradient

    def allocate_total(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, token_weight: Tensor | None,
        divide: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float,
        accumulate_dtype: torch.dtype | None, chunk: int, metrics: bool, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        wide = accumulator(hidden.dtype)
        rows = chunk_rows(hidden.shape[0], hidden.shape[1], weight.shape[0], chunk, hidden.element_size(), hidden.device.type)
        dtype = _sum_dtype(weight, accumulate_dtype, hidden.shape[0] <= rows)
        return (
            torch.empty((), dtype=wide, device=hidden.device),
            *_row_results(hidden, metrics)[1:],
            torch.empty((), dtype=wide, device=hidden.device),
            torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None,
            torch.empty(weight.shape, dtype=dtype, device=weight.device) if needs[1] else None,
            torch.empty(weight.shape[0], dtype=wide, device=weight.device) if needs[2] else None,
        )

    def total(
        self, loss: Tensor, lse: Tensor, prediction: Tensor | None, entropy: Tensor | None, scale: Tensor, sum_hidden: Tensor | None,
        sum_weight: Tensor | None, sum_bias: Tensor | None, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        class_weight: Tensor | None, token_weight: Tensor | None, divide: Tensor | None, ignore_index: int, label_smoothing: float,
        z_loss: float, softcap: float | None, logit_scale: float, accumulate_dtype: torch.dtype | None, chunk: int, metrics: bool,
        needs: list[bool],
    ) -> None:  # fmt: skip
        options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight)
        packed = _Packed(hidden, target, ignore_index, token_weight)
        results = RowResults(torch.empty_like(lse), lse, prediction, entropy)
        inner = packed.results(results)
        sums = _Sums(packed.like(sum_hidden), sum_weight, sum_bias)
        gradient = any(needs)
        for part, logits in _products(packed.hidden, weight, bias, chunk):
            factor = None if packed.factor is None else packed.factor[part]
            self.passes.losses(logits, packed.target[part], _rows_of(inner, part), options, factor, gradient)
            sums.add(part, logits, packed.hidden, weight)
        sums.finish()
        packed.scatter(inner, results)
        packed.scatter_rows(sums.hidden, sum_hidden)
        torch.sum(results.loss if token_weight is None else results.loss * token_weight, dim=0, out=loss)
        if divide is None:
            scale.fill_(1.0)
        else:
            torch.reciprocal(divide, out=scale)
            loss.mul_(scale)

    def allocate_total_backward(
        self, grad_loss: Tensor, weight: Tensor, scale: Tensor, sum_hidden: Tensor | None, sum_weight: Tensor | None,
        sum_bias: Tensor | None, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        return tuple(
            torch.empty(total.shape, dtype=weight.dtype, device=weight.device) if need and total is not None else None
            for need, total in zip(needs, (sum_hidden, sum_weight, sum_bias), strict=True)
        )

    def total_backward(
        self, grad_hidden: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, grad_loss: Tensor, weight: Tensor,
        scale: Tensor, sum_hidden: Tensor | None, sum_weight: Tensor | None, sum_bias: Tensor | None, needs: list[bool],
    ) -> None:  # fmt: skip
        # Out of place, so that a second backward finds the sums as they were; 1/normaliser waits until here, since in fp16 a
        # probability divided by the number of tokens underflows.
        factor = grad_loss * scale
        for total, grad in ((sum_hidden, grad_hidden), (sum_weight, grad_weight), (sum_bias, grad_bias)):
            if grad is not None and total is not None and grad.numel():
                self.passes.scaled(total, factor, grad)

    # -- the loss of each row: the backward pass recomputes the logits, since only then is the upstream gradient known

    def allocate_rows(self, hidden: Tensor, weight: Tensor, target: Tensor, *options: Any) -> Outputs:
        return _row_results(hidden, options[-1])

    def rows(
        self, loss: Tensor, lse: Tensor, prediction: Tensor | None, entropy: Tensor | None, hidden: Tensor, weight: Tensor, target: Tensor,
        bias: Tensor | None, class_weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
        softcap: float | None, logit_scale: float, accumulate_dtype: torch.dtype | None, chunk: int, metrics: bool,
    ) -> None:  # fmt: skip
        options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight)
        packed = _Packed(hidden, target, ignore_index, None)
        results = RowResults(loss, lse, prediction, entropy)
        inner = packed.results(results)
        for part, logits in _products(packed.hidden, weight, bias, chunk):
            self.passes.losses(logits, packed.target[part], _rows_of(inner, part), options, None, False)
        packed.scatter(inner, results)

    def allocate_rows_backward(
        self, grad_loss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
    ) -> Outputs:
        needs = rest[-1]
        return tuple(
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if need and t is not None else None
            for need, t in zip(needs, (hidden, weight, bias), strict=True)
        )

    def rows_backward(
        self, grad_hidden: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, grad_loss: Tensor, hidden: Tensor,
        weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, lse: Tensor, ignore_index: int,
        label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, accumulate_dtype: torch.dtype | None,
        chunk: int, needs: list[bool],
    ) -> None:  # fmt: skip
        options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight)
        # The largest upstream gradient is factored out and put back at the end: p · grad underflows in fp16 where grad is 1/tokens.
        largest = grad_loss.abs().amax() if grad_loss.numel() else grad_loss.new_ones(())
        largest = torch.where(largest > 0, largest, 1.0)
        packed = _Packed(hidden, target, ignore_index, grad_loss / largest, lse)
        count, width = packed.hidden.shape
        one = count <= chunk_rows(count, width, weight.shape[0], chunk, hidden.element_size(), hidden.device.type)
        dtype = _sum_dtype(weight, accumulate_dtype, one)
        sum_weight = None if grad_weight is None else torch.empty(weight.shape, dtype=dtype, device=weight.device)
        sum_bias = None if grad_bias is None else torch.empty(grad_bias.shape, dtype=accumulator(weight.dtype), device=weight.device)
        sum_hidden = None if grad_hidden is None else torch.empty_like(packed.hidden)
        sums = _Sums(sum_hidden, sum_weight, sum_bias)
        assert packed.factor is not None and packed.lse is not None
        for part, logits in _products(packed.hidden, weight, bias, chunk):
            self.passes.gradients(logits, packed.target[part], packed.lse[part], packed.factor[part], options, logits)
            sums.add(part, logits, packed.hidden, weight)
        sums.finish()
        largest = largest.to(accumulator(weight.dtype))
        for total, grad in ((sum_weight, grad_weight), (sum_bias, grad_bias), (sum_hidden, None)):
            if total is not None and total.numel():
                self.passes.scaled(total, largest, total if grad is None else grad)
        packed.scatter_rows(sum_hidden, grad_hidden)


def _sum_dtype(weight: Tensor, accumulate_dtype: torch.dtype | None, single: bool) -> torch.dtype:
    """Of the summed dW: as asked, else the weight's own for a single chunk (fp16 could overflow before it is scaled), else float32."""
    if accumulate_dtype is not None:
        return accumulate_dtype
    if single and weight.dtype != torch.float16:
        return weight.dtype
    return accumulator(weight.dtype)


def _row_results(hidden: Tensor, metrics: bool) -> RowResults:
    rows, wide = hidden.shape[0], accumulator(hidden.dtype)
    loss, lse = (torch.empty(rows, dtype=wide, device=hidden.device) for _ in range(2))
    if not metrics:
        return RowResults(loss, lse, None, None)
    return RowResults(loss, lse, torch.empty(rows, dtype=torch.int64, device=hidden.device), torch.empty_like(loss))


def _rows_of(results: RowResults, part: slice) -> RowResults:
    return RowResults(*(None if r is None else r[part] for r in results))  # type: ignore[arg-type]


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Any:
    """(rows, logits) chunk by chunk, in one reused buffer."""
    count, classes = hidden.shape[0], weight.shape[0]
    rows = chunk_rows(count, hidden.shape[1], classes, chunk, hidden.element_size(), hidden.device.type)
    buffer = torch.empty(min(rows, count), classes, dtype=hidden.dtype, device=hidden.device)
    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        logits = buffer[: part.stop - part.start]
        if bias is None:
            torch.mm(hidden[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[part], weight.t(), out=logits)
        yield part, logits


class _Sums:
    """The gradients of hidden, weight and bias while the chunks go by."""

    def __init__(self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.first = True

    def add(self, part: slice, gradient: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Take in the gradient of one chunk of logits."""
        if self.hidden is not None:
            torch.mm(gradient, weight, out=self.hidden[part])
        if self.weight is not None:
            _accumulate(self.weight, gradient.t(), hidden[part], self.first)
        if self.bias is not None:
            column = gradient.sum(0, dtype=self.bias.dtype)
            _ = self.bias.copy_(column) if self.first else self.bias.add_(column)
        self.first = False

    def finish(self) -> None:
        """Without any chunk the sums are zero."""
        if self.first:
            for total in (self.weight, self.bias):
                if total is not None:
                    total.zero_()


def _accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total (+)= a @ b, summed in total's dtype."""
    if total.dtype == a.dtype:
        _ = torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif total.dtype == torch.float32 and a.is_cuda:
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        a, b = a.to(total.dtype), b.to(total.dtype)
        _ = torch.mm(a, b, out=total) if first else total.addmm_(a, b)


class _Packed:
    """The rows that count: on the CPU, where looking costs nothing, ignored ones are left out of every product."""

    def __init__(self, hidden: Tensor, target: Tensor, ignore_index: int, factor: Tensor | None, lse: Tensor | None = None) -> None:
        self.index: Tensor | None = None
        self.hidden, self.target, self.factor, self.lse = hidden, target, factor, lse
        if hidden.device.type != "cpu":
            return
        index = (target != ignore_index).nonzero()[:, 0]
        if index.shape[0] < target.shape[0]:
            self.index = index
            self.hidden, self.target = hidden[index], target[index]
            self.factor = None if factor is None else factor[index]
            self.lse = None if lse is None else lse[index]

    def like(self, full: Tensor | None) -> Tensor | None:
        """A tensor for the packed rows: the given one itself when nothing was left out."""
        if full is None or self.index is None:
            return full
        return full.new_empty(self.index.shape[0], *full.shape[1:])

    def results(self, full: RowResults) -> RowResults:
        return RowResults(*(self.like(t) for t in full))  # type: ignore[arg-type]

    def scatter(self, inner: RowResults, full: RowResults) -> None:
        """Put packed results in their rows; the others have loss 0, entropy 0 and no prediction."""
        if self.index is None:
            return
        for name, part, whole in zip(RowResults._fields, inner, full, strict=True):
            if part is not None and whole is not None:
                whole.fill_(-1 if name == "prediction" else 0).index_copy_(0, self.index, part)

    def scatter_rows(self, inner: Tensor | None, full: Tensor | None) -> None:
        """Put packed gradients in their rows; the others get zero."""
        if inner is not None and full is not None:
            if self.index is not None:
                full.zero_().index_copy_(0, self.index, inner)
            elif inner is not full:
                full.copy_(inner)
