# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: LM head and loss in one, without ever holding all the logits."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.autograd import differentiable
from liger_core.errors import OptionError, ShapeError
from liger_core.kernels import Kernel, Outputs
from liger_core.op import Misuse, Sample, Workload, accumulator
from liger_core.ops._composed import Supported, composed_op
from liger_core.ops._inputs import integers, misuse_table, normal, sample_table
from liger_core.ops._softmax_loss import (
    TORCH_PASSES,
    Reduction,
    RowPasses,
    RowResults,
    check_row_options,
    denominator,
    loss_option_samples,
    metrics_of,
    targets_with_ignored,
)
from liger_core.ops._token_passes import ResultOptions, RowOptions
from liger_core.ops.head.gradients import HeadGradients, Sums, new_sums, sums_backward
from liger_core.ops.head.head import (
    Chunk,
    CountedRows,
    Head,
    autocast_inputs,
    check_head,
    check_rows,
    head_calls,
    head_misuses,
    head_series,
    head_workload,
    takes_dtensors,
    work,
)
from liger_core.ops.head.loop import ChunkOptions, Tiles
from liger_core.ops.head.shards import ALONE, VocabShard, vocabulary
from liger_core.ops.head.tokens import TokenLoop, TokenResults, token_loop

# What the benchmark's workloads of these names may hold.
BUDGETS = {"lean": 256 << 20, "4GiB": 4 << 30}


def check(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, token_weight: Tensor | None = None,
    vocab: VocabShard | None = None, **options: Any,
) -> None:  # fmt: skip
    name = "linear_cross_entropy"
    classes = check_head(name, Head(hidden, weight, target, bias), vocab, **options)
    if token_weight is not None:
        checks.floating(name, token_weight=token_weight)
        check_rows(name, "token_weight", token_weight, hidden)
        checks.constant(name, token_weight=token_weight)
    weights = {"class_weight": options.get("class_weight"), "token_weight": token_weight}
    checks.same_device(name, "hidden", hidden, **weights)
    check_row_options(name, target, classes, **options)


CONSTANTS = ("class_weight", "normalizer", "token_weight")
table = functools.partial(sample_table, constants=CONSTANTS)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    call, row = head_calls(device, dtype), 70 * dtype.itemsize
    usual, longer = functools.partial(call, (7,), 24, 50), functools.partial(call, (9,), 20, 70)
    summed = {"chunk": 4, "accumulate_dtype": accumulator(dtype)}
    yield from table(
        ("one_chunk", call((6,), 32, 64, integers), {}, "one chunk: dW is written directly"),
        ("odd_sizes", call((7,), 33, 101, integers), {}, "nothing is a power of two"),
        ("leading_shape", call((2, 3), 16, 40), {}, "any leading shape"),
        ("several_chunks", call((11,), 24, 50), {"chunk": 4}, "dW is summed over chunks, the last one is short"),
        ("accumulate_float32", call((11,), 24, 50), summed, "the accumulator's dtype is named"),
        ("report_chunk", call((40,), 16, 128), {"chunk": "report"}, "the chunk formula of the report"),
        ("several_blocks", call((3,), 16, 9000, integers), {}, "a row of logits is longer than one block"),
    )
    # As many classes as no block has: masked lanes must not count.
    bias, why = {"bias": normal(device, dtype, 50), "chunk": 3}, "the lowest logits become the highest"
    yield from table(
        ("bias", usual(), bias, "the head has a bias, with a gradient"),
        ("logit_scale", usual(), {"logit_scale": 0.25}, "scaled logits (Granite, Cohere)"),
        ("negative_scale", usual(), {"logit_scale": -0.5}, why),
        ("zero_scale", usual(), {"logit_scale": 0.0}, why),
        ("scale_softcap", usual(), {"logit_scale": 2.0, "softcap": 5.0}, "the scale comes before the cap"),
    )
    yield from _samples_of_tokens(device, usual)
    for name, options, why in loss_option_samples(device, 70):
        yield from table((name, longer(), options, why))
    none, two_rows = {"reduction": "none", "chunk": 4}, {"budget": 2 * row + 20 * 70 * 4}
    frozen, ignored = "no work and no memory for the gradient of", torch.full((5,), -100, device=device)
    nothing, peaked = functools.partial(call, (5,), 16, 30, lambda *sizes: ignored), ((6,), 32, 60, integers, 3.0)
    yield from table(
        ("none_chunks", longer(), none, "logits are recomputed by chunks in the backward"),
        ("budget", longer(), two_rows, "chunks of 2 rows"),
        ("no_packing", longer(), {"pack": False, "chunk": 4}, "ignored rows stay in the products"),
        ("frozen_hidden", longer(), {"chunk": 4}, f"{frozen} hidden", "hidden"),
        ("frozen_weight", longer(), {"chunk": 4}, f"{frozen} weight", "weight"),
        ("all_ignored", nothing(), {}, "the mean of nothing is 0, its gradients zero"),
        ("empty", call((0,), 16, 30, integers), {}, "no rows: the loss is 0"),
        ("one_row", call((1,), 16, 30, integers), {}, "a single row"),
        ("peaked", call(*peaked), {}, "softmax close to one class"),
    )
    turned = normal(device, dtype, 16, 6).t(), normal(device, dtype, 30, 16), integers(device, 30, 6)
    yield from table(("transposed", turned, {}, "hidden is a transposed view"))
    weight, nearest = torch.eye(20, 24, device=device).to(dtype) * 6, torch.arange(48, device=device) % 20
    hidden, target = weight[nearest] / 6 + normal(device, dtype, 48, 24, scale=0.05), nearest.clone()
    target[1::5], target[2::7] = (nearest[1::5] + 1) % 20, -100
    sure, metrics = (hidden, weight, target), {"return_metrics": True, "z_loss": 1e-3, "chunk": 4}
    yield from table(
        ("metrics", sure, metrics, "z-loss, accuracy, arg-max and entropy of the tokens"),
        ("metrics_none", sure, {**metrics, "reduction": "none"}, "the metrics of each token"),
    )


