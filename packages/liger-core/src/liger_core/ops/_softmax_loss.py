# SPDX-License-Identifier: Apache-2.0
"""The row mathematics that the losses share, its pure-PyTorch implementation, and the options of the losses with their
checks and samples.

For one row of logits a (after bias) and target t, with class weights w (1 by default), V classes:

    x    = logit_scale · a, then softcap · tanh(x / softcap) if a softcap is given
    lse  = log Σ exp(x) = m + log d,   m = max x,   d = Σ exp(x - m)
    loss = (1 - smoothing) · w_t · (lse - x_t) + smoothing/V · Σ_c w_c (lse - x_c) + z_loss · lse²

    p = exp(x - m) / d;   entropy = -Σ p log p

Every difference x - lse is computed as (x - m) - log d. In float32 lse has no digits left for log d once m is large: at
m = 10⁷ the gradient would be off by 3 %. So m and d are kept apart, as `statistics` (rows, 2). Not m and log d:
dividing by d rounds each p on its own, while the round-off of log d would be a factor of all p, whose sum then is not
1.

A row whose target is `ignore_index` has loss 0 and no gradient; one whose target is out of range has loss and gradient
NaN, since no implementation may wait for the device to find out.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import accumulator
from liger_core.ops._inputs import integers
from liger_core.ops._token_passes import ResultOptions, RowOptions, TokenPasses, blocks, capped

Reduction = Literal["mean", "sum", "none"]


class LossMetrics(NamedTuple):
    """The metrics that a loss returns in addition to itself; none of them is differentiable.

    z_loss      the part of the loss that is z_loss · lse², reduced like the loss
    accuracy    share of counted tokens whose arg-max is the target (per token, 0 or 1, under reduction="none")
    prediction  arg-max class of every token, leading shape of the target; -1 where the target is ignored
    entropy     mean entropy of the softmax over counted tokens, in nats (per token under reduction="none")
    """

    z_loss: Tensor
    accuracy: Tensor
    prediction: Tensor
    entropy: Tensor


class RowResults(NamedTuple):
    """Per-row outputs of a pass: float32 loss, moments (m, d), and on request arg-max and entropy."""

    loss: Tensor
    moments: Tensor
    prediction: Tensor | None
    entropy: Tensor | None

    @classmethod
    def empty(cls, like: Tensor, extras: ResultOptions) -> Self:
        """Allocate the results for as many rows as the tensor has, on its device."""
        rows, empty = like.shape[0], functools.partial(torch.empty, dtype=accumulator(like.dtype), device=like.device)
        prediction = empty(rows, dtype=torch.int64) if extras.with_prediction else None
        return cls(empty(rows), empty(rows, 2), prediction, empty(rows) if extras.with_entropy else None)


class RowPasses(TokenPasses):
    """The row passes of the losses in pure PyTorch, a block of rows at a time; a backend brings the same ones."""

    def losses(
        self, logits: Tensor, target: Tensor, results: RowResults, options: RowOptions, row_factor: Tensor | None,
        gradient: bool,
    ) -> None:  # fmt: skip
        """Fill results; with gradient also overwrite logits by row_factor · d loss / d a (row_factor is 1 if None)."""
        for rows in blocks(logits):
            x = capped(logits[rows], *options.scale_and_cap(rows))
            top = x.amax(-1, keepdim=True)
            below = x - top
            exp_sum = below.exp().sum(-1)
            statistics = torch.stack((top[:, 0], exp_sum), dim=-1)
            results.moments[rows] = statistics
            results.loss[rows] = _losses(below, statistics, target[rows], options)
            counted = target[rows] != options.ignore_index
            if results.prediction is not None:
                results.prediction[rows] = torch.where(counted, x.argmax(-1), -1)
            if results.entropy is not None:
                # From distances to the maximum, which do not cancel where the softmax is peaked.
                weight = below.exp()
                entropy = exp_sum.log() - torch.where(weight > 0, weight.mul_(below), 0.0).sum(-1) / exp_sum
                results.entropy[rows] = torch.where(counted, entropy, 0.0)
                del weight
            del below
            if gradient:
                factor = None if row_factor is None else row_factor[rows]
                logits[rows] = _gradients(x, target[rows], statistics, factor, options).to(logits.dtype)

    def gradients(
        self, logits: Tensor, target: Tensor, statistics: Tensor, row_factor: Tensor, options: RowOptions, out: Tensor
    ) -> None:
        """Write row_factor · d loss / d a into out, given the statistics of each row."""
        for rows in blocks(logits):
            x = capped(logits[rows], *options.scale_and_cap(rows))
            out[rows] = _gradients(x, target[rows], statistics[rows], row_factor[rows], options).to(out.dtype)

    def mean(
        self, losses: Tensor, target: Tensor, options: RowOptions, divide: Tensor | None, mean: Tensor, inverse: Tensor
    ) -> None:
        """Write mean = inverse · Σ losses and inverse = 1/divide.

        By default, divide is Σ w_t over the counted targets, or 1 if there are none.
        """
        if divide is None:
            divide = denominator(target, options.class_weight, options.ignore_index, None, losses.dtype)
        torch.reciprocal(divide, out=inverse)
        torch.mul(losses.sum(), inverse, out=mean)

    def scaled(self, tensor: Tensor, scale: Tensor, out: Tensor, add: bool = False) -> None:
        """Write out = tensor · scale, or with `add` out += tensor · scale, rounded once.

        scale is a float32 scalar on the device; out may be tensor.
        """
        if tensor is out and scale.device.type == "cpu" and scale == 1.0:
            return
        for rows in [...] if tensor.dim() < 2 else blocks(tensor):
            value = tensor[rows].to(scale.dtype)
            value = value.mul_(scale) if value.data_ptr() == out[rows].data_ptr() else value * scale
            out[rows] = value.add_(out[rows]) if add else value


TORCH_PASSES = RowPasses()


def _losses(below: Tensor, statistics: Tensor, target: Tensor, options: RowOptions) -> Tensor:
    """Return the losses of rows, given x - m."""
    classes = below.shape[-1]
    counted = target != options.ignore_index
    index = target.clamp(0, classes - 1)
    weight = options.class_weight
    log_sum = statistics[:, 1].log()
    loss = log_sum - below.gather(-1, index[:, None])[:, 0]
    if weight is not None:
        loss = loss * weight.to(below.dtype)[index]
    if options.label_smoothing:
        if weight is None:
            smooth = log_sum - below.mean(-1)
        else:
            wide = weight.to(below.dtype)
            smooth = (log_sum * wide.sum() - below @ wide) / classes
        loss = (1.0 - options.label_smoothing) * loss + options.label_smoothing * smooth
    if options.z_loss:
        lse = statistics[:, 0] + log_sum
        # In this order nothing overflows that the loss can hold.
        loss = loss + options.z_loss * lse * lse
    loss = torch.where((target < 0) | (target >= classes), float("nan"), loss)
    return torch.where(counted, loss, 0.0)


def _gradients(x: Tensor, target: Tensor, statistics: Tensor, row_factor: Tensor | None, options: RowOptions) -> Tensor:
    classes = x.shape[-1]
    counted = target != options.ignore_index
    index = target.clamp(0, classes - 1)
    top, exp_sum = statistics.unbind(-1)
    weight = None if options.class_weight is None else options.class_weight.to(x.dtype)
    hard = torch.ones_like(top) if weight is None else weight[index]
    hard = hard * (1.0 - options.label_smoothing)
    share = hard
    if options.label_smoothing:
        share = share + options.label_smoothing * (1.0 if weight is None else weight.sum() / classes)
    if options.z_loss:
        share = share + 2.0 * options.z_loss * (top + exp_sum.log())
    d = (x - top[:, None]).exp_().div_(exp_sum[:, None]).mul_(share[:, None])
    d.scatter_add_(-1, index[:, None], -hard[:, None])
    if options.label_smoothing:
        d.sub_(options.label_smoothing / classes * (1.0 if weight is None else weight))
    factor = torch.full_like(top, options.logit_scale)
    if row_factor is not None:
        factor = row_factor.to(top.dtype) * options.logit_scale
    factor = torch.where((target < 0) | (target >= classes), float("nan"), factor)
    d.mul_(factor[:, None])
    if options.softcap is not None:
        d.mul_(1.0 - (x / options.softcap).square())
    # A row that is not counted gets zeros, even if its own logits are infinite or NaN.
    return torch.where(counted[:, None], d, 0.0)


def denominator(
    target: Tensor, class_weight: Tensor | None, ignore_index: int, normalizer: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the divisor of "mean" as a scalar on the device.

    It is the normalizer, else the summed class weight of the counted targets, or 1 if that sum is 0.
    """
    if isinstance(normalizer, Tensor):
        return normalizer.to(dtype)
    if normalizer is not None:
        return torch.full((), normalizer, dtype=dtype, device=target.device)
    count = counted = target != ignore_index
    if class_weight is not None:
        count = torch.where(counted, class_weight.to(dtype)[target.clamp(0, class_weight.shape[0] - 1)], 0.0)
    count = count.sum(dtype=dtype)
    # No counted target: the sum is 0, and the mean must be 0, too, not 0/0.
    return torch.where(count == 0, 1.0, count)


