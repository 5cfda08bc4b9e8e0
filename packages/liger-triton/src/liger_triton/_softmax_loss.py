# SPDX-License-Identifier: Apache-2.0
"""The row passes of the losses in Triton: statistics and gradient of one row of logits by one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.ops._softmax_loss import RowResults
from liger_core.ops._token_passes import RowOptions
from liger_triton._constants import LN2, LOG2E, LOWEST
from liger_triton._logits import GRADIENT, STATISTICS, Shape, capped, grown, met, through_cap
from liger_triton._token_passes import TritonTokenPasses
from liger_triton.launch import VECTOR, Launcher, cdiv, fuses, power_of_two, processors, rows_of

SCALE_BLOCK = 4096
# Losses that the one program of the mean adds at a time.
MEAN_BLOCK = 4096
# Programs of the scaling per multiprocessor: few enough to find in 5 µs that there is nothing to scale.
SCALE_PROGRAMS = 8


def both_shape(width: int) -> Shape:
    """Return the shape of the kernel that computes statistics and gradient in place.

    On one H200 in bfloat16, counted as one read and one write, it reaches these shares of the bandwidth of a copy: .84
    at 32000 and 40960 columns, .86 at 65536, .77 at 128256, .73 at 163840. The fewer rows are in flight, the more of
    the second read comes from the L2 cache (if none does: .67); long blocks keep enough loads in flight for that. 2048
    columns on 8 warps reach .65 at every width.
    """
    if width <= 49152:
        return Shape(8192, 16, 3)
    return Shape(16384, 32) if width <= 98304 else Shape(32768, 32, 3)


class TritonPasses(TritonTokenPasses):
    """One program a row. The second read of a row comes from the L2 cache."""

    def losses(
        self, logits: Tensor, target: Tensor, results: RowResults, options: RowOptions, row_factor: Tensor | None,
        gradient: bool,
    ) -> None:  # fmt: skip
        rows, width = logits.shape
        logits = logits if gradient else rows_of(logits)
        target, options = target.contiguous(), _contiguous(options)
        shape = both_shape(width) if gradient else STATISTICS
        block = min(shape.block, power_of_two(width))
        loss_launch(
            (rows,), logits, target, options.class_weight, row_factor, results.loss, results.moments,
            results.prediction, results.entropy,
            logits.stride(0), row_factor.stride(0) if row_factor is not None else 0, width, *_scalars(options),
            HAS_WEIGHT=options.class_weight is not None, HAS_FACTOR=row_factor is not None,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SMOOTHING=options.label_smoothing > 0,
            KEEPS_LOWEST=options.softcap is None and options.logit_scale == 1.0,
            PREDICTION=results.prediction is not None, ENTROPY=results.entropy is not None,
            GRADIENT=gradient, BLOCK=block, VECTOR=min(VECTOR, block), STAGES=shape.stages, num_warps=shape.warps,
            enable_fp_fusion=fuses(block),
        )  # fmt: skip

    def gradients(
        self, logits: Tensor, target: Tensor, statistics: Tensor, row_factor: Tensor, options: RowOptions, out: Tensor
    ) -> None:
        rows, width = logits.shape
        logits, target, options = rows_of(logits), target.contiguous(), _contiguous(options)
        block = min(GRADIENT.block, power_of_two(width))
        gradient_launch(
            (rows, cdiv(width, block)), logits, target, options.class_weight, row_factor, statistics, out,
            logits.stride(0), out.stride(0), row_factor.stride(0), width, *_scalars(options), _weight_sum(options),
            HAS_WEIGHT=options.class_weight is not None, HAS_SOFTCAP=options.softcap is not None,
            HAS_SMOOTHING=options.label_smoothing > 0,
            BLOCK=block, num_warps=GRADIENT.warps,
        )  # fmt: skip

    def mean(
        self, losses: Tensor, target: Tensor, options: RowOptions, divide: Tensor | None, mean: Tensor, inverse: Tensor
    ) -> None:
        target, options = target.contiguous(), _contiguous(options)
        block = min(MEAN_BLOCK, power_of_two(losses.shape[0]))
        mean_launch(
            (1,), losses, target, options.class_weight, divide, mean, inverse, losses.shape[0], options.ignore_index,
            HAS_WEIGHT=options.class_weight is not None, HAS_DIVIDE=divide is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip

    def scaled(self, tensor: Tensor, scale: Tensor, out: Tensor, add: bool = False) -> None:
        size = tensor.numel()
        grid = (min(cdiv(size, SCALE_BLOCK), SCALE_PROGRAMS * processors(tensor.device)),)
        scale_launch(grid, tensor, scale, out, size, ADD=add, IN_PLACE=out is tensor, BLOCK=SCALE_BLOCK, num_warps=8)


PASSES = TritonPasses()


def _contiguous(options: RowOptions) -> RowOptions:
    weight = options.class_weight
    return options if weight is None or weight.is_contiguous() else options._replace(class_weight=weight.contiguous())


def _scalars(options: RowOptions) -> tuple[int, float, float, float, float]:
    return options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 1.0, options.logit_scale


def _weight_sum(options: RowOptions) -> Tensor | None:
    """Σ w on the device, where label smoothing needs it."""
    if options.class_weight is None or not options.label_smoothing:
        return None
    return options.class_weight.sum(dtype=torch.float32)


@triton.jit
def row_gradient(
    x, column, label, top, inverse, hard, share, factor, class_weight, label_smoothing, width, mask,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
):  # fmt: skip
    """factor · d loss / d x for a block of columns: softmax · share, less `hard` at the label, less the smoothed
    weights.

    inverse is 1 / Σ e^(x - top).
    """
    p = tl.exp2((x - top) * LOG2E) * inverse
    d = p * share
    d = tl.where(column == label, d - hard, d)
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            d -= label_smoothing / width * tl.load(class_weight + column, mask=mask, other=0.0).to(tl.float32)
        else:
            d -= label_smoothing / width
    return d * factor


@triton.jit
def loss_kernel(
    logits, target, class_weight, row_factor, loss, statistics, prediction, entropy, row_stride, factor_stride, width,
    ignore_index, label_smoothing, z_loss, softcap, logit_scale, HAS_WEIGHT: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, KEEPS_LOWEST: tl.constexpr, PREDICTION: tl.constexpr,
    ENTROPY: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program takes one row: its statistics, loss and metrics, and, if asked, its gradient over the logits.

    KEEPS_LOWEST: x is the logit itself, so a masked lane is -∞. Otherwise x is a product, and masking it stops the
    compiler from fusing it, unrounded, into x - m, where m is already rounded.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    lane = tl.arange(0, BLOCK)
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(loss + row, 0.0)
        tl.store(statistics + 2 * row, 0.0)
        tl.store(statistics + 2 * row + 1, 1.0)
        if PREDICTION:
            tl.store(prediction + row, -1)
        if ENTROPY:
            tl.store(entropy + row, 0.0)
        if GRADIENT:
            for start in tl.range(0, width, BLOCK, num_stages=STAGES):
                column = start + lane
                tl.store(base + column, tl.zeros((BLOCK,), dtype=logits.dtype.element_ty), mask=column < width)
        return
    in_range = (label >= 0) & (label < width)
    safe = tl.where(in_range, label, 0)
    chosen = tl.where(in_range, capped(tl.load(base + safe), logit_scale, softcap, HAS_SOFTCAP), 0.0)
    # The smoothed loss adds distances from here; an infinite loss stays infinite.
    anchor = tl.where(tl.abs(chosen) < float("inf"), chosen, 0.0)
    m = tl.full((BLOCK // VECTOR,), LOWEST, dtype=tl.float32)
    d = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
    weights = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
    distance = tl.zeros((BLOCK // VECTOR,), dtype=tl.float32)
    best = tl.zeros((BLOCK // VECTOR,), dtype=tl.int32)
    offset = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        column = start + offset
        mask = column < width
        loaded = tl.load(
            base + column, mask=mask, other=float("-inf"), eviction_policy="evict_last" if GRADIENT else ""
        )
        x = capped(loaded, logit_scale, softcap, HAS_SOFTCAP)
        if HAS_SMOOTHING:
            if HAS_WEIGHT:
                w = tl.load(class_weight + column, mask=mask, other=0.0).to(tl.float32)
                weights += tl.sum(w, 1)
                weighted += tl.sum(tl.where(mask, w * (x - anchor), 0.0), 1)
            else:
                weighted += tl.sum(tl.where(mask, x - anchor, 0.0), 1)
        if not KEEPS_LOWEST:
            x = tl.where(mask, x, float("-inf"))
        before = m
        m, d, distance, _ = grown(m, d, distance, d, x, ENTROPY, False)
        if PREDICTION:
            best = tl.where(m > before, start + tl.arange(0, BLOCK // VECTOR) * VECTOR + tl.argmax(x, 1), best)
    top, exp_sum, distance, _ = met(m, d, distance, d, ENTROPY, False)
    log2_sum = tl.log2(exp_sum)
    log_sum = log2_sum * LN2
    log_sum_exp = top + log_sum
    hard = 1.0 - label_smoothing
    if HAS_WEIGHT:
        hard = hard * tl.load(class_weight + safe).to(tl.float32)
    value = hard * (log_sum - (chosen - top))
    share = hard + 2.0 * z_loss * log_sum_exp
    if HAS_SMOOTHING:
        smooth = label_smoothing / width
        if HAS_WEIGHT:
            weight_sum = tl.sum(weights, 0)
            value += smooth * (weight_sum * (log_sum - (anchor - top)) - tl.sum(weighted, 0))
            share += smooth * weight_sum
        else:
            value += smooth * (width * (log_sum - (anchor - top)) - tl.sum(weighted, 0))
            share += label_smoothing
    # Not 0 · ∞ where there is no z-loss and the square overflows.
    value += tl.where(z_loss == 0.0, 0.0, z_loss * log_sum_exp * log_sum_exp)
    value = tl.where(in_range, value, float("nan"))
    tl.store(loss + row, value)
    tl.store(statistics + 2 * row, top)
    tl.store(statistics + 2 * row + 1, exp_sum)
    if PREDICTION:
        tl.store(prediction + row, tl.min(tl.where(m == top, best, width), 0).to(tl.int64))
    if ENTROPY:
        tl.store(entropy + row, (log2_sum - distance / exp_sum) * LN2)
    if GRADIENT:
        factor = tl.where(in_range, 1.0, float("nan"))
        if HAS_FACTOR:
            factor = factor * tl.load(row_factor + row * factor_stride).to(tl.float32)
        for start in tl.range(0, width, BLOCK):
            column = start + lane
            mask = column < width
            loaded = tl.load(base + column, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.where(mask, capped(loaded, logit_scale, softcap, HAS_SOFTCAP), 0.0)
            g = row_gradient(
                x, column, safe, top, 1.0 / exp_sum, hard, share, factor, class_weight, label_smoothing, width, mask,
                HAS_WEIGHT, HAS_SMOOTHING,
            )  # fmt: skip
            g = through_cap(g, loaded, logit_scale, softcap, HAS_SOFTCAP)
            tl.store(base + column, g.to(logits.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def gradient_kernel(
    logits, target, class_weight, row_factor, statistics, out, row_stride, out_stride, factor_stride, width,
    ignore_index, label_smoothing, z_loss, softcap, logit_scale, weight_sum,
    HAS_WEIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one block of one row's gradient, from the statistics that the forward pass kept."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(out + row * out_stride + column, tl.zeros((BLOCK,), dtype=out.dtype.element_ty), mask=mask)
        return
    in_range = (label >= 0) & (label < width)
    safe = tl.where(in_range, label, 0)
    top = tl.load(statistics + 2 * row)
    exp_sum = tl.load(statistics + 2 * row + 1)
    hard = 1.0 - label_smoothing
    if HAS_WEIGHT:
        hard = hard * tl.load(class_weight + safe).to(tl.float32)
    share = hard + 2.0 * z_loss * (top + tl.log2(exp_sum) * LN2)
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            share += label_smoothing / width * tl.load(weight_sum)
        else:
            share += label_smoothing
    factor = tl.where(in_range, 1.0, float("nan")) * tl.load(row_factor + row * factor_stride).to(tl.float32)
    loaded = tl.load(logits + row * row_stride + column, mask=mask, other=0.0)
    x = tl.where(mask, capped(loaded, logit_scale, softcap, HAS_SOFTCAP), 0.0)
    g = row_gradient(
        x, column, safe, top, 1.0 / exp_sum, hard, share, factor, class_weight, label_smoothing, width, mask,
        HAS_WEIGHT, HAS_SMOOTHING,
    )  # fmt: skip
    g = through_cap(g, loaded, logit_scale, softcap, HAS_SOFTCAP)
    tl.store(out + row * out_stride + column, g.to(out.dtype.element_ty), mask=mask)


@triton.jit
def mean_kernel(
    loss, target, class_weight, divide, mean, inverse, rows, ignore_index, HAS_WEIGHT: tl.constexpr,
    HAS_DIVIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program adds all losses, and the weights of the targets that count, in the same order every time."""
    losses = tl.zeros((BLOCK,), dtype=tl.float32)
    weights = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < rows
        losses += tl.load(loss + row, mask=mask, other=0.0)
        if not HAS_DIVIDE:
            label = tl.load(target + row, mask=mask, other=ignore_index)
            counted = label != ignore_index
            if HAS_WEIGHT:
                # The loss of a target below 0 or beyond the classes is NaN, whatever is loaded for it.
                weights += tl.load(class_weight + label, mask=counted & (losses == losses), other=0.0).to(tl.float32)
            else:
                weights += counted.to(tl.float32)
    if HAS_DIVIDE:
        factor = 1.0 / tl.load(divide)
    else:
        weight = tl.sum(weights, 0)
        factor = 1.0 / tl.where(weight == 0.0, 1.0, weight)
    tl.store(inverse, factor)
    tl.store(mean, tl.sum(losses, 0) * factor)


@triton.jit
def scale_kernel(tensor, scale, out, size, ADD: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """The programs walk over all blocks and scale them by the scalar, in float32, rounded once; with ADD they add them
    to out."""
    factor = tl.load(scale)
    if IN_PLACE:  # noqa: SIM102  (a constexpr and a value do not share one condition)
        # The upstream gradient of a loss is nearly always 1, which leaves nothing to do.
        if factor == 1.0:
            return
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < size
        value = tl.load(tensor + index, mask=mask, other=0.0).to(tl.float32) * factor
        if ADD:
            value += tl.load(out + index, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + index, value.to(out.dtype.element_ty), mask=mask)


loss_launch = Launcher(loss_kernel)
gradient_launch = Launcher(gradient_kernel)
mean_launch = Launcher(mean_kernel)
scale_launch = Launcher(scale_kernel)
