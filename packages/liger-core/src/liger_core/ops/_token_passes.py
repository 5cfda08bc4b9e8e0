# SPDX-License-Identifier: Apache-2.0
"""The row mathematics of per-token results, and its pure-PyTorch implementation.

For one row of logits a (after bias), classes v = 1 … V, weights w (1 by default):

    x = logit_scale · a, then softcap · tanh(x / softcap), then x / temperature
    m = max x,   d = Σ e^(x - m),   log p = (x - m) - log d

    entropy          H = -Σ p log p                  d H / d x = -p · (x - Σ p x)
    log_normalizer   L = m + log d                   d L / d x = p
    mean_log_prob    M = 1/V · Σ w log p             d M / d x = w/V - (Σ w / V) · p
    mean_logit       1/V · Σ w x                     w/V
    collision        S = Σ p²                        d S / d x = 2p · (p - S)
    log_prob         log p_k of chosen classes k     d log p_k / d x = e_k - p

So statistics of a row are a few sums, which blocks of classes add to one after the other, and every gradient has the
form

    d x = scatter(g) + (a + b · (x - m) + q · p) · p + c · w

with four coefficients (a, b, q, c) a row.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from liger_core.op import accumulator
from liger_core.ops._inputs import row_blocks

# Elements of logits that the pure-PyTorch passes hold in float32 at a time.
REFERENCE_BLOCK = 1 << 21
# Numbers a row in `Sums.moments`.
MOMENTS = 6
# e^LEAST is 0, so that a logarithm that is cut here changes nothing but 0 · ∞.
LEAST = -700.0


class RowOptions(NamedTuple):
    """The options that turn the logits of a row into x, and those of its loss; the defaults change nothing."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    class_weight: Tensor | None = None
    inverse_temperature: Tensor | None = None
    row_by_row: bool = False

    def of(self, rows: slice, classes: slice) -> Self:
        """Return the options for these rows and classes."""
        weight, temperature = self.class_weight, self.inverse_temperature
        return self._replace(
            class_weight=None if weight is None else weight[classes],
            inverse_temperature=None if temperature is None else temperature[rows],
        )

    def scale_and_cap(self, rows: slice) -> tuple[Tensor | float, Tensor | float | None]:
        """Return scale and cap divided by the temperature: c · tanh(s·a / c) / T = (c/T) · tanh((s/T)·a / (c/T))."""
        if self.inverse_temperature is None:
            return self.logit_scale, self.softcap
        inverse = self.inverse_temperature[rows, None]
        return self.logit_scale * inverse, None if self.softcap is None else self.softcap * inverse

    def changes(self) -> bool:
        """Whether x is anything but the logits."""
        return self.logit_scale != 1.0 or self.softcap is not None or self.inverse_temperature is not None

    def unit(self, like: Tensor) -> Tensor:
        """Return the derivative of x by the logit where nothing is capped, for each row."""
        if self.inverse_temperature is None:
            return like.new_full((like.shape[0],), self.logit_scale)
        return self.logit_scale * self.inverse_temperature

    def bend(self, x: Tensor) -> Tensor:
        """Return the derivative of x (rows, K) by the logits in that unit."""
        _, softcap = self.scale_and_cap(slice(None))
        return torch.ones_like(x) if softcap is None else 1.0 - (x / softcap).square()

    def weights(self, classes: int, dtype: torch.dtype) -> Tensor | float:
        """Return Σ w over all `classes` classes."""
        return float(classes) if self.class_weight is None else self.class_weight.sum(dtype=dtype)


class ResultOptions(NamedTuple):
    """The requested results of a row, in addition to its loss or log-probabilities."""

    with_entropy: bool = False
    with_log_normalizer: bool = False
    with_mean_log_prob: bool = False
    with_mean_logit: bool = False
    with_collision: bool = False
    with_prediction: bool = False

    @property
    def with_mean(self) -> bool:
        """Whether Σ w x is needed."""
        return self.with_mean_log_prob or self.with_mean_logit


class Sums(NamedTuple):
    """The sums of rows over the classes seen so far: m, d, Σ e·(x - m), Σ w·(x - anchor), Σ e², the anchor, and the
    class of m.

    The anchor is the median of the first three x. The columns of `moments` are all but the class; those that `extras`
    does not name are not computed.
    """

    moments: Tensor
    prediction: Tensor | None
    extras: ResultOptions


class Slopes(NamedTuple):
    """The tensors from which the gradient with respect to the logits is computed.

    counted   whether a row has a gradient at all
    moments   those of `Sums`
    terms     (N, 4): a, b, q and c
    classes   (N, K) the chosen ones, -1 where there is none
    selected  (N, K) their x
    gradient  (N, K) their upstream gradients g
    """

    counted: Tensor
    moments: Tensor
    terms: Tensor
    classes: Tensor
    selected: Tensor
    gradient: Tensor

    def of(self, rows: slice) -> "Slopes":
        return Slopes(*(t[rows] for t in self))


