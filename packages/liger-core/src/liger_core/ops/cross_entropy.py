# SPDX-License-Identifier: Apache-2.0
"""cross_entropy: the loss of logits that already exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError, TargetError
from liger_core.kernels import Kernel, Outputs, differentiable, reference_kernel
from liger_core.op import Misuse, Sample, Work, Workload, op
from liger_core.ops._inputs import CLASSES, ROWS, accumulator, integers, normal, workload
from liger_core.ops._softmax_loss import LossMetrics, RowOptions, RowPasses, RowResults, TorchPasses, denominator, row_results

Reduction = Literal["mean", "sum", "none"]


def check_loss_options(
    name: str,
    target: Tensor,
    classes: int,
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    normalizer: Tensor | float | None,
    weight_name: str,
) -> None:
    """The checks of the options that both losses have."""
    checks.choice(name, "reduction", reduction, ("mean", "sum", "none"))
    checks.fraction(name, "label_smoothing", label_smoothing)
    checks.not_negative(name, "z_loss", z_loss)
    if softcap is not None:
        checks.positive(name, "softcap", softcap)
    if normalizer is not None and reduction != "mean":
        checks.fail(OptionError, name, f"normalizer needs reduction='mean', which it divides by, got reduction={reduction!r}")
    if isinstance(normalizer, Tensor):
        if normalizer.dim() != 0:
            checks.fail(ShapeError, name, f"normalizer must be a number or a scalar tensor, got shape {checks.shape(normalizer)}")
        checks.same_device(name, "target", target, normalizer=normalizer)
    elif normalizer is not None:
        checks.positive(name, "normalizer", normalizer)
    if target.dtype != torch.int64:
        checks.fail(DtypeError, name, f"target must have dtype torch.int64, got {target.dtype}")
    if class_weight is not None:
        checks.floating(name, **{weight_name: class_weight})
        if tuple(class_weight.shape) != (classes,):
            checks.fail(ShapeError, name, f"{weight_name} must have shape ({classes},), one per class, got {checks.shape(class_weight)}")
    checks.constant(name, normalizer=normalizer, **{weight_name: class_weight})


def check(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    return_metrics: bool = False,
) -> None:
    checks.floating("cross_entropy", logits=logits)
    checks.tensor("cross_entropy", "target", target)
    checks.at_least_one_dimension("cross_entropy", "logits", logits)
    if target.shape != logits.shape[:-1]:
        wanted = tuple(logits.shape[:-1])
        checks.fail(
            ShapeError,
            "cross_entropy",
            f"target must have shape {wanted} to match logits {checks.shape(logits)}, got {checks.shape(target)}",
        )
    if logits.shape[-1] == 0:
        checks.fail(ShapeError, "cross_entropy", f"logits must have at least one class, got {checks.shape(logits)}")
    checks.same_device("cross_entropy", "logits", logits, target=target, weight=weight)
    check_loss_options("cross_entropy", target, logits.shape[-1], weight, label_smoothing, z_loss, softcap, reduction, normalizer, "weight")
    checks.targets("cross_entropy", target, logits.shape[-1], ignore_index)


def loss_option_samples(device: torch.device, rows: int, classes: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, options, why) for the options that both losses have; class weights are under the key "class_weight"."""
    weight = torch.rand(classes, device=device) + 0.5
    yield "sum", {"reduction": "sum"}, "no normaliser"
    yield "none", {"reduction": "none"}, "every token has its own upstream gradient"
    yield "class_weight", {"class_weight": weight}, "the mean divides by the summed weights"
    yield "label_smoothing", {"label_smoothing": 0.1}, "the whole row enters the loss"
    yield "label_smoothing_whole", {"label_smoothing": 1.0}, "nothing but the smoothed part is left"
    yield "z_loss", {"z_loss": 1e-2}, "the log-sum-exp enters the loss"
    yield "softcap", {"softcap": 3.0}, "tanh and its derivative"
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


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def n(*shape: int, scale: float = 1.0) -> Tensor:
        return normal(device, dtype, *shape, scale=scale)

    yield Sample("one_block", (n(4, 64), integers(device, 64, 4)), why="the vocabulary is one block")
    yield Sample("odd_width", (n(5, 101), integers(device, 101, 5)), why="mask on the last block")
    yield Sample("several_blocks", (n(3, 9000, scale=2), integers(device, 9000, 3)), why="the row is longer than one block")
    yield Sample("leading_shape", (n(2, 3, 40), integers(device, 40, 2, 3)), why="any leading shape")
    yield Sample("one_token", (n(40), integers(device, 40)), why="no leading shape")
    yield Sample("ignored_rows", (n(7, 50), targets_with_ignored(device, 50, 7)), why="ignored rows get no loss and zero gradient")
    target = targets_with_ignored(device, 50, 7, ignore_index=3)
    yield Sample("ignore_index", (n(7, 50), target), {"ignore_index": 3}, why="a class can be the ignored one")
    for name, options, why in loss_option_samples(device, 6, 70):
        kwargs = dict(options)
        if "class_weight" in kwargs:
            kwargs["weight"] = kwargs.pop("class_weight")
        yield Sample(name, (n(6, 70), targets_with_ignored(device, 70, 6)), kwargs, why=why, frozen=("weight", "normalizer"))
    all_ignored = torch.full((4,), -100, device=device)
    yield Sample("all_ignored", (n(4, 30), all_ignored), why="the mean of nothing is 0, not NaN")
    yield Sample("empty", (n(0, 30), integers(device, 30, 0)), why="no rows: the loss is 0 and nothing is launched")
    yield Sample("peaked", (n(4, 60, scale=20), integers(device, 60, 4)), why="softmax close to one class")
    yield Sample("common_offset", (n(4, 60) + 3e4, integers(device, 60, 4)), why="what logits have in common cancels")
    options = {"label_smoothing": 0.1, "weight": torch.rand(60, device=device) + 0.5, "return_metrics": True}
    logits = n(4, 60) - 3e4
    yield Sample("common_offset_smoothed", (logits, integers(device, 60, 4)), options, why="also in what a row adds", frozen=("weight",))
    equal = torch.full((3, 40), 3e4, device=device, dtype=dtype)
    yield Sample("equal_logits", (equal, integers(device, 40, 3)), why="the loss is the logarithm of the number of classes")
    masked = n(4, 60)
    masked[:, 40:] = -torch.inf
    yield Sample("infinite_logits", (masked, integers(device, 40, 4)), why="masked classes have probability 0 and gradient 0")
    yield Sample("one_class", (n(4, 1), integers(device, 1, 4)), why="a single column: loss 0")
    yield Sample("strided_rows", (n(5, 160)[:, :80], integers(device, 80, 5)), why="rows are read through their stride")
    yield Sample("transposed", (n(40, 6).t(), integers(device, 40, 6)), why="the last dimension is not contiguous")
    sure = n(5, 45)
    sure[torch.arange(5), torch.arange(5) * 7] += 7
    target = torch.tensor([0, 7, 3, -100, 28], device=device)
    yield Sample(
        "metrics", (sure, target), {"return_metrics": True, "z_loss": 1e-3}, why="z-loss, accuracy, arg-max and entropy of the tokens"
    )
    options = {"return_metrics": True, "reduction": "none"}
    yield Sample("metrics_none", (sure, target), options, why="the metrics of each token")


