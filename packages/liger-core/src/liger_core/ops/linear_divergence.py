# SPDX-License-Identifier: Apache-2.0
"""linear_divergence: how far a student's head is from a teacher's, without ever holding all the logits."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError, TargetError
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, autocast_dtype
from liger_core.ops._composed import Supported, composed_op
from liger_core.ops._divergence import KINDS, MIXED, TORCH_DIVERGENCES, DivergenceOptions, Kind, check_mixture
from liger_core.ops._inputs import CLASSES, ROWS, misuse_table, normal, sample_table, workload
from liger_core.ops._softmax_loss import Reduction, check_reduction, check_target, denominator, targets_with_ignored
from liger_core.ops.head.divergences import DivergenceLoop, Teacher, divergence_loop
from liger_core.ops.head.head import Chunk, Head, autocast_inputs, check_head, takes_dtensors
from liger_core.ops.head.head import work as head_work
from liger_core.ops.head.loop import ChunkOptions
from liger_core.ops.head.shards import VocabShard, vocabulary


def check(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, kind: str = "forward_kl", beta: float = 0.5, temperature: float = 1.0,
    target: Tensor | None = None, hard_weight: float = 0.0, ignore_index: int = -100, logit_scale: float = 1.0,
    softcap: float | None = None, teacher_logit_scale: float = 1.0, teacher_softcap: float | None = None,
    reduction: Reduction = "mean", normalizer: Tensor | float | None = None, vocab: VocabShard | None = None,
    **options: Any,
) -> None:  # fmt: skip
    name = "linear_divergence"
    checks.floating(name, 2, hidden=hidden, weight=weight)
    labels = hidden.new_empty(hidden.shape[:-1], dtype=torch.int64) if target is None else target
    head = Head(hidden, weight, labels, bias)
    classes = check_head(name, head, vocab, **options)
    _check_teacher(name, head, Teacher(teacher_hidden, teacher_weight, teacher_bias))
    if (budget := options.get("budget")) is not None:
        row = vocabulary(weight, vocab).usual() * (hidden.element_size() + teacher_hidden.element_size())
        if budget < row:
            sentence = f"budget must hold one row of logits of both sides, {row} bytes, got {budget!r}"
            checks.fail(OptionError, name, sentence)
    checks.choice(name, "kind", kind, KINDS)
    if kind in MIXED:
        check_mixture(name, "beta", beta)
    checks.positive(name, "temperature", temperature, ", since the logits are divided by it")
    for label, scale, cap in (("", logit_scale, softcap), ("teacher_", teacher_logit_scale, teacher_softcap)):
        checks.finite(name, f"{label}logit_scale", scale)
        if cap is not None:
            checks.positive(name, f"{label}softcap", cap)
    checks.fraction(name, "hard_weight", hard_weight)
    if target is None and hard_weight:
        sentence = f"hard_weight needs target, whose cross entropy it weighs, got hard_weight={hard_weight!r} alone"
        checks.fail(OptionError, name, sentence)
    check_reduction(name, hidden, reduction, normalizer)
    if target is not None:
        check_target(name, target, classes, ignore_index)


def _check_teacher(name: str, head: Head, teacher: Teacher) -> None:
    """Check that the teacher has the same rows and classes, of any width, and gets no gradient."""
    hidden, weight, bias = teacher
    checks.floating(name, 2, teacher_hidden=hidden, teacher_weight=weight, teacher_bias=bias)
    checks.same_device(name, "hidden", head.hidden, teacher_hidden=hidden)
    checks.at_least_one_dimension(name, "teacher_hidden", hidden)
    if hidden.shape[:-1] != head.hidden.shape[:-1] or hidden.shape[-1] == 0:
        wanted = f"({', '.join(map(str, (*head.hidden.shape[:-1], 'width')))})"
        checks.mismatch(name, "teacher_hidden", hidden, wanted, "hidden", head.hidden)
    shape = (head.weight.shape[0], hidden.shape[-1])
    if weight.shape != shape:
        wanted = f"{shape}: the classes of weight {checks.shape(head.weight)} and the width of teacher_hidden"
        checks.misshapen(name, f"teacher_weight must have shape {wanted} {checks.shape(hidden)}", weight)
    checks.vector(name, "teacher_bias", bias, weight.shape[0], "teacher_weight", weight)
    if autocast_dtype(hidden.device.type) is None:
        checks.same_dtype(name, "teacher_hidden", hidden, teacher_weight=weight, teacher_bias=bias)
    checks.constant(name, teacher_hidden=hidden, teacher_weight=weight, teacher_bias=bias)


CONSTANTS = ("teacher_hidden", "teacher_weight", "teacher_bias", "normalizer")
table = functools.partial(sample_table, constants=CONSTANTS)
# Options that change the logits of each side.
CAPS = {"logit_scale": 0.5, "softcap": 3.0, "teacher_logit_scale": -2.0, "teacher_softcap": 2.0, "temperature": 0.7}


def _calls(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function (rows, width, classes, width of the teacher) → the tensors of a call."""

    def call(rows: tuple[int, ...], width: int, classes: int, teacher: int, scale: float = 0.3) -> tuple[Tensor, ...]:
        shapes = [shape for size in (width, teacher) for shape in (((*rows, size), 1.0), ((classes, size), scale))]
        return tuple(normal(device, dtype, *shape, scale=scale) for shape, scale in shapes)

    return call


