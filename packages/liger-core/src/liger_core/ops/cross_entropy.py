# SPDX-License-Identifier: Apache-2.0
"""cross_entropy: the loss of logits that already exist."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.autograd import differentiable
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError, TargetError
from liger_core.kernels import Kernel, Outputs
from liger_core.op import Misuse, Sample, Workload, accumulator
from liger_core.ops._composed import Supported, composed_op
from liger_core.ops._inputs import CLASSES, ROWS, integers, misuse_table, normal, row_work, row_workloads, sample_table
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


def check(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, temperature: float = 1.0,
    return_metrics: bool = False, **options: Any,
) -> None:  # fmt: skip
    name = "cross_entropy"
    checks.floating(name, logits=logits)
    checks.tensor(name, "target", target)
    checks.at_least_one_dimension(name, "logits", logits)
    classes = logits.shape[-1]
    if target.shape != logits.shape[:-1]:
        checks.mismatch(name, "target", target, tuple(logits.shape[:-1]), "logits", logits)
    if classes == 0:
        checks.misshapen(name, "logits must have at least one class", logits)
    checks.same_device(name, "logits", logits, target=target, weight=weight)
    checks.positive(name, "temperature", temperature, ", since the logits are divided by it")
    check_row_options(name, target, classes, class_weight=weight, weight_name="weight", **options)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n, i = functools.partial(normal, device, dtype), functools.partial(integers, device)
    table = functools.partial(sample_table, constants=("weight", "normalizer"))
    yield from table(
        ("one_block", (n(4, 64), i(64, 4)), {}, "the vocabulary is one block"),
        ("odd_width", (n(5, 101), i(101, 5)), {}, "mask on the last block"),
        ("several_blocks", (n(3, 9000, scale=2), i(9000, 3)), {}, "the row is longer than one block"),
        ("leading_shape", (n(2, 3, 40), i(40, 2, 3)), {}, "any leading shape"),
        ("one_token", (n(40), i(40)), {}, "no leading shape"),
    )
    ignored = n(7, 50), targets_with_ignored(device, 50, 7)
    target = targets_with_ignored(device, 50, 7, ignore_index=3)
    yield from table(
        ("ignored_rows", ignored, {}, "ignored rows get no loss and zero gradient"),
        ("ignore_index", (n(7, 50), target), {"ignore_index": 3}, "a class can be the ignored one"),
    )
    for name, options, why in loss_option_samples(device, 70):
        renamed = {{"class_weight": "weight"}.get(key, key): value for key, value in options.items()}
        arguments = n(6, 70), targets_with_ignored(device, 70, 6)
        yield from table((name, arguments, renamed, why))
    yield from table(
        ("all_ignored", (n(4, 30), torch.full((4,), -100, device=device)), {}, "the mean of nothing is 0, not NaN"),
        ("empty", (n(0, 30), i(30, 0)), {}, "no rows: the loss is 0 and nothing is launched"),
        ("peaked", (n(4, 60, scale=20), i(60, 4)), {}, "softmax close to one class"),
        ("common_offset", (n(4, 60) + 3e4, i(60, 4)), {}, "what logits have in common cancels"),
    )
    smoothed = {"label_smoothing": 0.1, "weight": torch.rand(60, device=device) + 0.5, "return_metrics": True}
    low, equal = (n(4, 60) - 3e4, i(60, 4)), torch.full((3, 40), 3e4, device=device, dtype=dtype)
    level, masked = (equal, i(40, 3)), n(4, 60)
    masked[:, 40:] = -torch.inf
    yield from table(
        ("common_offset_smoothed", low, smoothed, "also in what a row adds"),
        ("equal_logits", level, {}, "the loss is the logarithm of the number of classes"),
        ("infinite_logits", (masked, i(40, 4)), {}, "masked classes have probability 0 and gradient 0"),
        ("one_class", (n(4, 1), i(1, 4)), {}, "a single column: loss 0"),
        ("strided_rows", (n(5, 160)[:, :80], i(80, 5)), {}, "rows are read through their stride"),
        ("transposed", (n(40, 6).t(), i(40, 6)), {}, "the last dimension is not contiguous"),
    )
    sure, target = n(5, 45), torch.tensor([0, 7, 3, -100, 28], device=device)
    sure[torch.arange(5), torch.arange(5) * 7] += 7
    metrics, none = {"return_metrics": True, "z_loss": 1e-3}, {"return_metrics": True, "reduction": "none"}
    yield from table(
        ("metrics", (sure, target), metrics, "z-loss, accuracy, arg-max and entropy of the tokens"),
        ("metrics_none", (sure, target), none, "the metrics of each token"),
    )
    cool = {"temperature": 0.7, "softcap": 3.0, "z_loss": 1e-2}
    warm = {"temperature": 2.5, "label_smoothing": 0.1, "return_metrics": True}
    tempered = n(6, 70), targets_with_ignored(device, 70, 6)
    yield from table(
        ("temperature", tempered, cool, "the capped logits are divided"),
        ("temperature_smoothed", tempered, warm, "also in what a row adds, and in the metrics"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    x, t, nan = torch.zeros(3, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device), float("nan")
    share = "label_smoothing must be a finite number in [0, 1], got"
    yield from misuse_table(
        "cross_entropy", (x, t),
        ("target_shape", ShapeError, "target must have shape (3,) to match logits (3, 8), got (2,)", {}, x, t[:2]),
        ("target_dtype", DtypeError, "target must have dtype torch.int64, got torch.int32", {}, x, t.int()),
        ("target_list", DtypeError, "target must be a tensor, got list", {}, x, [0, 1, 2]),
        ("no_logits", DtypeError, "logits must be a tensor, got NoneType", {}, None, t),
        ("weight_shape", ShapeError, "weight must have shape (8,), one per class, got (3,)", {"weight": x[:, 0]}),
        ("weight_list", DtypeError, "weight must be a tensor, got list", {"weight": [1.0] * 8}),
        ("reduction", OptionError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'", {"reduction": "avg"}),
        ("smoothing", OptionError, f"{share} 1.5", {"label_smoothing": 1.5}),
        ("smoothing_nan", OptionError, f"{share} nan", {"label_smoothing": nan}),
        ("z_loss_nan", OptionError, "z_loss must be a finite number ≥ 0, got nan", {"z_loss": nan}),
        ("softcap", OptionError, "softcap must be a finite number > 0, got 0.0", {"softcap": 0.0}),
        ("softcap_infinite", OptionError, "softcap must be a finite number > 0, got inf", {"softcap": float("inf")}),
        ("ignore_index", OptionError, "ignore_index must be an integer, got -1.5", {"ignore_index": -1.5}),
        ("normalizer", OptionError, "normalizer needs reduction='mean', which it divides by, got reduction='sum'",
         {"reduction": "sum", "normalizer": 3.0}),
        ("trainable_weight", OptionError,
         "weight must not require a gradient, since the op does not define one; pass weight.detach()",
         {"weight": torch.ones(8, device=device, requires_grad=True)}),
        ("temperature", OptionError,
         "temperature must be a finite number > 0, since the logits are divided by it, got 0.0", {"temperature": 0.0}),
        ("device", DeviceError, f"target must be on {x.device} like logits, got meta", {}, x, t.to("meta")),
    )  # fmt: skip
    if device.type == "cpu":
        message = "every target must be in [0, 8) or ignore_index=-100, got 8"
        wrong = (x, torch.tensor([0, 8, 1]))
        yield from misuse_table("cross_entropy", wrong, ("target_range", TargetError, message, {}))


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, rows: int, classes: int) -> tuple[Tensor, ...]:
        return normal(device, dtype, rows, classes), integers(device, classes, rows)

    # The first shape is host-bound on a GPU.
    usual = ((1024, 8192), (8192, 40960), (8192, 128256), (8192, 163840))
    return row_workloads(draw, "NV", usual, quick=(256, 8192), rows=ROWS[:-2], columns=128256, widths=CLASSES)


class CrossEntropyKernels:
    """The kernels for a backend's row passes, over (rows, classes) logits.

    loss          (logits, target, divide, options, reduction, requested results) → the loss, of each row or reduced
    with_results  the same, the results of each row, and for a mean the factor of the sum
    """

    def __init__(self, passes: RowPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        forward = make_kernel("cross_entropy", self._allocate, self._launch)
        backward = make_kernel("cross_entropy_backward", self._allocate_backward, self._launch_backward)
        saves = ("logits", "target", "moments", "inverse", "class_weight", "inverse_temperature")
        self.loss, self.with_results = (differentiable(forward, backward, saves, public) for public in (1, 5))

    def _allocate(
        self, logits: Tensor, target: Tensor, divide: Tensor | None, options: RowOptions, reduction: str,
        extras: ResultOptions,
    ) -> Outputs:  # fmt: skip
        results = RowResults.empty(logits, extras)
        scalar = results.loss.new_empty
        loss = results.loss if reduction == "none" else scalar(())
        return (loss, *results[1:], scalar(()) if reduction == "mean" else None)

    def _launch(
        self, results: RowResults, inverse: Tensor | None, /, logits: Tensor, target: Tensor, divide: Tensor | None,
        options: RowOptions, reduction: str, extras: ResultOptions,
    ) -> None:  # fmt: skip
        rows = results if reduction == "none" else results._replace(loss=results.moments.new_empty(logits.shape[0]))
        if logits.shape[0]:
            self.passes.losses(logits, target, rows, options, None, False)
        if inverse is not None:
            self.passes.mean(rows.loss, target, options, divide, results.loss, inverse)
        elif reduction == "sum":
            torch.sum(rows.loss, dim=0, out=results.loss)

    def _allocate_backward(self, grad_loss: Tensor, logits: Tensor, *rest: Any) -> Outputs:
        return (torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),)

    def _launch_backward(
        self, grad_logits: Tensor, /, grad_loss: Tensor, logits: Tensor, target: Tensor, moments: Tensor,
        inverse: Tensor | None, options: RowOptions, needs: list[bool],
    ) -> None:  # fmt: skip
        factor = grad_loss if inverse is None else grad_loss * inverse
        factor = factor.expand(logits.shape[0])
        if logits.shape[0]:
            self.passes.gradients(logits, target, moments, factor, options, grad_logits)


@composed_op(
    TORCH_PASSES, CrossEntropyKernels,
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(1, 3),
)  # fmt: skip
def cross_entropy(
    kernels: CrossEntropyKernels, supported: Supported, logits: Tensor, target: Tensor, *, weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    temperature: float = 1.0, reduction: Reduction = "mean", normalizer: Tensor | float | None = None,
    return_metrics: bool = False,
) -> Any:  # fmt: skip
    """Cross entropy between logits and target classes.

        x    = softcap · tanh(logits / softcap) / temperature      (logits / temperature without a softcap)
        lse  = log Σ exp(x)
        loss = (1 - label_smoothing) · w_t · (lse - x_t) + label_smoothing/V · Σ_c w_c (lse - x_c) + z_loss · lse²

    logits           (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
    target           (...)      int64 class indices, or ignore_index: no loss, zero gradient
    weight           (V,)       class weights w; 1 by default
    ignore_index     targets of this value do not count; it may be outside of [0, V)
    label_smoothing  the share of the loss that all classes have equally, in [0, 1]
    z_loss           factor of lse², which keeps the logits near a normalized distribution; 0 for none
    softcap          bounds the logits to ±softcap; None for no bound
    temperature      divides the logits; the loss is not multiplied by it
    reduction        "mean" divides the sum by the summed weights of the counted targets (0 if none is counted), or
                     by normalizer
    normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
    return_metrics   also return `LossMetrics`
    returns          float32 (float64 for float64): a scalar, or (...) for "none"

    A target outside [0, V) raises TargetError on the CPU; on other devices, where reading it would stall the queue,
    its loss is NaN. Raises ShapeError, DtypeError, OptionError for arguments that do not fit. z-loss: Chowdhery et
    al. 2022, arXiv:2204.02311; softcap: Gemma 2, arXiv:2408.00118.
    """
    supported(logits)
    flat, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    cap = None if softcap is None else softcap / temperature
    options = RowOptions(ignore_index, label_smoothing, z_loss, cap, 1.0 / temperature, weight)
    extras = ResultOptions(with_entropy=return_metrics, with_prediction=return_metrics)
    divide: Tensor | None = None
    if normalizer is not None:
        divide = denominator(labels, weight, ignore_index, normalizer, accumulator(flat.dtype))
    arguments = flat, labels, divide, options, reduction, extras
    if not return_metrics:
        loss = kernels.loss(*arguments)
        return loss.reshape(target.shape) if reduction == "none" else loss
    loss, *rows, inverse = kernels.with_results(*arguments)
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    return loss, metrics_of(target, options, rows, reduction, inverse)