class TokenPasses:
    """The passes over one block of classes in pure PyTorch, a block of rows at a time; a backend brings the same ones.

    The block begins at class `first`; logits are (rows, classes in the block).
    """

    def statistics(self, logits: Tensor, counted: Tensor, options: RowOptions, sums: Sums, first: int) -> None:
        """Add a block of classes to the sums of each counted row; with first = 0 they begin there."""
        # PyTorch's order of a sum depends on the number of rows.
        for rows in row_blocks(logits, 1) if options.row_by_row else blocks(logits):
            x = capped(logits[rows], *options.scale_and_cap(rows))
            moments = sums.moments[rows]
            # A block without any class that is possible adds nothing.
            top = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)
            if first == 0:
                moments[:, 0], moments[:, 1:5] = top, 0.0
                # Not the first alone, which may be far from the others, so that their sum would cancel.
                # Column by column: a list of indices would be copied to the device, for which the host waits.
                anchor = torch.stack([x[:, min(column, x.shape[1] - 1)] for column in range(3)], -1).median(-1).values
                # Twice a number so large would be infinite.
                moments[:, 5] = torch.where(anchor.abs() < 1e30, anchor, 0.0)
            before = moments[:, 0].clone()
            if sums.prediction is not None:
                best = x.argmax(-1) + first
                sums.prediction[rows] = best if first == 0 else torch.where(top > before, best, sums.prediction[rows])
            top = torch.maximum(top, before)
            step = before - top
            shrink = step.exp()
            below = x - top[:, None]
            e = below.exp()
            moments[:, 0] = top
            if sums.extras.with_entropy:
                moments[:, 2] = (moments[:, 2] + moments[:, 1] * step.clamp(min=LEAST)) * shrink
                moments[:, 2] += (e * below.clamp(min=LEAST)).sum(-1)
            moments[:, 1] = moments[:, 1] * shrink + e.sum(-1)
            if sums.extras.with_mean:
                apart = x - moments[:, 5:]
                moments[:, 3] += (
                    apart.sum(-1) if options.class_weight is None else apart @ options.class_weight.to(x.dtype)
                )
            if sums.extras.with_collision:
                moments[:, 4] = moments[:, 4] * shrink.square() + e.square().sum(-1)

    def selected(self, logits: Tensor, index: Tensor, options: RowOptions, out: Tensor, first: int) -> None:
        """Write out[n, k] = x[n, index[n, k]] where that class is in the block."""
        inside, local = _local(index, first, logits.shape[1])
        x = capped(logits.gather(-1, local), *options.scale_and_cap(slice(None)))
        out.copy_(torch.where(inside, x, out))

    def derivative(self, logits: Tensor, slopes: Slopes, options: RowOptions, out: Tensor, first: int) -> None:
        """Write out = (scatter(g) + (a + b · (x - m) + q · p) · p + c · w) · d x / d logits.

        Rows that are not counted get 0; out may be logits.
        """
        for rows in blocks(logits):
            block = slopes.of(rows)
            x = capped(logits[rows], *options.scale_and_cap(rows))
            below, total = x - block.moments[:, :1], block.moments[:, 1:2]
            a, b, q, c = block.terms.split(1, -1)
            p = below.exp() / total
            slope = (a + b * below.clamp(min=LEAST) + q * p) * p
            slope += c if options.class_weight is None else c * options.class_weight.to(slope.dtype)
            inside, local = _local(block.classes, first, logits.shape[1])
            slope.scatter_add_(-1, local, torch.where(inside, block.gradient, 0.0))
            scale, softcap = options.scale_and_cap(rows)
            slope = slope * scale
            if softcap is not None:
                slope = slope * (1.0 - (x / softcap).square())
            out[rows] = torch.where(block.counted[:, None], slope, 0.0).to(out.dtype)

    def exponentials(
        self, logits: Tensor, counted: Tensor, options: RowOptions, moments: Tensor, total: Tensor, first: int
    ) -> None:
        """Add a block to the sums m and d, overwrite it by e^(x - m) · 1/s · d x / d logits, where s is the scale of x,
        and multiply those rows of `total` (rows, width) whose m has risen by e^(m before - m).

        Rows that are not counted get 0; with first = 0 the sums begin, and `total` is not read.
        """
        before = moments[:, 0].clone()
        self.statistics(logits, counted, options, Sums(moments, None, ResultOptions()), first)
        top = moments[:, 0]
        if first:
            total.mul_(torch.where(counted, (before - top).exp(), 1.0)[:, None])
        for rows in blocks(logits):
            x = capped(logits[rows], *options.scale_and_cap(rows))
            slope = (x - top[rows, None]).exp() * options.of(rows, slice(None)).bend(x)
            logits[rows] = torch.where(counted[rows, None], slope, 0.0).to(logits.dtype)

    def combined(
        self, out: Tensor, total: Tensor, factor: Tensor, weight: Tensor, index: Tensor, slope: Tensor
    ) -> None:
        """Write out = factor · total + Σ_k slope_k · weight[index_k] for each row, rounded once; out may be total.

        Classes that are not in weight add nothing; index and slope are (rows, K).
        """
        inside, local = _local(index, 0, weight.shape[0])
        slope = torch.where(inside, slope, 0.0)
        for rows in blocks(total):
            value = total[rows] * factor[rows, None]
            for k in range(index.shape[1] if weight.shape[0] else 0):
                value.addcmul_(weight.index_select(0, local[rows, k]), slope[rows, k, None])
            out[rows] = value


def blocks(tensor: Tensor) -> list[slice]:
    return row_blocks(tensor, REFERENCE_BLOCK)


def _local(index: Tensor, first: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the classes that are in a block, and their positions there, 0 for others."""
    local = index - first
    inside = (local >= 0) & (local < classes)
    return inside, torch.where(inside, local, 0)


def capped(logits: Tensor, scale: Tensor | float, softcap: Tensor | float | None) -> Tensor:
    """Return softcap · tanh(scale · logits / softcap), or scale · logits without a cap, in float32 or float64."""
    x = logits.to(accumulator(logits.dtype))
    x = x if not isinstance(scale, Tensor) and scale == 1.0 else x * scale
    return x if softcap is None else torch.tanh(x / softcap) * softcap
