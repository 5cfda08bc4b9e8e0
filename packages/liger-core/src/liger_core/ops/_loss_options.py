# SPDX-License-Identifier: Apache-2.0
"""What the ops with a cross entropy share: options with their checks and samples, targets, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.ops._inputs import integers
from liger_core.ops._softmax_loss import LossMetrics, RowOptions, RowResults

Reduction = Literal["mean", "sum", "none"]


def check_row_options(name: str, options: RowOptions, classes: int, weight_name: str = "class_weight") -> None:
    """The scalars and class weights of a row's loss."""
    checks.fraction(name, "label_smoothing", options.label_smoothing)
    checks.not_negative(name, "z_loss", options.z_loss)
    if options.softcap is not None:
        checks.positive(name, "softcap", options.softcap)
    checks.finite(name, "logit_scale", options.logit_scale)
    weight = options.class_weight
    if weight is not None:
        checks.floating(name, **{weight_name: weight})
        if tuple(weight.shape) != (classes,):
            checks.fail(ShapeError, name, f"{weight_name} must have shape ({classes},), one per class, got {checks.shape(weight)}")
        checks.constant(name, **{weight_name: weight})


def check_reduction(name: str, target: Tensor, reduction: str, normalizer: Tensor | float | None) -> None:
    checks.choice(name, "reduction", reduction, ("mean", "sum", "none"))
    if normalizer is None:
        return
    if reduction != "mean":
        checks.fail(OptionError, name, f"normalizer needs reduction='mean', which it divides by, got reduction={reduction!r}")
    if not isinstance(normalizer, Tensor):
        checks.positive(name, "normalizer", normalizer)
        return
    if normalizer.dim() != 0:
        checks.fail(ShapeError, name, f"normalizer must be a number or a scalar tensor, got shape {checks.shape(normalizer)}")
    checks.same_device(name, "target", target, normalizer=normalizer)
    checks.constant(name, normalizer=normalizer)


def check_target(name: str, target: Tensor, classes: int, ignore_index: int) -> None:
    if target.dtype != torch.int64:
        checks.fail(DtypeError, name, f"target must have dtype torch.int64, got {target.dtype}")
    checks.targets(name, target, classes, ignore_index)


def loss_option_samples(device: torch.device, classes: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, options, why) for the options that both losses have; class weights are under the key "class_weight"."""
    weight = torch.rand(classes, device=device) + 0.5
    yield "sum", {"reduction": "sum"}, "no normalizer"
    yield "none", {"reduction": "none"}, "every token has its own upstream gradient"
    yield "class_weight", {"class_weight": weight}, "the mean divides by the summed weights"
    yield "label_smoothing", {"label_smoothing": 0.1}, "the whole row enters the loss"
    yield "label_smoothing_whole", {"label_smoothing": 1.0}, "nothing but the smoothed part is left"
    yield "z_loss", {"z_loss": 1e-2}, "the log-sum-exp enters the loss"
    yield "softcap", {"softcap": 3.0}, "tanh and its derivative"
    yield "large_softcap", {"softcap": 1e4, "z_loss": 1e-2}, "tanh of numbers near 0 must not cancel"
    yield "normalizer", {"normalizer": torch.tensor(37.0, device=device)}, "an external count on the device (num_items_in_batch)"
    yield "normalizer_number", {"normalizer": 37.0}, "an external count as a number"
    everything = {"class_weight": weight, "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0}
    yield "everything", everything, "all options together"
    yield "everything_none", {**everything, "reduction": "none"}, "all options together, per token"


def targets_with_ignored(device: torch.device, classes: int, *shape: int, ignore_index: int = -100) -> Tensor:
    """Random targets of which about a third are ignored, and never all."""
    target = integers(device, classes, *shape)
    target.view(-1)[1::3] = ignore_index
    return target


def metrics_of(
    target: Tensor, options: RowOptions, results: RowResults, reduction: str, inverse: Tensor | None, token_weight: Tensor | None = None
) -> LossMetrics:
    """The metrics of a batch from the results of its rows; inverse is what a mean multiplied their sum by."""
    _, statistics, prediction, entropy = results
    assert prediction is not None
    assert entropy is not None
    labels, entropy = target.reshape(-1), entropy.detach()
    counted = labels != options.ignore_index
    lse = statistics[:, 0] + statistics[:, 1].log()
    # In this order 0 · lse² is 0 even where the square overflows.
    penalty = options.z_loss * lse * lse
    if token_weight is not None:
        penalty = penalty * token_weight.reshape(-1)
    penalty = torch.where(counted, penalty, 0.0)
    hit = (counted & (prediction == labels)).to(statistics.dtype)
    if reduction == "none":
        return LossMetrics(*(t.reshape(target.shape) for t in (penalty, hit, prediction, entropy)))
    count = counted.sum().clamp(min=1)
    z_loss = penalty.sum() if inverse is None else penalty.sum() * inverse
    return LossMetrics(z_loss, hit.sum() / count, prediction.reshape(target.shape), entropy.sum() / count)
