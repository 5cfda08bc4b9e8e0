# SPDX-License-Identifier: Apache-2.0
"""linear_log_prob: what a language model's head gives each target token, without ever holding all the logits."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import Misuse, Sample, Workload, accumulator
from liger_core.ops._composed import Supported, composed_op
from liger_core.ops._inputs import integers, misuse_table, normal, sample_table
from liger_core.ops._softmax_loss import TORCH_PASSES, check_row_options, targets_with_ignored
from liger_core.ops._token_passes import ResultOptions, RowOptions
from liger_core.ops.head.head import (
    Chunk,
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
from liger_core.ops.head.loop import ChunkOptions, MiB
from liger_core.ops.head.shards import VocabShard, vocabulary
from liger_core.ops.head.tokens import TokenLoop, token_loop

# One H200, 8192 × 4096: all logits of 152,064 classes are kept, which takes 1.05 × three matmuls; within 2150 MiB, a
# tenth of them is recomputed, which takes 1.16 ×.
GPU_BYTES = 2400 * MiB


class TokenStatistics(NamedTuple):
    """Statistics of the softmax of a token's logits x; all but prediction have a gradient.

    entropy         -Σ p log p, in nats
    log_normalizer  log Σ exp(x)
    mean_logit      mean of x over the classes
    collision       Σ p², the probability that two samples are equal
    prediction      arg-max class; -1 where the target is ignored
    """

    entropy: Tensor
    log_normalizer: Tensor
    mean_logit: Tensor
    collision: Tensor
    prediction: Tensor


def check(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, temperature: Tensor | float = 1.0,
    allowed: Tensor | None = None, logits_dtype: torch.dtype | None = None, return_entropy: bool = False,
    return_statistics: bool = False, vocab: VocabShard | None = None, batch_invariant: bool = False, **options: Any,
) -> None:  # fmt: skip
    name = "linear_log_prob"
    classes = check_head(name, Head(hidden, weight, target, bias), vocab, several=True, **options)
    _check_temperature(name, temperature, hidden)
    check_row_options(name, target, classes, **options)
    if return_entropy and return_statistics:
        sentence = "return_statistics includes the entropy; give one of return_entropy and return_statistics, got both"
        checks.fail(OptionError, name, sentence)
    wide = accumulator(hidden.dtype)
    if logits_dtype not in (None, hidden.dtype, wide):
        checks.fail(DtypeError, name, f"logits_dtype must be {wide} or None, got {logits_dtype}")
    if batch_invariant and (vocab is not None or any(p.is_shard() for p in getattr(weight, "placements", ()))):
        wanted = "batch_invariant needs all classes on one rank"
        checks.fail(OptionError, name, f"{wanted}, got a shard; gather weight or leave batch_invariant out")
    if allowed is not None:
        _check_allowed(name, allowed, hidden, target, return_statistics)


def _check_temperature(name: str, temperature: Tensor | float, hidden: Tensor) -> None:
    because = ", since the logits are divided by it"
    if not isinstance(temperature, Tensor):
        checks.positive(name, "temperature", temperature, because)
        return
    checks.floating(name, temperature=temperature)
    check_rows(name, "temperature", temperature, hidden)
    checks.same_device(name, "hidden", hidden, temperature=temperature)
    checks.constant(name, temperature=temperature)
    if checks.readable(temperature) and not bool(((temperature > 0) & temperature.isfinite()).all()):
        checks.fail(OptionError, name, f"every temperature must be a finite number > 0{because}")


def _check_allowed(name: str, allowed: Tensor, hidden: Tensor, target: Tensor, return_statistics: bool) -> None:
    if return_statistics:
        sentence = "return_statistics is about all classes, got it with allowed; take return_entropy"
        checks.fail(OptionError, name, sentence)
    if target.dim() == hidden.dim():
        checks.misshapen(name, "allowed needs one target a row", target)
    checks.tensor(name, "allowed", allowed)
    checks.same_device(name, "hidden", hidden, allowed=allowed)
    if allowed.dtype != torch.int64:
        checks.fail(DtypeError, name, f"allowed must have dtype torch.int64, got {allowed.dtype}")
    if allowed.dim() != hidden.dim() or allowed.shape[:-1] != target.shape:
        wanted = f"({', '.join(map(str, (*target.shape, 'M')))})"
        checks.misshapen(name, f"allowed must have shape {wanted} to match target", allowed)


# Options in the order in which they apply to a logit.
ORDER = {"logit_scale": 2.0, "softcap": 5.0, "temperature": 0.7}
ENTROPY, STATISTICS = {"return_entropy": True}, {"return_statistics": True}
table = functools.partial(sample_table, constants=("temperature",))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    call, wide, size = head_calls(device, dtype), accumulator(dtype), dtype.itemsize
    usual = functools.partial(call, (7,), 24, 50)
    summed = {"chunk": 4, "accumulate_dtype": wide}
    temperatures = {"temperature": torch.linspace(0.4, 2.0, 9, device=device), "softcap": 5.0, **ENTROPY, "chunk": 4}

    yield from table(
        ("one_chunk", call((6,), 32, 64), {}, "one chunk: dW is written directly"),
        ("odd_sizes", call((7,), 33, 101), {}, "nothing is a power of two"),
        ("leading_shape", call((2, 3), 16, 40), {}, "any leading shape"),
        ("one_token", (*call((), 16, 40)[:2], integers(device, 40)), ENTROPY, "no leading shape"),
        ("several_chunks", call((11,), 24, 50), {"chunk": 4}, "dW is summed over chunks, the last one is short"),
        ("accumulate_float32", call((11,), 24, 50), summed, "the accumulator's dtype is named"),
        ("report_chunk", call((40,), 16, 128), {"chunk": "report"}, "the chunk formula of the report"),
        ("several_blocks", call((3,), 16, 9000), ENTROPY, "a row of logits is longer than one block"),
        ("bias", usual(), {"bias": normal(device, dtype, 50), "chunk": 3}, "the head has a bias, with a gradient"),
        ("logit_scale", usual(), {"logit_scale": 0.25}, "scaled logits (Granite, Cohere)"),
        ("negative_scale", usual(), {"logit_scale": -0.5}, "the lowest logits become the highest"),
        ("temperature", usual(), {"temperature": 0.7}, "logits divided by a temperature, as they were sampled"),
        ("scale_softcap_temperature", usual(), ORDER, "first the scale, then the cap, last the temperature"),
        ("temperatures", call((9,), 24, 50), temperatures, "each token has a temperature of its own"),
    )
    yield from _samples_of_classes(device, dtype, call)
    target = targets_with_ignored(device, 50, 7, ignore_index=3)
    one_ignored, entropy = (*usual()[:2], target), usual()
    everything, longer = {"bias": normal(device, dtype, 50), "chunk": 3, **ENTROPY, **ORDER}, call((9,), 24, 50)
    # Two classes more than the tokeniser knows, switched off in the bias.
    padding, (hidden, weight, target) = torch.zeros(50, device=device, dtype=dtype), usual()
    padding[48:] = -torch.inf
    known, none = (hidden, weight, target.clamp(max=47)), torch.full((5,), -100, device=device)
    impossible, zeros = {"bias": padding, **ENTROPY}, "classes of probability 0 add no entropy and get no gradient"
    two_rows, unpacked = {"budget": 2 * 70 * size + 20 * 70 * 4, **ENTROPY}, {"pack": False, "chunk": 4, **ENTROPY}
    frozen, why = {"chunk": 4, **ENTROPY}, "no work and no memory for the gradient of"
    yield from table(
        ("ignore_index", one_ignored, {"ignore_index": 3}, "a class can be the ignored one"),
        ("entropy", entropy, ENTROPY, "entropy and log-probability have a gradient each"),
        ("entropy_everything", longer, everything, "all options together, with entropy"),
        ("impossible_classes", known, impossible, zeros, "bias"),
        ("budget", call((9,), 20, 70), two_rows, "chunks of 2 rows"),
        ("no_packing", call((9,), 20, 70), unpacked, "ignored rows stay in the products"),
        ("frozen_hidden", call((9,), 20, 70), frozen, f"{why} hidden", "hidden"),
        ("frozen_weight", call((9,), 20, 70), frozen, f"{why} weight", "weight"),
        ("all_ignored", (*call((5,), 16, 30)[:2], none), ENTROPY, "zeros, with zero gradients"),
        ("empty", call((0,), 16, 30), ENTROPY, "no rows: nothing is launched"),
        ("one_row", (*call((1,), 16, 30)[:2], integers(device, 30, 1)), {}, "a single row"),
        ("one_class", call((4,), 16, 1), ENTROPY, "a single class: probability 1, entropy 0"),
    )
    yield from _samples_of_values(device, dtype, call)


def _samples_of_values(
    device: torch.device, dtype: torch.dtype, call: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> Iterator[Sample]:
    """Yield samples of certain and of far logits, and of a head whose derivative the forward pass sums."""
    # Eighths, whose products are exact in any order of summation: the softmax is compared, not the luck of a matmul.
    hidden, weight, target = call((6,), 32, 60, scale=2.0)
    coarse, (far, heads, index) = ((hidden * 8).round() / 8, (weight * 8).round() / 8, target), call((3,), 4, 700)
    first_far, turned = (far, torch.cat((heads[:1] * 4096, heads[1:])), index), normal(device, dtype, 16, 6).t()
    transposed, size = (turned, *call((6,), 16, 30)[1:]), dtype.itemsize
    tiled: dict[str, Any] = {"bias": normal(device, dtype, 300), "budget": 9 * (20 * 4 + 60 * size)}
    tiled["temperature"] = torch.linspace(0.4, 2.0, 9, device=device)
    alone, (hidden, weight, target) = call((9,), 20, 300), call((9,), 20, 70)
    several = torch.stack((target, integers(device, 70, 9), integers(device, 70, 9)), -1)
    tiles, why = {"budget": 9 * (20 * 2 * accumulator(dtype).itemsize + 23 * size), **ORDER}, "the derivative is"
    yield from table(
        ("peaked", coarse, ENTROPY, "softmax close to one class"),
        ("first_far", first_far, STATISTICS, "the first logit is far from all others"),
        ("transposed", transposed, {}, "hidden is a transposed view"),
        ("frozen_head", alone, tiled, f"{why} summed in the forward pass", "weight", "bias"),
        ("frozen_head_several", (hidden, weight, several), tiles, f"{why} shared by several targets", "weight"),
    )
    statistics = {"batch_invariant": True, "bias": normal(device, dtype, 70), **STATISTICS}
    cut, why = {"batch_invariant": True, "budget": 300 * size}, "matmuls of the same size for any number of rows"
    yield from table(
        ("batch_invariant", (hidden, weight, several), statistics, f"{why}; logits are kept"),
        ("batch_invariant_cut", (hidden, weight, target), cut, f"{why}; rows are cut"),
    )


def _samples_of_classes(
    device: torch.device, dtype: torch.dtype, call: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> Iterator[Sample]:
    """Yield samples of several targets, of statistics and of allowed classes."""
    (hidden, weight, target), size, wide = call((7,), 24, 50), dtype.itemsize, accumulator(dtype)
    several = torch.stack((target, integers(device, 50, 7), integers(device, 50, 7)), -1)
    several[2, 1:] = several[2, :1]
    several[0, 2] = -100
    capped = {"softcap": 5.0, "budget": 7 * 13 * size}
    first_kept = {**STATISTICS, "budget": 9 * (20 * 4 + 23 * size)}
    float32 = {"logits_dtype": wide, **ENTROPY}
    recomputed = {**float32, "budget": 9 * (20 * 4 + 23 * 6)}
    why = "blocks of classes, of which the first is kept and the last one is short"
    yield from table(
        ("several_targets", (hidden, weight, several), ENTROPY, "three classes a row, some twice, some ignored"),
        ("several_targets_softcap", (hidden, weight, several), capped, "what is scattered passes through the cap"),
        ("statistics", (hidden, weight, several), {**STATISTICS, **ORDER}, "every statistic has a gradient"),
        ("statistics_blocks", call((9,), 20, 70), first_kept, why),
        ("wide_logits_kept", call((9,), 20, 70), float32, "the matmul writes float32"),
        ("wide_logits_recomputed", call((9,), 20, 70), recomputed, "the matmul writes float32"),
    )
    allowed = torch.stack([torch.randperm(50, device=device)[:6] for _ in range(7)])
    allowed[:, 4:] = -100
    allowed[3], allowed[4, 0] = -100, target[4].clamp(min=0)
    options, why = {"allowed": allowed, **ENTROPY}, "truncated sampling is replayed"
    yield Sample("allowed", (hidden, weight, target), options, why)


def misuses(device: torch.device) -> Iterator[Misuse]:
    name, x, ones = "linear_log_prob", torch.zeros(3, 8, device=device), torch.ones(3, device=device)
    weight, target = torch.zeros(10, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    positive, nan = "must be a finite number > 0, since the logits are divided by it", float("nan")
    trained = "must not require a gradient, since the op does not define one; pass temperature.detach()"
    yield from head_misuses(name, device, several=True)
    yield from misuse_table(
        name, (x, weight, target),
        ("temperature_0.0", OptionError, f"temperature {positive}, got 0.0", {"temperature": 0.0}),
        ("temperature_nan", OptionError, f"temperature {positive}, got nan", {"temperature": nan}),
        ("temperature_shape", ShapeError, "temperature must have shape (3,) to match hidden (3, 8), got (2,)",
         {"temperature": ones[:2]}),
        ("trainable_temperature", OptionError, f"temperature {trained}",
         {"temperature": ones.clone().requires_grad_()}),
        ("both_results", OptionError,
         "return_statistics includes the entropy; give one of return_entropy and return_statistics, got both",
         {"return_entropy": True, "return_statistics": True}),
        ("logits_dtype", DtypeError, "logits_dtype must be torch.float32 or None, got torch.float16",
         {"logits_dtype": torch.float16}),
        ("allowed_shape", ShapeError, "allowed must have shape (3, M) to match target, got (2, 1)",
         {"allowed": target[:2, None]}),
        ("allowed_dtype", DtypeError, "allowed must have dtype torch.int64, got torch.float32",
         {"allowed": ones[:, None]}),
        ("allowed_statistics", OptionError,
         "return_statistics is about all classes, got it with allowed; take return_entropy",
         {"allowed": target[:, None], "return_statistics": True}),
        ("allowed_targets", ShapeError, "allowed needs one target a row, got (3, 1)", {"allowed": target[:, None]},
         x, weight, target[:, None]),
        ("batch_invariant_shard", OptionError,
         "batch_invariant needs all classes on one rank, got a shard; gather weight or leave batch_invariant out",
         {"batch_invariant": True, "vocab": VocabShard("ranks", 0, 10)}),
    )  # fmt: skip
    if device.type == "cpu":
        each = ("temperature_of_a_token", OptionError, f"every temperature {positive}", {"temperature": ones * 0})
        yield from misuse_table(name, (x, weight, target), each)


def workloads() -> Iterator[Workload]:
    yield head_workload(512, 128, 8192, quick=True)
    for rows, width in ((8192, 2048), (8192, 4096), (32768, 4096)):
        yield head_workload(rows, width, 128256)
    yield head_workload(8192, 4096, 151936)
    yield head_workload(8192, 4096, 128256, mode="half_ignored")
    yield head_workload(8192, 4096, 128256, mode="return_entropy", return_entropy=True)
    yield head_workload(8192, 4096, 128256, mode="lean", budget=300 << 20)
    yield head_workload(8192, 4096, 128256, mode="64_targets", targets=64)
    yield head_workload(8192, 4096, 128256, mode="statistics", return_statistics=True)
    yield head_workload(8192, 4096, 128256, mode="batch_invariant", batch_invariant=True)
    yield from head_series()


def _among(log_prob: Tensor, entropy: Tensor | None, index: Tensor, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the first class of each row among all of them, and the entropy of their softmax; a row of one
    class has all."""
    named = index != ignore_index
    named[:, 1:] &= index[:, 1:] != index[:, :1]
    among = torch.where(named, log_prob, -torch.inf)
    # An ignored row names nothing, but its gradient must not be NaN.
    counted, truncated = named[:, 0], (index[:, 1:] != ignore_index).any(-1)
    among = torch.where(counted[:, None], among, 0.0).log_softmax(-1)
    first = torch.where(truncated & counted, among[:, 0], log_prob[:, 0])
    if entropy is None:
        return first, None
    safe = torch.where(named, among, 0.0)
    return first, torch.where(truncated & counted, -(safe.exp() * safe).sum(-1), entropy)


