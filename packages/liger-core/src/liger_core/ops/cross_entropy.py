# SPDX-License-Identifier: Apache-2.0
"""cross_entropy: the loss of logits that already exist."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.autograd import differentiable
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError, TargetError
from liger_core.kernels import Kernel, Outputs
from liger_core.op import Misuse, Sample, Work, Workload, accumulator
from liger_core.ops._composed import Supported, composed_op
from liger_core.ops._inputs import CLASSES, ROWS, integers, misuses_of, normal, row_workloads, sample_table
from liger_core.ops._softmax_loss import (
    TORCH_PASSES,
    Reduction,
    RowPasses,
    RowResults,
    check_reduction,
    check_row_options,
    denominator,
    loss_option_samples,
    metrics_of,
    row_results,
    targets_with_ignored,
)
from liger_core.ops._token_passes import ResultOptions, RowOptions


def check(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None, return_metrics: bool = False, **options: Any,
) -> None:  # fmt: skip
    name = "cross_entropy"
    checks.floating(name, logits=logits)
    checks.tensor(name, "target", target)
    checks.at_least_one_dimension(name, "logits", logits)
    classes = logits.shape[-1]
    if target.shape != logits.shape[:-1]:
        wanted = tuple(logits.shape[:-1])
        checks.fail(
            ShapeError,
            name,
            f"target must have shape {wanted} to match logits {checks.shape(logits)}, got {checks.shape(target)}",
        )
    if classes == 0:
        checks.fail(ShapeError, name, f"logits must have at least one class, got {checks.shape(logits)}")
    checks.same_device(name, "logits", logits, target=target, weight=weight)
    check_reduction(name, target, reduction, normalizer)
    check_row_options(name, target, classes, class_weight=weight, weight_name="weight", **options)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n, i = functools.partial(normal, device, dtype), functools.partial(integers, device)
    constants = ("weight", "normalizer")
    yield from sample_table(
        constants,
        ("one_block", (n(4, 64), i(64, 4)), {}, "the vocabulary is one block"),
        ("odd_width", (n(5, 101), i(101, 5)), {}, "mask on the last block"),
        ("several_blocks", (n(3, 9000, scale=2), i(9000, 3)), {}, "the row is longer than one block"),
        ("leading_shape", (n(2, 3, 40), i(40, 2, 3)), {}, "any leading shape"),
        ("one_token", (n(40), i(40)), {}, "no leading shape"),
    )
    ignored = n(7, 50), targets_with_ignored(device, 50, 7)
    target = targets_with_ignored(device, 50, 7, ignore_index=3)
    yield from sample_table(
        constants,
        ("ignored_rows", ignored, {}, "ignored rows get no loss and zero gradient"),
        ("ignore_index", (n(7, 50), target), {"ignore_index": 3}, "a class can be the ignored one"),
    )
    for name, options, why in loss_option_samples(device, 70):
        renamed = {{"class_weight": "weight"}.get(key, key): value for key, value in options.items()}
        arguments = n(6, 70), targets_with_ignored(device, 70, 6)
        yield from sample_table(constants, (name, arguments, renamed, why))
    yield from sample_table(
        constants,
        ("all_ignored", (n(4, 30), torch.full((4,), -100, device=device)), {}, "the mean of nothing is 0, not NaN"),
        ("empty", (n(0, 30), i(30, 0)), {}, "no rows: the loss is 0 and nothing is launched"),
        ("peaked", (n(4, 60, scale=20), i(60, 4)), {}, "softmax close to one class"),
        ("common_offset", (n(4, 60) + 3e4, i(60, 4)), {}, "what logits have in common cancels"),
    )
    smoothed = {"label_smoothing": 0.1, "weight": torch.rand(60, device=device) + 0.5, "return_metrics": True}
    low, equal = (n(4, 60) - 3e4, i(60, 4)), torch.full((3, 40), 3e4, device=device, dtype=dtype)
    level, masked = (equal, i(40, 3)), n(4, 60)
    masked[:, 40:] = -torch.inf
    yield from sample_table(
        constants,
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
    yield from sample_table(
        constants,
        ("metrics", (sure, target), metrics, "z-loss, accuracy, arg-max and entropy of the tokens"),
        ("metrics_none", (sure, target), none, "the metrics of each token"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("cross_entropy")
    x, t = torch.zeros(3, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    yield misuse("target_shape", (x, t[:2]), ShapeError, "target must have shape (3,) to match logits (3, 8), got (2,)")
    yield misuse("target_dtype", (x, t.int()), DtypeError, "target must have dtype torch.int64, got torch.int32")
    yield misuse("target_list", (x, [0, 1, 2]), DtypeError, "target must be a tensor, got list")
    yield misuse("no_logits", (None, t), DtypeError, "logits must be a tensor, got NoneType")
    yield misuse(
        "weight_shape", (x, t), ShapeError, "weight must have shape (8,), one per class, got (3,)", weight=x[:, 0]
    )
    yield misuse("weight_list", (x, t), DtypeError, "weight must be a tensor, got list", weight=[1.0] * 8)
    for case, options, message in (
        ("reduction", {"reduction": "avg"}, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
        ("smoothing", {"label_smoothing": 1.5}, "label_smoothing must be a finite number in [0, 1], got 1.5"),
        (
            "smoothing_nan",
            {"label_smoothing": float("nan")},
            "label_smoothing must be a finite number in [0, 1], got nan",
        ),
        ("z_loss_nan", {"z_loss": float("nan")}, "z_loss must be a finite number ≥ 0, got nan"),
        ("softcap", {"softcap": 0.0}, "softcap must be a finite number > 0, got 0.0"),
        ("softcap_infinite", {"softcap": float("inf")}, "softcap must be a finite number > 0, got inf"),
        ("ignore_index", {"ignore_index": -1.5}, "ignore_index must be an integer, got -1.5"),
    ):
        yield misuse(case, (x, t), OptionError, message, **options)
    message = "normalizer needs reduction='mean', which it divides by, got reduction='sum'"
    yield misuse("normalizer", (x, t), OptionError, message, reduction="sum", normalizer=3.0)
    message = "weight must not require a gradient, since the op does not define one; pass weight.detach()"
    yield misuse(
        "trainable_weight", (x, t), OptionError, message, weight=torch.ones(8, device=device, requires_grad=True)
    )
    elsewhere = torch.zeros(3, dtype=torch.int64, device="meta")
    yield misuse("device", (x, elsewhere), DeviceError, f"target must be on {x.device} like logits, got meta")
    if device.type == "cpu":
        wrong = torch.tensor([0, 8, 1])
        yield misuse(
            "target_range", (x, wrong), TargetError, "every target must be in [0, 8) or ignore_index=-100, got 8"
        )


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, rows: int, classes: int) -> tuple[Tensor, ...]:
        return normal(device, dtype, rows, classes), integers(device, classes, rows)

    # The first shape is host-bound on a GPU.
    usual = ((1024, 8192), (8192, 40960), (8192, 128256), (8192, 163840))
    return row_workloads(draw, "NV", usual, quick=(256, 8192), rows=ROWS[:-2], columns=128256, widths=CLASSES)


def work(logits: Tensor, target: Tensor, **options: Any) -> Work:
    size = logits.numel() * logits.element_size()
    return Work(size, 3 * size)


class ReducedResults(NamedTuple):
    """The summed or mean loss, the results of rows as in RowResults, and for a mean the factor of the sum."""

    loss: Tensor
    moments: Tensor
    prediction: Tensor | None
    entropy: Tensor | None
    inverse: Tensor | None


class CrossEntropyKernels:
    """The kernels for a backend's row passes, over (rows, classes) logits.

    rows                  (logits, target, options, requested results) → the loss and the results of each row
    reduced               (logits, target, divide, options, mean, requested results) → their sum or mean
    reduced_with_results  the same, and the results of each row
    """

    def __init__(self, passes: RowPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.rows = differentiable(
            make_kernel("cross_entropy", self._allocate, self._launch),
            make_kernel("cross_entropy_backward", self._allocate_backward, self._launch_backward),
            saves=("logits", "target", "moments", "class_weight", "inverse_temperature"),
            public=4,
        )
        reduced = make_kernel("cross_entropy_reduced", self._allocate_reduced, self._launch_reduced)
        derivative = make_kernel(
            "cross_entropy_reduced_backward", self._allocate_backward, self._launch_reduced_backward
        )
        saves = ("logits", "target", "moments", "inverse", "class_weight", "inverse_temperature")
        self.reduced, self.reduced_with_results = (
            differentiable(reduced, derivative, saves, public) for public in (1, 5)
        )

    def _allocate(self, logits: Tensor, target: Tensor, options: RowOptions, extras: ResultOptions) -> Outputs:
        return row_results(logits, extras)

    def _launch(
        self, results: RowResults, /, logits: Tensor, target: Tensor, options: RowOptions, extras: ResultOptions
    ) -> None:
        if logits.shape[0]:
            self.passes.losses(logits, target, results, options, None, False)

    def _allocate_backward(self, grad_loss: Tensor, logits: Tensor, *rest: Any) -> Outputs:
        return (torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),)

    def _launch_backward(
        self, grad_logits: Tensor, /, grad_loss: Tensor, logits: Tensor, target: Tensor, moments: Tensor,
        options: RowOptions, needs: list[bool],
    ) -> None:  # fmt: skip
        if logits.shape[0]:
            self.passes.gradients(logits, target, moments, grad_loss, options, grad_logits)

    def _allocate_reduced(
        self, logits: Tensor, target: Tensor, divide: Tensor | None, options: RowOptions, mean: bool,
        extras: ResultOptions,
    ) -> Outputs:  # fmt: skip
        results = row_results(logits, extras)
        scalar = results.loss.new_empty
        return ReducedResults(scalar(()), *results[1:], scalar(()) if mean else None)

    def _launch_reduced(
        self, results: ReducedResults, /, logits: Tensor, target: Tensor, divide: Tensor | None, options: RowOptions,
        mean: bool, extras: ResultOptions,
    ) -> None:  # fmt: skip
        loss, moments, prediction, entropy, inverse = results
        rows = RowResults(moments.new_empty(logits.shape[0]), moments, prediction, entropy)
        if logits.shape[0]:
            self.passes.losses(logits, target, rows, options, None, False)
        if inverse is not None:
            self.passes.mean(rows.loss, target, options, divide, loss, inverse)
        else:
            torch.sum(rows.loss, dim=0, out=loss)

    def _launch_reduced_backward(
        self, grad_logits: Tensor, /, grad_loss: Tensor, logits: Tensor, target: Tensor, moments: Tensor,
        inverse: Tensor | None, options: RowOptions, needs: list[bool],
    ) -> None:  # fmt: skip
        factor = grad_loss if inverse is None else grad_loss * inverse
        factor = factor.expand(logits.shape[0])
        self._launch_backward(grad_logits, factor, logits, target, moments, options, needs)


@composed_op(
    TORCH_PASSES, CrossEntropyKernels,
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
)  # fmt: skip
def cross_entropy(
    kernels: CrossEntropyKernels, supported: Supported, logits: Tensor, target: Tensor, *, weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    reduction: Reduction = "mean", normalizer: Tensor | float | None = None, return_metrics: bool = False,
) -> Any:  # fmt: skip
    """Cross entropy between logits and target classes.

        x    = softcap · tanh(logits / softcap)      (logits themselves without a softcap)
        lse  = log Σ exp(x)
        loss = (1 - label_smoothing) · w_t · (lse - x_t) + label_smoothing/V · Σ_c w_c (lse - x_c) + z_loss · lse²

    logits           (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
    target           (...)      int64 class indices, or ignore_index: no loss, zero gradient
    weight           (V,)       class weights w; 1 by default
    ignore_index     targets of this value do not count; it may be outside of [0, V)
    label_smoothing  the share of the loss that all classes have equally, in [0, 1]
    z_loss           factor of lse², which keeps the logits near a normalized distribution; 0 for none
    softcap          bounds the logits to ±softcap; None for no bound
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
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, 1.0, weight)
    extras = ResultOptions(with_entropy=return_metrics, with_prediction=return_metrics)
    if reduction == "none":
        loss, *rows = kernels.rows(flat, labels, options, extras)
        loss = loss.reshape(target.shape)
        return (loss, metrics_of(target, options, rows, reduction, None)) if return_metrics else loss
    divide: Tensor | None = None
    if normalizer is not None:
        divide = denominator(labels, weight, ignore_index, normalizer, accumulator(flat.dtype))
    mean = reduction == "mean"
    if not return_metrics:
        return kernels.reduced(flat, labels, divide, options, mean, extras)
    loss, *rows, inverse = kernels.reduced_with_results(flat, labels, divide, options, mean, extras)
    return loss, metrics_of(target, options, rows, reduction, inverse)