# Schedules of each formula: the name of the sample, options, why.
MODES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("", {"chunk": 3}, "in chunks, with gradients in the forward pass"),
    ("_none", {"reduction": "none"}, "with the kept gradient"),
    ("_recomputed", {"reduction": "none", "chunk": 3, "beta": 0.2}, "with logits that are recomputed"),
)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    call, wide = _calls(device, dtype), accumulator(dtype)
    summed, row, why = {"chunk": 4, "accumulate_dtype": wide}, 50 * dtype.itemsize, "no work and no memory for the"
    yield from table(
        ("one_chunk", call((6,), 32, 64, 16), {}, "one chunk: dW is written directly"),
        ("odd_sizes", call((7,), 33, 101, 21), {}, "nothing is a power of two"),
        ("leading_shape", call((2, 3), 16, 40, 8), {"reduction": "none"}, "any leading shape"),
        ("several_chunks", call((11,), 24, 50, 16), {"chunk": 4}, "dW is summed over chunks, the last one is short"),
        ("accumulate_float32", call((11,), 24, 50, 16), summed, "the accumulator's dtype is named"),
        ("several_blocks", call((3,), 16, 9000, 8), {"kind": "jsd"}, "a row of logits is longer than one block"),
    )
    for kind, (mode, options, how) in itertools.product(KINDS, MODES):
        args = call((7,), 24, 50, 16)
        yield Sample(f"{kind}{mode}", args, {"kind": kind, **options}, f"each formula {how}", CONSTANTS)
    yield from _samples_of_options(device, dtype, lambda: call((7,), 24, 50, 16))
    short, none = {"budget": 3 * row + 20 * 50 * 4}, {"budget": 4 * row, "reduction": "none"}
    nothing = {"target": torch.full((5,), -100, device=device)}
    yield from table(
        ("budget", call((9,), 20, 50, 16), short, "chunks of a few rows"),
        ("budget_none", call((9,), 20, 50, 16), none, "too little to keep the gradient"),
        ("frozen_hidden", call((9,), 20, 70, 16), {"chunk": 4}, f"{why} gradient of hidden", "hidden"),
        ("frozen_hidden_none", call((9,), 20, 70, 16), {"reduction": "none"}, f"{why} gradient of hidden", "hidden"),
        ("frozen_weight", call((9,), 20, 70, 16), {"chunk": 4}, f"{why} gradient of weight", "weight"),
        ("frozen_weight_none", call((9,), 20, 70, 16), {"reduction": "none"}, f"{why} gradient of weight", "weight"),
        ("all_ignored", call((5,), 16, 30, 8), nothing, "the mean of nothing is 0, its gradients zero"),
        ("empty", call((0,), 16, 30, 8), {}, "no rows: the loss is 0"),
        ("one_row", call((1,), 16, 30, 8), {}, "a single row"),
        ("peaked", call((6,), 32, 60, 16, scale=2.0), {"kind": "reverse_kl"}, "softmax close to one class"),
    )
    hidden, weight, _, _ = call((6,), 32, 60, 16)
    same, heads = (hidden, weight, hidden.clone(), weight.clone()), call((6,), 16, 30, 8)[1:]
    turned = (normal(device, dtype, 16, 6).t(), *heads)
    beyond = {"reduction": "none", "chunk": 4, "target": targets_with_ignored(device, 70, 9), "hard_weight": 0.3}
    yield from table(
        ("same", same, {}, "a student that equals its teacher: 0, with zero gradients"),
        ("transposed", turned, {}, "hidden is a transposed view"),
        ("frozen_head", call((9,), 20, 70, 16), beyond, "the forward pass computes the derivative", "weight"),
    )