def misuses(device: torch.device) -> Iterator[Misuse]:
    x, t = torch.zeros(3, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    yield Misuse("target_shape", (x, t[:2]), {}, ShapeError, "cross_entropy: target must have shape (3,) to match logits (3, 8), got (2,)")
    yield Misuse("target_dtype", (x, t.int()), {}, DtypeError, "cross_entropy: target must have dtype torch.int64, got torch.int32")
    yield Misuse(
        "weight_shape",
        (x, t),
        {"weight": torch.ones(7, device=device)},
        ShapeError,
        "cross_entropy: weight must have shape (8,), one per class, got (7,)",
    )
    yield Misuse(
        "reduction", (x, t), {"reduction": "avg"}, OptionError, "cross_entropy: reduction must be one of 'mean', 'sum', 'none', got 'avg'"
    )
    for name, options, message in (
        ("smoothing", {"label_smoothing": 1.5}, "label_smoothing must be a finite number in [0, 1], got 1.5"),
        ("smoothing_nan", {"label_smoothing": float("nan")}, "label_smoothing must be a finite number in [0, 1], got nan"),
        ("z_loss_nan", {"z_loss": float("nan")}, "z_loss must be a finite number ≥ 0, got nan"),
        ("softcap_infinite", {"softcap": float("inf")}, "softcap must be a finite number > 0, got inf"),
        ("ignore_index", {"ignore_index": -1.5}, "ignore_index must be an integer, got -1.5"),
    ):
        yield Misuse(name, (x, t), options, OptionError, f"cross_entropy: {message}")
    yield Misuse("target_list", (x, [0, 1, 2]), {}, DtypeError, "cross_entropy: target must be a tensor, got list")
    yield Misuse("no_logits", (None, t), {}, DtypeError, "cross_entropy: logits must be a tensor, got NoneType")
    yield Misuse("weight_list", (x, t), {"weight": [1.0] * 8}, DtypeError, "cross_entropy: weight must be a tensor, got list")
    yield Misuse("softcap", (x, t), {"softcap": 0.0}, OptionError, "cross_entropy: softcap must be a finite number > 0, got 0.0")
    yield Misuse(
        "normalizer",
        (x, t),
        {"reduction": "sum", "normalizer": 3.0},
        OptionError,
        "cross_entropy: normalizer needs reduction='mean', which it divides by, got reduction='sum'",
    )
    yield Misuse(
        "trainable_weight",
        (x, t),
        {"weight": torch.ones(8, device=device, requires_grad=True)},
        OptionError,
        "cross_entropy: weight must not require a gradient, since the op does not define one; pass weight.detach()",
    )
    yield Misuse(
        "device",
        (x, torch.zeros(3, dtype=torch.int64, device="meta")),
        {},
        DeviceError,
        f"cross_entropy: target must be on {x.device} like logits, got meta",
    )
    if device.type == "cpu":
        wrong = torch.tensor([0, 8, 1])
        yield Misuse(
            "target_range", (x, wrong), {}, TargetError, "cross_entropy: every target must be in [0, 8) or ignore_index=-100, got 8"
        )


def workloads() -> Iterator[Workload]:
    def shape(rows: int, classes: int, axis: str = "", quick: bool = False) -> Workload:
        def make(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (normal(device, dtype, rows, classes), integers(device, classes, rows)), {}

        return workload(make, axis, quick, N=rows, V=classes)

    yield shape(256, 8192, quick=True)
    # On a GPU the first is ruled by the host.
    for rows, classes in ((1024, 8192), (8192, 40960), (8192, 128256), (8192, 163840)):
        yield shape(rows, classes)
    for rows in ROWS[:-2]:
        yield shape(rows, 128256, "N")
    for classes in CLASSES:
        yield shape(8192, classes, "V")


def work(logits: Tensor, target: Tensor, **options: Any) -> Work:
    size = logits.numel() * logits.element_size()
    return Work(size, 3 * size)


class Losses(NamedTuple):
    """The differentiable functions of a backend: losses of rows, their sum or mean, and that with the rows' results."""

    rows: Callable[..., Any]
    total: Callable[..., Any]
    told: Callable[..., Any]


def losses(passes: RowPasses, kernel: Callable[..., Kernel]) -> Losses:
    """The losses of (rows, classes) logits for a backend's row passes."""

    def options_of(
        class_weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None
    ) -> RowOptions:
        return RowOptions(ignore_index, label_smoothing, z_loss, softcap, 1.0, class_weight)

    def allocate(logits: Tensor, target: Tensor, *options: Any) -> Outputs:
        return row_results(logits, options[-1])

    def launch(*args: Any) -> None:
        loss, statistics, prediction, entropy, logits, target, *options, _ = args
        if logits.shape[0]:
            passes.losses(logits, target, RowResults(loss, statistics, prediction, entropy), options_of(*options), None, False)

    def allocate_backward(grad_loss: Tensor, logits: Tensor, *rest: Any) -> Outputs:
        return (torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),)

    def launch_backward(grad_logits: Tensor, grad_loss: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, *rest: Any) -> None:
        *options, _ = rest
        if logits.shape[0]:
            passes.gradients(logits, target, statistics, grad_loss, options_of(*options), grad_logits)

    def allocate_total(logits: Tensor, target: Tensor, divide: Tensor | None, *rest: Any) -> Outputs:
        *_, mean, metrics = rest
        statistics, prediction, entropy = row_results(logits, metrics)[1:]
        return statistics.new_empty(()), statistics, prediction, entropy, statistics.new_empty(()) if mean else None

    def launch_total(*args: Any) -> None:
        total, statistics, prediction, entropy, inverse, logits, target, divide, *rest, mean, _ = args
        options, rows = options_of(*rest), statistics.new_empty(statistics.shape[0])
        if logits.shape[0]:
            passes.losses(logits, target, RowResults(rows, statistics, prediction, entropy), options, None, False)
        if mean:
            passes.mean(rows, target, options, divide, total, inverse)
        else:
            torch.sum(rows, dim=0, out=total)

    def launch_total_backward(
        grad_logits: Tensor, grad_loss: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, inverse: Tensor | None, *rest: Any
    ) -> None:
        factor = grad_loss if inverse is None else grad_loss * inverse
        launch_backward(grad_logits, factor.expand(statistics.shape[0]), logits, target, statistics, *rest)

    scalars = "Tensor? class_weight, int ignore_index, float label_smoothing, float z_loss, float? softcap"
    results = "(Tensor loss, Tensor statistics, Tensor? prediction, Tensor? entropy"
    backward = f"Tensor grad_loss, Tensor logits, Tensor target, Tensor statistics, {scalars}, bool[1] needs"
    rows = differentiable(
        kernel(f"cross_entropy(Tensor logits, Tensor target, {scalars}, bool metrics) -> {results})", allocate, launch),
        kernel(f"cross_entropy_backward({backward}) -> (Tensor grad_logits)", allocate_backward, launch_backward),
        public=4,
    )
    forward = kernel(
        f"cross_entropy_total(Tensor logits, Tensor target, Tensor? divide, {scalars}, bool mean, bool metrics) -> {results}, Tensor? inverse)",
        allocate_total,
        launch_total,
    )
    backward = backward.replace("Tensor statistics,", "Tensor statistics, Tensor? inverse,")
    derivative = kernel(f"cross_entropy_total_backward({backward}) -> (Tensor grad_logits)", allocate_backward, launch_total_backward)
    return Losses(rows, differentiable(forward, derivative), differentiable(forward, derivative, public=5))


def reduced(
    functions: Losses,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    normalizer: Tensor | float | None,
    return_metrics: bool,
) -> Any:
    """cross_entropy made of a backend's losses."""
    flat, labels = logits, target
    # A view of the same shape costs 1 µs a tensor, and a node of the autograd graph.
    if logits.dim() != 2:
        flat, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    options = (weight, ignore_index, label_smoothing, z_loss, softcap)
    if reduction == "none":
        loss, statistics, prediction, entropy = functions.rows(flat, labels, *options, return_metrics)
        loss = loss.reshape(target.shape)
        return (
            (loss, metrics_of(target, ignore_index, z_loss, statistics, prediction, entropy, reduction, None)) if return_metrics else loss
        )
    divide: Tensor | None = None
    if normalizer is not None and reduction == "mean":
        divide = denominator(labels, weight, ignore_index, normalizer, accumulator(flat.dtype))
    if not return_metrics:
        return functions.total(flat, labels, divide, *options, reduction == "mean", False)
    loss, statistics, prediction, entropy, inverse = functions.told(flat, labels, divide, *options, reduction == "mean", True)
    return loss, metrics_of(target, ignore_index, z_loss, statistics, prediction, entropy, reduction, inverse)


def metrics_of(
    target: Tensor,
    ignore_index: int,
    z_loss: float,
    statistics: Tensor,
    prediction: Tensor,
    entropy: Tensor,
    reduction: str,
    inverse: Tensor | None,
    token_weight: Tensor | None = None,
) -> LossMetrics:
    """The metrics of a batch from the per-row results of a pass."""
    labels = target.reshape(-1)
    counted = labels != ignore_index
    lse = statistics.sum(-1)
    # In this order 0 · lse² is 0 even where the square overflows.
    penalty = z_loss * lse * lse
    if token_weight is not None:
        penalty = penalty * token_weight.reshape(-1)
    penalty = torch.where(counted, penalty, 0.0)
    hit = (counted & (prediction == labels)).to(statistics.dtype)
    if reduction == "none":
        return LossMetrics(*(t.reshape(target.shape) for t in (penalty, hit, prediction, entropy)))
    count = counted.sum().clamp(min=1)
    total = penalty.sum() if inverse is None else penalty.sum() * inverse
    return LossMetrics(total, hit.sum() / count, prediction.reshape(target.shape), entropy.sum() / count)


_losses = losses(TorchPasses(), reference_kernel)


@op(check=check, samples=samples, misuses=misuses, workloads=workloads, work=work)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    return_metrics: bool = False,
) -> Any:
    """Cross entropy between logits and target classes.

        x    = softcap · tanh(logits / softcap)      (logits themselves without a softcap)
        lse  = log Σ exp(x)
        loss = (1 - label_smoothing) · w_t · (lse - x_t) + label_smoothing/V · Σ_c w_c (lse - x_c) + z_loss · lse²

    logits           (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
    target           (...)      int64 class indices, or ignore_index: no loss, zero gradient
    weight           (V,)       class weights w; 1 by default
    reduction        "mean" divides the sum by the summed weights of the counted targets (0 if none is counted), or by normalizer
    normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
    return_metrics   also return `LossMetrics`
    returns          float32 (float64 for float64): a scalar, or (...) for "none"

    A target outside [0, V) raises TargetError on the CPU; on other devices, where looking would stall the queue, its loss is NaN.
    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    z-loss: Chowdhery et al. 2022, arXiv:2204.02311; softcap: Gemma 2, arXiv:2408.00118.
    """
    return reduced(_losses, logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction, normalizer, return_metrics)