@composed_op(
    TORCH_PASSES, token_loop, takes_dtensors,
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
)  # fmt: skip
def linear_log_prob(
    loop: TokenLoop, supported: Supported, hidden: Tensor, weight: Tensor, target: Tensor, *,
    bias: Tensor | None = None, temperature: Tensor | float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, allowed: Tensor | None = None,
    logits_dtype: torch.dtype | None = None, return_entropy: bool = False, return_statistics: bool = False,
    accumulate_dtype: torch.dtype | None = None, chunk: Chunk = None, budget: int | None = None, pack: bool = True,
    main_grad: Tensor | None = None, vocab: VocabShard | None = None, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Log-probability of targets under the softmax of a head's logits, and statistics of that softmax, without all
    the logits.

        x        = logit_scale · (hidden @ weightᵀ + bias), then softcap · tanh(x / softcap), then x / temperature
        log_prob = x_t - log Σ exp(x)
        entropy  = -Σ p log p,   p = softmax(x)

    hidden             (..., H)   any floating dtype
    weight             (V, H)     dtype of hidden (under autocast both are cast to its dtype)
    target             (...) or (..., K)   int64 class indices, one or several a row, also equal ones; or
                       ignore_index: log_prob 0, no gradient. A row without any other target counts for nothing, and
                       its statistics are 0
    bias               (V,)       dtype of hidden
    temperature        a number, or (...) with one for each row: that of the sampling; applied after scale and
                       softcap
    allowed            (..., M) distinct class indices, filled up with ignore_index: the classes that the token was
                       sampled from (top-k, top-p). log_prob and entropy are then of the softmax over these and the
                       target; without any, a row has all
    logits_dtype       torch.float32: logits are not rounded to the dtype of hidden, though their gradient is. They
                       take three times the memory
    return_entropy     also return the entropy, in nats
    return_statistics  also return `TokenStatistics`
    accumulate_dtype, vocab   as in linear_cross_entropy
    chunk              rows of logits held at a time, with all classes; "report" is 2^⌈log2⌈N/⌈V/H⌉⌉⌉. None fits the
                       budget
    budget             bytes that may be held beyond inputs and gradients; by default 2400 MiB on a GPU
    pack               leave rows of ignored targets out of the matmuls. On a GPU this waits once a pass for their
                       number where the matmuls are large enough to pay for it, never while a CUDA graph is captured
    main_grad          (V, H)     float32, as in linear_cross_entropy
    batch_invariant    results of a row are the same bits, whatever the other rows and their number. Gradients are not.
                       Matmuls for logits take 256 rows each on a GPU, with padding, and one row on the CPU
    returns            log_prob like target, float32 (float64 for float64), or (log_prob, entropy), or (log_prob,
                       TokenStatistics)

    All results have a gradient, whatever arrives from upstream, alone or together. If the logits fit the budget they
    are kept until the backward pass, which overwrites them (three matmuls); otherwise they are recomputed in blocks of
    classes (four matmuls), with the gradient of hidden summed in float32. Only required gradients are computed; without
    any, only the matmul with weight. Where weight and bias are frozen, no statistic is asked for and the logits do not
    fit, the forward pass sums the derivative of the log-probabilities by hidden (two matmuls), and the backward pass
    scales it. A checkpoint around the op would compute it twice.

    So preference and policy losses (DPO, ORPO, SimPO, KTO, GRPO, PPO) are plain arithmetic on log_prob. DPO, chosen
    answers first:

        policy = linear_log_prob(hidden, weight, target).sum(-1)
        chosen, rejected = (policy - reference).chunk(2)
        loss = -logsigmoid(beta * (chosen - rejected)).mean()

    In float16, gradients are summed before they meet the scale of the upstream gradient, so that small probabilities do
    not underflow; these sums must be in the range of float16 themselves (weights up to 3e4). The target of a row is the
    token after it: shift first, and give prompt and padding the ignore_index. A target outside [0, V) raises
    TargetError on the CPU; on other devices, where looking would stall the queue, its log_prob is NaN. Raises
    ShapeError, DtypeError, OptionError for arguments that do not fit. Rafailov et al. 2023, arXiv:2305.18290 (DPO);
    Shao et al. 2024, arXiv:2402.03300 (GRPO).
    """
    supported(hidden, weight)
    hidden, weight, bias = autocast_inputs(hidden, weight, bias)
    rows, shape = hidden.reshape(-1, hidden.shape[-1]), hidden.shape[:-1]
    index = target.reshape(rows.shape[0], target.shape[-1] if target.dim() == hidden.dim() else 1)
    if allowed is not None:
        # The classes of an ignored row count for nothing.
        among = torch.where(index == ignore_index, ignore_index, allowed.reshape(rows.shape[0], allowed.shape[-1]))
        index = torch.cat((index, among), -1)
    inverse = None
    if isinstance(temperature, Tensor):
        inverse = temperature.reshape(-1).to(accumulator(hidden.dtype)).reciprocal()
    else:
        # softcap · tanh(s·a / softcap) / T = (softcap/T) · tanh((s/T)·a / (softcap/T)): passes need no temperature.
        logit_scale, softcap = logit_scale / temperature, None if softcap is None else softcap / temperature
    wide = logits_dtype is not None and logits_dtype != hidden.dtype
    options = RowOptions(
        ignore_index, softcap=softcap, logit_scale=logit_scale, inverse_temperature=inverse, row_by_row=batch_invariant
    )
    if budget is None and not hidden.is_cpu:
        budget = GPU_BYTES
    chunks = ChunkOptions.from_arguments(accumulate_dtype, chunk, budget, pack, main_grad, wide, batch_invariant)
    every = return_statistics
    requested = ResultOptions(every or return_entropy, every, False, every, every, every)
    head = Head(rows, weight, index, bias)
    results = loop.tokens(head, options, chunks, vocabulary(weight, vocab), requested)
    log_prob, entropy = results.log_prob, results.entropy
    if allowed is not None:
        log_prob, entropy = _among(log_prob, entropy, index, ignore_index)
    log_prob = log_prob.reshape(target.shape)
    if return_statistics:
        return log_prob, TokenStatistics(*(getattr(results, name).reshape(shape) for name in TokenStatistics._fields))
    return (log_prob, entropy.reshape(shape)) if entropy is not None else log_prob