def _samples_of_tokens(device: torch.device, call: Callable[..., tuple[Tensor, ...]]) -> Iterator[Sample]:
    """Yield samples of weights of tokens, and of a class that is the ignored one."""
    token_weight = {"token_weight": torch.rand(7, device=device)}
    yield Sample("token_weight", call(), {**token_weight, "chunk": 3}, "each token has its weight", CONSTANTS)
    for low in (torch.float16, torch.bfloat16):
        options = {"token_weight": torch.rand(7, device=device).to(low), "normalizer": 1e8}
        name, why = str(low).removeprefix("torch."), "token weights are divided by the normalizer in float32"
        yield Sample(f"token_weight_{name}", call(), options, why, CONSTANTS)
    none, ignored = {**token_weight, "reduction": "none"}, {"ignore_index": 3, "chunk": 4}
    yield Sample("token_weight_none", call(), none, "token weights without reduction", CONSTANTS)
    target = targets_with_ignored(device, 50, 7, ignore_index=3)
    args = call(draw=lambda *sizes: target)
    yield Sample("ignore_index", args, ignored, "a class can be the ignored one", CONSTANTS)


def misuses(device: torch.device) -> Iterator[Misuse]:
    name, ones, constant = "linear_cross_entropy", torch.ones(3, 8, device=device), "must not require a gradient, since"
    yield from head_misuses(name, device)
    yield from misuse_table(
        name, (ones, torch.ones(10, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)),
        ("token_weight_shape", ShapeError, "token_weight must have shape (3,) to match hidden (3, 8), got (2,)",
         {"token_weight": ones[:2, 0]}),
        ("trainable_token_weight", OptionError,
         f"token_weight {constant} the op does not define one; pass token_weight.detach()",
         {"token_weight": ones[:, 0].clone().requires_grad_()}),
        ("normalizer", OptionError, "normalizer must be a finite number > 0, got 0.0", {"normalizer": 0.0}),
        ("z_loss", OptionError, "z_loss must be a finite number ≥ 0, got -1.0", {"z_loss": -1.0}),
    )  # fmt: skip


def workloads() -> Iterator[Workload]:
    yield head_workload(512, 128, 8192, quick=True)
    for rows, width in ((8192, 2048), (8192, 4096), (32768, 4096)):
        sizes = (rows, width, 128256)
        yield head_workload(*sizes)
        for mode, budget in BUDGETS.items():
            yield head_workload(*sizes, mode=mode, budget=budget)
        yield head_workload(*sizes, mode="half_ignored")
        yield replace(head_workload(*sizes, mode="frozen_weight"), frozen=("weight",))
    yield from head_series()