def _samples_of_options(
    device: torch.device, dtype: torch.dtype, call: Callable[[], tuple[Tensor, ...]]
) -> Iterator[Sample]:
    near_one, usual = {"kind": "skewed_kl", "beta": 0.9999}, call()
    biases = {"bias": normal(device, dtype, 50), "teacher_bias": normal(device, dtype, 50)}
    none, padding = {"reduction": "none"}, torch.zeros(50, device=device, dtype=dtype)
    padding[48:] = -torch.inf
    impossible, why = {"bias": padding, "teacher_bias": padding.clone()}, "classes that are impossible on both sides"
    yield from table(
        ("beta_near_one", usual, near_one, "1 - beta of a rounded beta would be far off"),
        ("bias", call(), {"chunk": 3, **biases}, "both heads have a bias"),
        ("bias_none", call(), {**none, **biases}, "the gradient of the bias is weighed by row"),
        ("impossible_classes", call(), {"chunk": 3, **impossible}, f"{why} count for nothing", "bias"),
        ("scale_softcap", call(), CAPS, "scales, then caps, then the temperature, each side its own"),
    )
    target = {"target": targets_with_ignored(device, 50, 7)}
    hard, masked = {**target, "hard_weight": 0.3, "temperature": 2.0}, (call(), call())
    unpacked = {"target": targets_with_ignored(device, 50, 7, ignore_index=3), "ignore_index": 3, "pack": False}
    recomputed = {"kind": "jsd", **CAPS, **hard, **none, "chunk": 3}
    normalizer = {"normalizer": torch.tensor(37.0, device=device)}
    yield from table(
        ("masked", masked[0], target, "rows of ignored targets count for nothing"),
        ("masked_none", masked[1], {**target, **none}, "they have 0, whatever arrives"),
        ("no_packing", call(), unpacked, "ignored rows stay in the products"),
        ("hard", call(), hard, "the cross entropy is that without temperature"),
        ("hard_reverse", call(), {"kind": "reverse_kl", **none, **hard}, "it is part of every gradient"),
        ("hard_caps", call(), {"kind": "jsd", **CAPS, **hard}, "all options together"),
        ("hard_caps_recomputed", call(), recomputed, "all options, with logits that are recomputed"),
        ("sum", call(), {"reduction": "sum"}, "no normalizer"),
        ("normalizer", call(), normalizer, "an external count on the device"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    x, w, theirs, head = (torch.zeros(shape, device=device) for shape in ((3, 8), (10, 8), (3, 4), (10, 4)))
    t, number = torch.zeros(3, dtype=torch.int64, device=device), "must be a finite number"
    classes = "(10, 4): the classes of weight (10, 8) and the width of teacher_hidden (3, 4)"
    constant = "must not require a gradient, since the op does not define one; pass teacher_weight.detach()"
    yield from misuse_table(
        "linear_divergence", (x, w, theirs, head),
        ("weight_shape", ShapeError, "weight must have shape (classes, 8) to match hidden (3, 8), got (10, 7)", {},
         x, w[:, :7], theirs, head),
        ("teacher_rows", ShapeError, "teacher_hidden must have shape (3, width) to match hidden (3, 8), got (2, 4)", {},
         x, w, theirs[:2], head),
        ("teacher_classes", ShapeError, f"teacher_weight must have shape {classes}, got (9, 4)", {},
         x, w, theirs, head[:9]),
        ("teacher_dtypes", DtypeError,
         "teacher_weight must have dtype torch.float32 like teacher_hidden, got torch.bfloat16; cast one of them", {},
         x, w, theirs, head.bfloat16()),
        ("teacher_bias", ShapeError, "teacher_bias must have shape (10,) to match teacher_weight (10, 4), got (8,)",
         {"teacher_bias": x[0]}),
        ("trainable_teacher", OptionError, f"teacher_weight {constant}", {},
         x, w, theirs, head.clone().requires_grad_()),
        ("kind", OptionError, f"kind must be one of {', '.join(map(repr, KINDS))}, got 'kl'", {"kind": "kl"}),
        ("beta", OptionError, "beta must be a number in (0, 1), got 0.0", {"kind": "jsd", "beta": 0.0}),
        ("hard_weight", OptionError,
         "hard_weight needs target, whose cross entropy it weighs, got hard_weight=0.5 alone", {"hard_weight": 0.5}),
        ("hard_weight_large", OptionError, f"hard_weight {number} in [0, 1], got 1.5",
         {"hard_weight": 1.5, "target": t}),
        ("temperature", OptionError, f"temperature {number} > 0, since the logits are divided by it, got 0.0",
         {"temperature": 0.0}),
        ("softcap", OptionError, f"teacher_softcap {number} > 0, got -1.0", {"teacher_softcap": -1.0}),
        ("budget", OptionError, "budget must hold one row of logits of both sides, 80 bytes, got 79", {"budget": 79}),
        ("target_shape", ShapeError, "target must have shape (3,) to match hidden (3, 8), got (2,)",
         {"target": t[:2]}),
        ("normalizer", OptionError, "normalizer needs reduction='mean', which it divides by, got reduction='none'",
         {"reduction": "none", "normalizer": 2.0}),
    )  # fmt: skip
    if device.type == "cpu":
        message, wrong = "every target must be in [0, 10) or ignore_index=-100, got 10", torch.tensor([0, 1, 10])
        row = ("target_range", TargetError, message, {"target": wrong})
        yield from misuse_table("linear_divergence", (x, w, theirs, head), row)


def workloads() -> Iterator[Workload]:
    def of_size(
        rows: int, width: int, teacher: int, classes: int, axis: str = "", quick: bool = False, **options: Any
    ) -> Workload:
        def make(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
            heads = [
                (normal(device, dtype, rows, size), normal(device, dtype, classes, size, scale=size**-0.5))
                for size in (width, teacher)
            ]
            return (*heads[0], *heads[1]), dict(options)

        base = workload(make, axis, quick, N=rows, H=width, T=teacher, V=classes)
        mode = "-".join(map(str, options.values()))
        return replace(base, name=f"{base.name}-{mode}") if mode else base

    yield of_size(512, 128, 192, 8192, quick=True)
    for width, kind in itertools.product((2048, 4096), KINDS[:4]):
        yield of_size(8192, width, 4096, 128256, kind=kind)
    yield of_size(8192, 4096, 4096, 128256, kind="jsd", reduction="none")
    yield of_size(8192, 4096, 4096, 151936, kind="forward_kl")
    for rows in ROWS[:-1]:
        yield of_size(rows, 2048, 4096, 128256, "N")
    for classes in CLASSES:
        yield of_size(8192, 2048, 4096, classes, "V")


def work(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **options: Any) -> Work:
    """One matmul for the logits of each side, and one for each gradient of the student."""
    mine, theirs = head_work(hidden, weight, hidden), head_work(teacher_hidden, teacher_weight, teacher_hidden)
    size, flops, products = theirs.forward_bytes, theirs.forward_flops, theirs.forward_products
    return Work(
        mine.forward_bytes + size, mine.full_bytes + size, mine.forward_flops + flops, mine.full_flops + flops,
        (*mine.forward_products, *products), (*mine.full_products, *products),
    )  # fmt: skip


@composed_op(
    TORCH_DIVERGENCES, divergence_loop, takes_dtensors,
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
)  # fmt: skip
def linear_divergence(
    loop: DivergenceLoop, supported: Supported, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor,
    teacher_weight: Tensor, *, bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    kind: Kind = "forward_kl", beta: float = 0.5, temperature: float = 1.0, target: Tensor | None = None,
    hard_weight: float = 0.0, ignore_index: int = -100, logit_scale: float = 1.0, softcap: float | None = None,
    teacher_logit_scale: float = 1.0, teacher_softcap: float | None = None, reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None, accumulate_dtype: torch.dtype | None = None, chunk: Chunk = None,
    budget: int | None = None, pack: bool = True, main_grad: Tensor | None = None, vocab: VocabShard | None = None,
) -> Tensor:  # fmt: skip
    """Divergence between the softmax of two heads, p of the teacher and q of the student, a chunk of rows at a
    time.

        x    = logit_scale · (hidden @ weightᵀ + bias), then softcap · tanh(x / softcap), then x / temperature
        q    = softmax(x);   p = the same of the teacher's;   M = beta · p + (1 - beta) · q
        loss = (1 - hard_weight) · divergence(p, q) + hard_weight · cross_entropy(temperature · x, target)

    hidden               (..., H)   any floating dtype
    weight               (V, H)     dtype of hidden (under autocast all are cast to its dtype)
    teacher_hidden       (..., T)   the same rows, of any width; any floating dtype; gets no gradient
    teacher_weight       (V, T)     dtype of teacher_hidden; the same classes as weight; gets no gradient
    bias, teacher_bias   (V,)       dtype of hidden, of teacher_hidden
    kind                 "forward_kl" KL(p ‖ q), "reverse_kl" KL(q ‖ p), "jsd" beta · KL(p ‖ M) + (1 - beta) · KL(q
                         ‖ M), "total_variation" ½ Σ |p - q|, "skewed_kl" KL(p ‖ M), "skewed_reverse_kl" KL(q ‖ M)
    beta                 the teacher's share of M, in (0, 1). As in TRL and GKD; there 0 and 1 name the forward and
                         the reverse KL, which are kinds here. DistiLLM's skew α is beta for "skewed_kl" and 1 -
                         beta for "skewed_reverse_kl"
    temperature          divides the logits of both sides; the result is not multiplied by its square
    target               (...)      int64 class indices, or ignore_index: the row does not count, and no matmul
                         contains it
    hard_weight          share of the cross entropy with target, without temperature
    teacher_logit_scale, teacher_softcap   those of the teacher
    reduction            "mean" divides the sum by the number of counted rows (0 if there is none), or by normalizer
    normalizer           number or scalar tensor on the device, for instance the tokens of all accumulation steps
    chunk                rows of logits held at a time; None fits the budget, "report" is 2^⌈log2⌈N/⌈V/H⌉⌉⌉
    budget               bytes that may be held beyond inputs and gradients; by default about 2 GiB on a GPU
    accumulate_dtype, pack   as in linear_cross_entropy
    main_grad            (V, H)     float32, as in linear_cross_entropy
    vocab                as in linear_cross_entropy; the teacher's weight and bias have only these classes, too
    returns              float32 (float64 for float64): a scalar, or (...) for "none"

    With "mean" and "sum" the gradients are computed during the forward pass (four matmuls). With "none" the
    gradient of the logits, but for the upstream gradient, is kept until the backward pass if it fits the budget,
    and hidden is multiplied by the upstream gradient instead of it (four matmuls); otherwise the logits of both
    sides are recomputed (six), or, where weight and bias are frozen, the forward pass computes the derivative by
    hidden (three), and the backward pass scales it. Only a few hundred rows of the teacher's logits are held at a
    time, beside those of the student. In float16, gradients are summed before they meet the scale of the upstream
    gradient and the normalizer, so that small probabilities do not underflow; these sums must be in the range of
    float16 themselves.
    A class at -inf on both sides counts for nothing; for the student alone it makes the forward KL infinite, for
    the teacher alone the reverse KL. A target outside [0, V) raises TargetError on the CPU; on other devices, where
    looking would stall the queue, the loss is NaN if it has a hard part. Raises ShapeError, DtypeError, OptionError
    for arguments that do not fit. Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2023, arXiv:2306.13649
    (GKD); Ko et al. 2024, arXiv:2402.03898 (DistiLLM).
    """
    supported(hidden, weight, teacher_hidden, teacher_weight)
    hidden, weight, bias = autocast_inputs(hidden, weight, bias)
    teacher_hidden, teacher_weight, teacher_bias = autocast_inputs(teacher_hidden, teacher_weight, teacher_bias)
    shape, rows = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])
    if target is None:
        # Every row counts; there is nothing to wait for.
        target, pack, ignore_index = rows.new_zeros(rows.shape[0], dtype=torch.int64), False, -100
    theirs = teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    head, teacher = Head(rows, weight, target.reshape(-1), bias), Teacher(theirs, teacher_weight, teacher_bias)
    options = DivergenceOptions.from_arguments(
        kind, beta, temperature, hard_weight=hard_weight, ignore_index=ignore_index, logit_scale=logit_scale,
        softcap=softcap, teacher_logit_scale=teacher_logit_scale, teacher_softcap=teacher_softcap,
    )  # fmt: skip
    chunks = ChunkOptions.from_arguments(accumulate_dtype, chunk, budget, pack, main_grad)
    if reduction == "none":
        values: Tensor = loop.rows(head, teacher, options, chunks, vocabulary(weight, vocab))
        return values.reshape(shape)
    divide: Tensor | None = None
    if reduction == "mean":
        divide = denominator(head.target, None, ignore_index, normalizer, accumulator(hidden.dtype))
    loss: Tensor = loop.reduced(head, teacher, divide, options, chunks, vocabulary(weight, vocab))
    return loss