def check_row_options(
    name: str, target: Tensor, classes: int, *, reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, class_weight: Tensor | None = None,
    weight_name: str = "class_weight", **rest: Any,
) -> None:  # fmt: skip
    """Check the options of a row's loss, of which there may be others, and its targets."""
    checks.fraction(name, "label_smoothing", label_smoothing)
    checks.not_negative(name, "z_loss", z_loss)
    if softcap is not None:
        checks.positive(name, "softcap", softcap)
    checks.finite(name, "logit_scale", logit_scale)
    if class_weight is not None:
        checks.floating(name, **{weight_name: class_weight})
        if class_weight.shape != (classes,):
            checks.misshapen(name, f"{weight_name} must have shape ({classes},), one per class", class_weight)
        checks.constant(name, **{weight_name: class_weight})
    check_reduction(name, target, reduction, normalizer)
    check_target(name, target, classes, ignore_index)


def check_reduction(name: str, rows: Tensor, reduction: str, normalizer: Tensor | float | None, *more: str) -> None:
    checks.choice(name, "reduction", reduction, ("mean", "sum", "none", *more))
    if normalizer is None:
        return
    if reduction != "mean":
        sentence = f"normalizer needs reduction='mean', which it divides by, got reduction={reduction!r}"
        checks.fail(OptionError, name, sentence)
    if not isinstance(normalizer, Tensor):
        checks.positive(name, "normalizer", normalizer)
        return
    if normalizer.dim() != 0:
        got = checks.shape(normalizer)
        checks.fail(ShapeError, name, f"normalizer must be a number or a scalar tensor, got shape {got}")
    checks.same_device(name, "target", rows, normalizer=normalizer)
    checks.constant(name, normalizer=normalizer)