def _reduced(passes: RowPasses, make_kernel: Callable[..., Kernel]) -> Callable[..., Any]:
    """Return the differentiable function (head, token_weight, divide, options, chunk options, what is asked for) →
    summed loss, and the results of rows. The gradients are computed in the forward pass, without the upstream gradient.
    """

    def allocate(
        head: Head, token_weight: Tensor | None, divide: Tensor | None, options: RowOptions, chunks: ChunkOptions,
        extras: ResultOptions, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        results, cut = RowResults.empty(head.hidden, extras), chunks.chunks(head.hidden, head.weight.shape[0])
        return (results.loss.new_empty(()), *results[1:], *new_sums(head, divide, cut.dtype, needs))

    def scratch(head: Head, *rest: Any) -> int:
        *_, chunks, _, needs = rest
        (rows, classes), dtype = (head.hidden.shape[0], head.weight.shape[0]), head.hidden.dtype
        # The passes of the reference copy logits in a dtype other than float32.
        blocks = 2 if dtype == torch.float32 else 3
        # Two numbers of each row.
        return 8 * rows + int(chunks.chunks(head.hidden, classes).scratch(head, needs, blocks, slopes=True))

    def launch(
        results: RowResults, sums: Sums, /, head: Head, token_weight: Tensor | None, divide: Tensor | None,
        options: RowOptions, chunks: ChunkOptions, extras: ResultOptions, needs: list[bool],
    ) -> None:  # fmt: skip
        rows = CountedRows(head.hidden, head.target, options.ignore_index, head.weight.shape[0], chunks.pack)
        cut, factors = chunks.chunks(head.hidden, head.weight.shape[0]), token_weight
        inverse = None if divide is None else torch.reciprocal(divide, out=sums.scale)
        if inverse is not None and sums.scale is None and any(needs):
            factors = inverse.expand(head.hidden.shape[0]) if token_weight is None else token_weight * inverse
        loss, results = results.loss, results._replace(loss=results.moments.new_empty(head.hidden.shape[0]))
        head, factors, inner = head.taken(rows), rows.take(factors), rows.like(results)
        gradients = HeadGradients(rows, head, sums, ALONE, cut)
        for tile in Tiles(head, cut):
            of_tile = RowResults._make(None if r is None else r[tile.rows] for r in inner)
            factor = None if factors is None else factors[tile.rows]
            passes.losses(tile.logits, head.target[tile.rows], of_tile, options, factor, any(needs))
            gradients.add(tile)
        gradients.finish()
        rows.scatter(inner, results)
        torch.sum(results.loss if token_weight is None else results.loss * token_weight, dim=0, out=loss)
        if inverse is not None:
            loss.mul_(inverse)

    return differentiable(
        make_kernel("linear_cross_entropy", allocate, launch, scratch=scratch),
        sums_backward(passes, "linear_cross_entropy_backward", make_kernel),
        # The weight for its dtype alone; the sums are complete without hidden.
        saves=("weight", *Sums._fields, "main_grad"),
        public=4,
    )


def _kernels(passes: RowPasses, make_kernel: Callable[..., Kernel]) -> tuple[Callable[..., Any], TokenLoop]:
    """Return the functions of a summed loss and of results of tokens."""
    return _reduced(passes, make_kernel), token_loop(passes, make_kernel)


def _loss_of_rows(results: TokenResults, target: Tensor, options: RowOptions) -> Tensor:
    """Return the loss of each row, from its log-probabilities."""
    # Not -log_prob, which is -0.0 where a target is ignored.
    loss, weight, smoothing = 0.0 - results.log_prob[:, 0], options.class_weight, options.label_smoothing
    if weight is not None:
        loss = loss * weight.to(loss.dtype)[target.clamp(0, weight.shape[0] - 1)]
    if results.mean_log_prob is not None:
        loss = (1.0 - smoothing) * loss - smoothing * results.mean_log_prob
    if results.log_normalizer is not None:
        loss = loss + options.z_loss * results.log_normalizer * results.log_normalizer
    return loss


@composed_op(
    TORCH_PASSES, _kernels, takes_dtensors,
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
)  # fmt: skip
def linear_cross_entropy(
    kernels: tuple[Callable[..., Any], TokenLoop], supported: Supported, hidden: Tensor, weight: Tensor, target: Tensor,
    *, bias: Tensor | None = None, class_weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    reduction: Reduction = "mean", normalizer: Tensor | float | None = None, token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None, chunk: Chunk = None, budget: int | None = None, pack: bool = True,
    main_grad: Tensor | None = None, return_metrics: bool = False, vocab: VocabShard | None = None,
) -> Any:  # fmt: skip
    """Cross entropy of `logit_scale · (hidden @ weightᵀ + bias)` and target, a chunk of rows at a time.

        x    = logit_scale · (hidden @ weightᵀ + bias), then softcap · tanh(x / softcap)
        lse  = log Σ exp(x)
        loss = token_weight · [(1 - label_smoothing) · w_t · (lse - x_t)
               + label_smoothing/V · Σ_c w_c (lse - x_c) + z_loss · lse²]

    hidden            (..., H)   any floating dtype
    weight            (V, H)     dtype of hidden (under autocast both are cast to its dtype)
    target            (...)      int64 class indices, or ignore_index: no loss, no gradient
    bias              (V,)       dtype of hidden
    class_weight      (V,)       class weights w; 1 by default
    logit_scale       factor of the logits, before the softcap
    token_weight      (...)      a constant factor for each token's loss
    reduction         "mean" divides the sum by the summed class weights of the counted targets (0 if none is
                      counted), or by normalizer
    normalizer        number or scalar tensor on the device, for instance the tokens of all accumulation steps
    accumulate_dtype  of the gradient of weight while chunks are summed; float32 by default (float64 for float64). A
                      single chunk writes it directly, rounded once
    chunk             rows of logits held at a time; None fits the budget, "report" is the formula of the
                      Liger Kernel report, 2^⌈log2⌈N/⌈V/H⌉⌉⌉
    budget            bytes that may be held beyond inputs and gradients. By default 2150 MiB of logits (64 MiB on the
                      CPU), and the sum of the weight's gradient in float32 if there are several chunks. A small
                      budget sums that gradient in its own dtype, with one more rounding a chunk
    pack              leave rows of ignored targets out of the matmuls. On a GPU this waits once for their number
                      where the matmuls are large enough to pay for it, never while a CUDA graph is captured
    main_grad         (V, H) float32: the gradient of weight is added to it in the backward pass, and weight.grad
                      stays as it is
    return_metrics    also return `LossMetrics`
    vocab             `VocabShard(group, start, classes)`: weight and bias have only these classes of a vocabulary
                      that the ranks of group share. Every rank gives the same rows and targets and gets the same
                      results; gradients of weight and bias are of its classes, that of hidden is whole
    returns           float32 (float64 for float64): a scalar, or (...) for "none"

    With "mean" and "sum" on a whole vocabulary, the forward pass computes the gradients that are required. With
    "none" or `vocab`, the backward pass does: logits that fit the budget are kept until then, others are recomputed
    (`chunk` recomputes all). With a frozen weight and logits beyond the budget, the forward pass may sum the gradient
    of hidden instead. Without gradients only the matmul with weight is computed.

    In float16, gradients are summed before the upstream gradient and the normalizer scale them, so that small
    probabilities do not underflow. These sums must be in the range of float16 themselves (weights up to 3e4). A
    target outside [0, V) raises TargetError on the CPU; on other devices, where looking would stall the queue, its
    loss is NaN. Raises ShapeError, DtypeError, OptionError for arguments that do not fit. Hsu et al. 2024,
    arXiv:2410.10989, with float32 accumulation and chunks by memory budget.
    """
    supported(hidden, weight)
    reduced, loop = kernels
    hidden, weight, bias = autocast_inputs(hidden, weight, bias)
    head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), bias)
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight)
    chunks = ChunkOptions.from_arguments(accumulate_dtype, chunk, budget, pack, main_grad)
    # A scalar does not widen what it multiplies: token_weight / normalizer in float16 would be 0 for long batches.
    wide = accumulator(hidden.dtype)
    factor = None if token_weight is None else token_weight.reshape(-1).to(wide)
    divide: Tensor | None = None
    if reduction == "mean":
        divide = denominator(head.target, class_weight, ignore_index, normalizer, wide)
    # A shard has no gradients before the softmax statistics of all shards are merged: for every reduction, the backward
    # pass computes them.
    if reduction == "none" or vocab is not None:
        of_logits = options if label_smoothing else options._replace(class_weight=None)
        extras = ResultOptions(return_metrics, z_loss > 0, label_smoothing > 0, with_prediction=return_metrics)
        each = head._replace(target=head.target[:, None])
        results = loop.tokens(each, of_logits, chunks, vocabulary(weight, vocab), extras)
        rows = [results.moments, results.prediction, results.entropy]
        loss = _loss_of_rows(results, head.target, options)
        loss = loss if factor is None else loss * factor
        if reduction == "none":
            loss = loss.reshape(target.shape)
        else:
            loss = loss.sum() if divide is None else loss.sum() / divide
    else:
        extras = ResultOptions(with_entropy=return_metrics, with_prediction=return_metrics)
        loss, *rows = reduced(head, factor, divide, options, chunks, extras)
    if not return_metrics:
        return loss
    inverse = None if divide is None else divide.reciprocal()
    return loss, metrics_of(target, options, rows, reduction, inverse, factor)
