# SPDX-License-Identifier: Apache-2.0
"""linear_log_prob: what a language model's head gives each target token, without ever holding all the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.kernels import Kernel, reference_kernel
from liger_core.op import Misuse, Sample, Workload, op
from liger_core.ops._chunked_loss import Chunk, ChunkOptions, Head, autocast_inputs, loop_of

# Whoever does not hold the logits until the upstream gradient comes recomputes them, but that can be avoided: the work is the same.
from liger_core.ops._head import check_chunks, check_head, head_misuses, head_series, head_workload, work
from liger_core.ops._inputs import integers, misuses_of, normal
from liger_core.ops._loss_options import check_row_options, check_target, targets_with_ignored
from liger_core.ops._softmax_loss import TORCH_PASSES, Asked, RowOptions, RowPasses


def check(hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0, **options: Any) -> None:
    name = "linear_log_prob"
    head = Head(hidden, weight, target, bias)
    check_head(name, head)
    check_chunks(name, head, **options)
    checks.positive(name, "temperature", temperature, ", since the logits are divided by it")
    row = RowOptions.among(options)
    check_row_options(name, row, weight.shape[0])
    check_target(name, target, weight.shape[0], row.ignore_index)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def call(rows: tuple[int, ...], width: int, classes: int, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = normal(device, dtype, *rows, width), normal(device, dtype, classes, width, scale=scale)
        return hidden, weight, targets_with_ignored(device, classes, *rows)

    def biased(classes: int, **options: Any) -> dict[str, Any]:
        return {"bias": normal(device, dtype, classes), "chunk": 3, **options}

    yield Sample("one_chunk", call((6,), 32, 64), why="one chunk: dW is written directly")
    yield Sample("odd_sizes", call((7,), 33, 101), why="nothing is a power of two")
    yield Sample("leading_shape", call((2, 3), 16, 40), why="any leading shape")
    yield Sample("one_token", (*call((), 16, 40)[:2], integers(device, 40)), {"return_entropy": True}, why="no leading shape")
    yield Sample("several_chunks", call((11,), 24, 50), {"chunk": 4}, why="dW is summed over chunks, the last one is short")
    options = {"chunk": 4, "accumulate_dtype": torch.float64 if dtype == torch.float64 else torch.float32}
    yield Sample("accumulate_float32", call((11,), 24, 50), options, why="the accumulator's dtype is named")
    yield Sample("report_chunk", call((40,), 16, 128), {"chunk": "report"}, why="the chunk formula of the report")
    yield Sample("several_blocks", call((3,), 16, 9000), {"return_entropy": True}, why="a row of logits is longer than one block")
    yield Sample("bias", call((7,), 24, 50), biased(50), why="the head has a bias, with a gradient")
    yield Sample("logit_scale", call((7,), 24, 50), {"logit_scale": 0.25}, why="scaled logits (Granite, Cohere)")
    yield Sample("negative_scale", call((7,), 24, 50), {"logit_scale": -0.5}, why="the lowest logits become the highest")
    yield Sample("temperature", call((7,), 24, 50), {"temperature": 0.7}, why="logits divided by a temperature, as they were sampled")
    order = {"logit_scale": 2.0, "softcap": 5.0, "temperature": 0.7}
    yield Sample("scale_softcap_temperature", call((7,), 24, 50), order, why="first the scale, then the cap, last the temperature")
    target = targets_with_ignored(device, 50, 7, ignore_index=3)
    yield Sample("ignore_index", (*call((7,), 24, 50)[:2], target), {"ignore_index": 3}, why="a class can be the ignored one")
    yield Sample("entropy", call((7,), 24, 50), {"return_entropy": True}, why="entropy and log-probability have a gradient each")
    everything = biased(50, return_entropy=True, **order)
    yield Sample("entropy_everything", call((9,), 24, 50), everything, why="all options together, with entropy")
    # Two classes more than the tokeniser knows, switched off in the bias.
    padding = torch.zeros(50, device=device, dtype=dtype)
    padding[48:] = -torch.inf
    hidden, weight, target = call((7,), 24, 50)
    options = {"bias": padding, "return_entropy": True}
    why = "classes of probability 0 add no entropy and get no gradient"
    yield Sample("impossible_classes", (hidden, weight, target.clamp(max=47)), options, why=why, frozen=("bias",))
    options = {"budget": 2 * 70 * dtype.itemsize + 20 * 70 * 4, "return_entropy": True}
    yield Sample("budget", call((9,), 20, 70), options, why="chunks of 2 rows")
    options = {"pack": False, "chunk": 4, "return_entropy": True}
    yield Sample("no_packing", call((9,), 20, 70), options, why="ignored rows stay in the products")
    for frozen in ("hidden", "weight"):
        why = f"no work and no memory for the gradient of {frozen}"
        yield Sample(f"frozen_{frozen}", call((9,), 20, 70), {"chunk": 4, "return_entropy": True}, why=why, frozen=(frozen,))
    all_ignored = torch.full((5,), -100, device=device)
    yield Sample("all_ignored", (*call((5,), 16, 30)[:2], all_ignored), {"return_entropy": True}, why="zeros, with zero gradients")
    yield Sample("empty", call((0,), 16, 30), {"return_entropy": True}, why="no rows: nothing is launched")
    yield Sample("one_row", (*call((1,), 16, 30)[:2], integers(device, 30, 1)), why="a single row")
    yield Sample("one_class", call((4,), 16, 1), {"return_entropy": True}, why="a single class: probability 1, entropy 0")
    yield Sample("peaked", call((6,), 32, 60, scale=2.0), {"return_entropy": True}, why="softmax close to one class")
    hidden, (_, weight, target) = normal(device, dtype, 16, 6).t(), call((6,), 16, 30)
    yield Sample("transposed", (hidden, weight, target), why="hidden is a transposed view")


def misuses(device: torch.device) -> Iterator[Misuse]:
    name = "linear_log_prob"
    yield from head_misuses(name, device)
    call = torch.zeros(3, 8, device=device), torch.zeros(10, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    for value in (0.0, float("nan")):
        message = f"temperature must be a finite number > 0, since the logits are divided by it, got {value}"
        yield misuses_of(name)(f"temperature_{value}", call, OptionError, message, temperature=value)


def workloads() -> Iterator[Workload]:
    yield head_workload(512, 128, 8192, quick=True)
    for rows, width in ((8192, 2048), (8192, 4096), (32768, 4096)):
        yield head_workload(rows, width, 128256)
    yield head_workload(8192, 4096, 128256, mode="half_ignored")
    yield head_workload(8192, 4096, 128256, mode="return_entropy", return_entropy=True)
    yield from head_series()


# Without an annotation of what it returns, so that its signature is that of the op.
def implementation(passes: RowPasses, make_kernel: Callable[..., Kernel], supported: Callable[..., None] | None = None):  # type: ignore[no-untyped-def]
    """linear_log_prob for a backend that brings the row passes; `supported(hidden, weight)` may decline a call."""
    loop = loop_of(passes, make_kernel)

    def linear_log_prob(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        ignore_index: int = -100,
        return_entropy: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        chunk: Chunk = None,
        budget: int | None = None,
        pack: bool = True,
        main_grad: Tensor | None = None,
    ) -> Any:
        """Log-probability of each target under the softmax of a head's logits, and that softmax's entropy, a chunk of rows at a time.

            x        = logit_scale · (hidden @ weightᵀ + bias), then softcap · tanh(x / softcap), then x / temperature
            lse      = log Σ exp(x)
            log_prob = x_t - lse
            entropy  = -Σ p log p,   p = exp(x - lse)

        hidden            (..., H)   any floating dtype
        weight            (V, H)     dtype of hidden (under autocast both are cast to its dtype)
        target            (...)      int64 class indices, or ignore_index: log_prob and entropy 0, no gradient
        bias              (V,)       dtype of hidden
        temperature       the one that the tokens were sampled with; applied after scale and softcap
        return_entropy    also return the entropy, in nats
        accumulate_dtype  of the gradient of weight while chunks are summed; float32 by default (float64 for float64). A single chunk
                          writes it directly, rounded once
        chunk             rows of logits held at a time; None fits the budget, "report" is 2^⌈log2⌈N/⌈V/H⌉⌉⌉
        budget            bytes that may be held beyond inputs and gradients; by default what is fastest, about 2 GiB. A small one sums the
                          gradient of weight in its own dtype, with one more rounding a chunk
        pack              leave rows of ignored targets out of the products. On a GPU this waits once a pass for their number where the
                          products are large enough to pay for it, never while a CUDA graph is captured
        main_grad         (V, H) float32: the gradient of weight is added to it in the backward pass, and weight.grad stays as it is
        returns           log_prob (...), float32 (float64 for float64), or (log_prob, entropy)

        Both results have a gradient, whatever arrives from upstream; over x it is 1 - p at the target and -p elsewhere for log_prob, and
        -p · (log p + entropy) for entropy. Kept until then are the inputs, two numbers a row and entropy; the logits are recomputed, and only
        gradients asked for. Without gradients only the product with weight is computed.

        So preference and policy losses (DPO, ORPO, SimPO, KTO, GRPO, PPO) are plain arithmetic on log_prob. DPO, chosen answers first:

            policy = linear_log_prob(hidden, weight, target).sum(-1)
            chosen, rejected = (policy - reference).chunk(2)
            loss = -logsigmoid(beta * (chosen - rejected)).mean()

        In float16, gradients are summed before they meet the upstream gradient and the normalizer, so that small probabilities do not
        underflow; these sums must be in the range of float16 themselves (weights up to 3e4).
        The target of a row is the token after it: shift first, and give prompt and padding the ignore_index.
        A target outside [0, V) raises TargetError on the CPU; on other devices, where looking would stall the queue, its log_prob is NaN.
        Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
        Rafailov et al. 2023, arXiv:2305.18290 (DPO); Shao et al. 2024, arXiv:2402.03300 (GRPO).
        """
        if supported is not None:
            supported(hidden, weight)
        hidden, weight, bias = autocast_inputs(hidden, weight, bias)
        # softcap · tanh(s·a / softcap) / T = (softcap/T) · tanh((s/T)·a / (softcap/T)): the row passes need no temperature.
        scale, cap = logit_scale / temperature, None if softcap is None else softcap / temperature
        head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), bias)
        chunks = ChunkOptions.given(accumulate_dtype, chunk, budget, pack, main_grad)
        options = RowOptions(ignore_index, softcap=cap, logit_scale=scale)
        loss, _, _, entropy = loop.per_row(head, options, chunks, Asked(with_entropy=return_entropy))
        # Not -loss, which is -0.0 where a target is ignored.
        log_prob = (0.0 - loss).reshape(target.shape)
        return (log_prob, entropy.reshape(target.shape)) if return_entropy else log_prob

    return linear_log_prob


linear_log_prob = op(check=check, samples=samples, misuses=misuses, workloads=workloads, work=work)(
    implementation(TORCH_PASSES, reference_kernel)
)