def check_target(name: str, target: Tensor, classes: int, ignore_index: int) -> None:
    if target.dtype != torch.int64:
        checks.fail(DtypeError, name, f"target must have dtype torch.int64, got {target.dtype}")
    checks.targets(name, target, classes, ignore_index)


def loss_option_samples(device: torch.device, classes: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, options, why) for the options that both losses have; class weights have the key "class_weight"."""
    weight = torch.rand(classes, device=device) + 0.5
    yield "sum", {"reduction": "sum"}, "no normalizer"
    yield "none", {"reduction": "none"}, "every token has its own upstream gradient"
    yield "class_weight", {"class_weight": weight}, "the mean divides by the summed weights"
    yield "label_smoothing", {"label_smoothing": 0.1}, "the whole row enters the loss"
    yield "label_smoothing_whole", {"label_smoothing": 1.0}, "nothing but the smoothed part is left"
    yield "z_loss", {"z_loss": 1e-2}, "the log-sum-exp enters the loss"
    yield "softcap", {"softcap": 3.0}, "tanh and its derivative"
    yield "large_softcap", {"softcap": 1e4, "z_loss": 1e-2}, "tanh of numbers near 0 must not cancel"
    count = {"normalizer": torch.tensor(37.0, device=device)}
    yield "normalizer", count, "an external count on the device (num_items_in_batch)"
    yield "normalizer_number", {"normalizer": 37.0}, "an external count as a number"
    everything = {"class_weight": weight, "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0}
    yield "everything", everything, "all options together"
    yield "everything_none", {**everything, "reduction": "none"}, "all options together, per token"


def targets_with_ignored(device: torch.device, classes: int, *shape: int, ignore_index: int = -100) -> Tensor:
    """Return random targets; about a third of them, but never all, are ignored."""
    target = integers(device, classes, *shape)
    target.view(-1)[1::3] = ignore_index
    return target


def metrics_of(
    target: Tensor, options: RowOptions, rows: Sequence[Any], reduction: str, inverse: Tensor | None,
    token_weight: Tensor | None = None,
) -> LossMetrics:  # fmt: skip
    """Return the metrics of a batch from moments, arg-max and entropy of its rows; inverse is what a mean multiplied
    their sum by."""
    moments, prediction, entropy = rows
    labels, entropy = target.reshape(-1), entropy.detach()
    counted = labels != options.ignore_index
    lse = moments[:, 0] + moments[:, 1].log()
    # In this order 0 · lse² is 0 even where the square overflows.
    penalty = options.z_loss * lse * lse
    if token_weight is not None:
        penalty = penalty * token_weight.reshape(-1)
    penalty = torch.where(counted, penalty, 0.0)
    hit = (counted & (prediction == labels)).to(moments.dtype)
    if reduction == "none":
        return LossMetrics(*(t.reshape(target.shape) for t in (penalty, hit, prediction, entropy)))
    count = counted.sum().clamp(min=1)
    z_loss = penalty.sum() if inverse is None else penalty.sum() * inverse
    return LossMetrics(z_loss, hit.sum() / count, prediction.reshape(target.shape), entropy.sum() / count)
