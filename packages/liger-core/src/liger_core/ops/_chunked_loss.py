# SPDX-License-Identifier: Apache-2.0
"""The chunk loop of linear_cross_entropy and linear_log_prob: the products around a backend's row passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from liger_core.kernels import Kernel, Outputs, differentiable
from liger_core.ops._inputs import accumulator
from liger_core.ops._softmax_loss import EntropyTerm, RowOptions, RowPasses, RowResults, row_results

Chunk = int | Literal["report"] | None

MiB = 1 << 20

# One H200, V=128256: chunks of 2048 rows and more run all three products at full rate; a float32 dW costs 20 % at 2048 rows, 5 % at
# 4096 and nothing in a single chunk or at 8192, so the default buys one chunk, or several as long.
CHUNK_BYTES = 2150 * MiB
CPU_BYTES = 64 * MiB
LONG_CHUNK = 2048
HALF_CHUNK = 4096


class Plan(NamedTuple):
    """Rows of logits held at a time, and the dtype in which the gradient of weight is summed over the chunks."""

    rows: int
    dtype: torch.dtype


def plan(
    rows: int,
    width: int,
    classes: int,
    dtype: torch.dtype,
    device: str,
    *,
    chunk: int = 0,
    budget: int = 0,
    accumulate_dtype: torch.dtype | None = None,
    trained: bool = True,
) -> Plan:
    """Chunks of `chunk` rows, by the report's formula for -1, or for 0 those that fit a budget in bytes beyond inputs and gradients.

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
            # Two halves that share a buffer and the float32 sum take less than one chunk, and hardly longer.
            length = half
    elif not budget:
        length = max(1, CPU_BYTES // row) if device == "cpu" else _power_below(CHUNK_BYTES // row)
    else:
        # The sum lives beside the chunks, and at the end beside the gradient that is made of it.
        beside = classes * width * (wide.itemsize - dtype.itemsize) if trained else 0
        if accumulate_dtype is None and dtype != torch.float16 and budget < max(beside + LONG_CHUNK * row, classes * width * wide.itemsize):
            wide, beside = once, 0
        length = _power_below((budget - beside) // row)
    return Plan(length, once if count <= length else wide)


def _power_below(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def chunk_code(chunk: Chunk) -> int:
    """The option as custom ops take it: rows, -1 for the report's formula, 0 for the budget."""
    return 0 if chunk is None else -1 if chunk == "report" else chunk


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on this type of device; None where it is off."""
    # Meta tensors have no autocast; torch.compile of PyTorch 2.11 cannot trace the question whether there is one.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of the matmul in autocast's dtype, where it is on."""
    low = autocast_dtype(hidden.device.type)
    if low is None:
        return hidden, weight, bias
    return hidden.to(low), weight.to(low), None if bias is None else bias.to(low)


SCALARS = "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale"
CHUNKS = "ScalarType? accumulate_dtype, int chunk, int budget, bool pack"
INPUTS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight"
RESULTS = "Tensor loss, Tensor statistics, Tensor? prediction, Tensor? entropy"
GRADIENTS = "(Tensor? grad_hidden, Tensor? grad_weight, Tensor? grad_bias)"


def chunked(passes: RowPasses, kernel: Callable[..., Kernel]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(total, rows): the summed loss with its gradients from the forward pass, and the per-row loss that recomputes."""
    loop = ChunkLoop(passes)
    total = differentiable(
        kernel(
            f"linear_cross_entropy({INPUTS}, Tensor? token_weight, Tensor? divide, Tensor? main_grad, {SCALARS}, {CHUNKS}, bool metrics, "
            f"bool[3] needs) -> ({RESULTS}, Tensor? scale, Tensor? sum_hidden, Tensor? sum_weight, Tensor? sum_bias)",
            loop.allocate_total,
            loop.total,
        ),
        kernel(
            "linear_cross_entropy_backward(Tensor grad_loss, Tensor weight, Tensor? scale, Tensor? sum_hidden, Tensor? sum_weight, "
            f"Tensor? sum_bias, Tensor? main_grad, bool[3] needs) -> {GRADIENTS}",
            loop.allocate_total_backward,
            loop.total_backward,
            loop.recycle_total_backward,
        ),
        public=4,
    )
    rows = differentiable(
        kernel(
            f"linear_cross_entropy_rows({INPUTS}, Tensor? main_grad, {SCALARS}, {CHUNKS}, bool metrics) -> ({RESULTS})",
            loop.allocate_rows,
            loop.rows,
        ),
        kernel(
            f"linear_cross_entropy_rows_backward(Tensor grad_loss, {INPUTS}, Tensor statistics, {SCALARS}, {CHUNKS}, Tensor? main_grad, "
            f"bool[3] needs) -> {GRADIENTS}",
            loop.allocate_rows_backward,
            loop.rows_backward,
        ),
        public=4,
    )
    return total, rows


class ChunkLoop:
    """Allocators and launchers of the four kernels."""

    def __init__(self, passes: RowPasses) -> None:
        self.passes = passes

    # -- the summed loss: gradients are computed chunk by chunk in the forward pass, without the upstream gradient

    def allocate_total(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, token_weight: Tensor | None,
        divide: Tensor | None, main_grad: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None,
        logit_scale: float, accumulate_dtype: torch.dtype | None, chunk: int, budget: int, pack: bool, metrics: bool, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        wide = accumulator(hidden.dtype)
        dtype = _plan(hidden, weight, accumulate_dtype, chunk, budget, needs[1]).dtype
        return (
            torch.empty((), dtype=wide, device=hidden.device),
            *row_results(hidden, metrics)[1:],
            torch.empty((), dtype=wide, device=hidden.device) if _divides_late(hidden, divide) else None,
            torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None,
            torch.empty(weight.shape, dtype=dtype, device=weight.device) if needs[1] else None,
            torch.empty(weight.shape[0], dtype=wide, device=weight.device) if needs[2] else None,
        )

    def total(
        self, loss: Tensor, statistics: Tensor, prediction: Tensor | None, entropy: Tensor | None, scale: Tensor | None, sum_hidden: Tensor | None,
        sum_weight: Tensor | None, sum_bias: Tensor | None, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        class_weight: Tensor | None, token_weight: Tensor | None, divide: Tensor | None, main_grad: Tensor | None, ignore_index: int,
        label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, accumulate_dtype: torch.dtype | None, chunk: int,
        budget: int, pack: bool, metrics: bool, needs: list[bool],
    ) -> None:  # fmt: skip
        counted = _Counted(hidden, weight, target, ignore_index, pack)
        options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight)
        rows = _plan(hidden, weight, accumulate_dtype, chunk, budget, needs[1]).rows
        gradient = any(needs)
        inverse = None if divide is None else divide.reciprocal()
        factors = token_weight
        if inverse is not None and scale is None and gradient:
            factors = inverse.expand(hidden.shape[0]) if token_weight is None else token_weight * inverse
        results = RowResults(statistics.new_empty(statistics.shape[0]), statistics, prediction, entropy)
        packed = _Packed(hidden, target, factors, None, counted.index())
        inner = packed.results(results)
        sums = _Sums(packed.like(sum_hidden), sum_weight, sum_bias)
        for part, logits in _products(packed.hidden, weight, bias, rows):
            factor = None if packed.factor is None else packed.factor[part]
            self.passes.losses(logits, packed.target[part], _rows_of(inner, part), options, factor, gradient)
            sums.add(part, logits, packed.hidden, weight)
        sums.finish()
        packed.scatter(inner, results)
        packed.scatter_rows(sums.hidden, sum_hidden)
        torch.sum(results.loss if token_weight is None else results.loss * token_weight, dim=0, out=loss)
        if inverse is not None:
            loss.mul_(inverse)
            if scale is not None:
                scale.copy_(inverse)

    def allocate_total_backward(
        self, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sum_hidden: Tensor | None, sum_weight: Tensor | None,
        sum_bias: Tensor | None, main_grad: Tensor | None, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        sums = (sum_hidden, sum_weight if main_grad is None else None, sum_bias)
        return tuple(
            torch.empty(total.shape, dtype=weight.dtype, device=weight.device) if need and total is not None else None
            for need, total in zip(needs, sums, strict=True)
        )

    def recycle_total_backward(
        self, grad_loss: Tensor, weight: Tensor, scale: Tensor | None, sum_hidden: Tensor | None, sum_weight: Tensor | None,
        sum_bias: Tensor | None, main_grad: Tensor | None, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        """The sums themselves, where they have the dtype of the gradient: scaling them in place saves their size once more."""
        sums = (sum_hidden, sum_weight if main_grad is None else None, sum_bias)
        return tuple(
            None if not need or total is None else total if total.dtype == weight.dtype else torch.empty_like(total, dtype=weight.dtype)
            for need, total in zip(needs, sums, strict=True)
        )

    def total_backward(
        self, grad_hidden: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, grad_loss: Tensor, weight: Tensor,
        scale: Tensor | None, sum_hidden: Tensor | None, sum_weight: Tensor | None, sum_bias: Tensor | None, main_grad: Tensor | None,
        needs: list[bool],
    ) -> None:  # fmt: skip
        factor = grad_loss if scale is None else grad_loss * scale
        for total, grad in ((sum_hidden, grad_hidden), (sum_weight, grad_weight), (sum_bias, grad_bias)):
            if grad is not None and total is not None and grad.numel():
                self.passes.scaled(total, factor, grad)
        if main_grad is not None and sum_weight is not None and needs[1]:
            # .data has a version counter of its own: a kept graph may add once more.
            self.passes.scaled(sum_weight, factor, main_grad.data, add=True)

    # -- the loss of each row: the backward pass recomputes the logits, since only then is the upstream gradient known

    def allocate_rows(self, hidden: Tensor, weight: Tensor, target: Tensor, *options: Any) -> Outputs:
        return row_results(hidden, options[-1])

    def rows(
        self, loss: Tensor, statistics: Tensor, prediction: Tensor | None, entropy: Tensor | None, hidden: Tensor, weight: Tensor, target: Tensor,
        bias: Tensor | None, class_weight: Tensor | None, main_grad: Tensor | None, ignore_index: int, label_smoothing: float,
        z_loss: float, softcap: float | None, logit_scale: float, accumulate_dtype: torch.dtype | None, chunk: int, budget: int, pack: bool,
        metrics: bool,
    ) -> None:  # fmt: skip
        counted = _Counted(hidden, weight, target, ignore_index, pack)
        options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight)
        # As long as those of the backward pass: matmuls of other sizes round otherwise, and recomputed logits must have these statistics.
        rows = _plan(hidden, weight, accumulate_dtype, chunk, budget, True).rows
        packed = _Packed(hidden, target, None, None, counted.index())
        results = RowResults(loss, statistics, prediction, entropy)
        inner = packed.results(results)
        for part, logits in _products(packed.hidden, weight, bias, rows):
            self.passes.losses(logits, packed.target[part], _rows_of(inner, part), options, None, False)
        packed.scatter(inner, results)

    def allocate_rows_backward(
        self, grad_loss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
    ) -> Outputs:
        main_grad, needs = rest[-2:]
        given = (hidden, weight if main_grad is None else None, bias)
        return tuple(
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if need and t is not None else None
            for need, t in zip(needs, given, strict=True)
        )

    def rows_backward(
        self, grad_hidden: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, grad_loss: Tensor, hidden: Tensor,
        weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, statistics: Tensor, ignore_index: int,
        label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, accumulate_dtype: torch.dtype | None,
        chunk: int, budget: int, pack: bool, main_grad: Tensor | None, needs: list[bool], term: EntropyTerm | None = None,
    ) -> None:  # fmt: skip
        counted = _Counted(hidden, weight, target, ignore_index, pack)
        options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight)
        # The largest upstream gradient is factored out and put back at the end: p · grad underflows in float16 where grad is 1/tokens.
        largest = _largest(grad_loss) if term is None else torch.maximum(_largest(grad_loss), _largest(term.factor))
        largest = torch.where(largest > 0, largest, 1.0)
        if hidden.dtype == torch.float16:
            # Where it is large, as loss scaling makes it, a part of it stays: it keeps the gradients of nearly certain rows from underflow.
            largest = largest / largest.clamp(1.0, 16384.0)
        packed = _Packed(hidden, target, grad_loss / largest, statistics, counted.index())
        if term is not None:
            term = EntropyTerm(packed.take(term.factor / largest), packed.take(term.entropy))
        rows, dtype = _plan(hidden, weight, accumulate_dtype, chunk, budget, True)
        sum_weight = grad_weight
        if needs[1] and (grad_weight is None or grad_weight.dtype != dtype):
            sum_weight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        sum_bias = None if grad_bias is None else torch.empty(grad_bias.shape, dtype=accumulator(weight.dtype), device=weight.device)
        sum_hidden = packed.like(grad_hidden)
        sums = _Sums(sum_hidden, sum_weight, sum_bias)
        assert packed.factor is not None and packed.statistics is not None
        for part, logits in _products(packed.hidden, weight, bias, rows):
            entropy = None if term is None else EntropyTerm(*(t[part] for t in term))
            self.passes.gradients(logits, packed.target[part], packed.statistics[part], packed.factor[part], options, logits, entropy)
            sums.add(part, logits, packed.hidden, weight)
        sums.finish()
        largest = largest.to(accumulator(weight.dtype))
        for total, grad in ((sum_weight, grad_weight), (sum_bias, grad_bias), (sum_hidden, sum_hidden)):
            if total is not None and grad is not None and total.numel():
                self.passes.scaled(total, largest, grad)
        if main_grad is not None and sum_weight is not None:
            self.passes.scaled(sum_weight, largest, main_grad.data, add=True)
        packed.scatter_rows(sum_hidden, grad_hidden)


def _divides_late(hidden: Tensor, divide: Tensor | None) -> bool:
    """1/normaliser waits for the backward pass in float16, where a probability divided by the number of tokens underflows."""
    return divide is not None and hidden.dtype == torch.float16


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude, 1 of nothing."""
    return tensor.abs().amax() if tensor.numel() else tensor.new_ones(())


def _plan(hidden: Tensor, weight: Tensor, accumulate_dtype: torch.dtype | None, chunk: int, budget: int, trained: bool) -> Plan:
    rows, width = hidden.shape
    return plan(
        rows,
        width,
        weight.shape[0],
        hidden.dtype,
        hidden.device.type,
        chunk=chunk,
        budget=budget,
        accumulate_dtype=accumulate_dtype,
        trained=trained,
    )


def _rows_of(results: RowResults, part: slice) -> RowResults:
    return RowResults(*(None if r is None else r[part] for r in results))  # type: ignore[arg-type]


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Any:
    """(rows, logits) chunk by chunk, in one reused buffer."""
    count, classes = hidden.shape[0], weight.shape[0]
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


# Where a product takes less than this, about 0.15 ms on an H200, waiting for the number of ignored rows costs more than they do.
PACK_FLOPS = 10**11
# Packed rows come in whole tiles of a matrix product, and copying the others' rows pays from 1/32 of ignored ones on.
PACK_TILE = 128
PACK_SHARE = 32


class _Counted:
    """Which rows have a target that counts. The number of them is asked for at once and waited for as late as can be."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, pack: bool) -> None:
        self.mask: Tensor | None = None
        if not pack:
            return
        if target.is_cuda:
            # A CUDA graph cannot wait, so it keeps all rows.
            if 2 * hidden.numel() * weight.shape[0] < PACK_FLOPS or torch.cuda.is_current_stream_capturing():
                return
            self.mask = target != ignore_index
            self.number = self.mask.sum().to("cpu", non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        elif target.device.type == "cpu":
            self.mask = target != ignore_index

    def index(self) -> Tensor | None:
        """The rows to keep, or None for all of them."""
        if self.mask is None:
            return None
        rows = self.mask.shape[0]
        if not self.mask.is_cuda:
            index = self.mask.nonzero()[:, 0]
            return index if index.shape[0] < rows else None
        self.arrived.synchronize()
        kept = -(-int(self.number) // PACK_TILE) * PACK_TILE
        if kept > rows - rows // PACK_SHARE:
            return None
        # Ignored rows fill the last tile; they have neither loss nor gradient.
        return self.mask.to(torch.uint8).argsort(descending=True, stable=True)[:kept]


class _Packed:
    """The rows that count: those of ignored targets are left out of every product."""

    def __init__(self, hidden: Tensor, target: Tensor, factor: Tensor | None, statistics: Tensor | None, index: Tensor | None) -> None:
        self.hidden, self.target, self.factor, self.statistics, self.index = hidden, target, factor, statistics, index
        if index is not None:
            self.hidden, self.target = hidden[index], target[index]
            self.factor = None if factor is None else factor[index]
            self.statistics = None if statistics is None else statistics[index]

    def take(self, full: Tensor) -> Tensor:
        """The packed rows of a tensor that has all."""
        return full if self.index is None else full[self.index]

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
        if inner is not None and full is not None and self.index is not None:
            full.zero_().index_copy_(0, self.index, inner)
