# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is sharded over ranks: each has the rows of weight of its classes, and what the ranks exchange.

Every sum of a row over the classes is a few numbers, so that one all-gather of these a call merges the shards, whatever the options are:

    m = max m_r,   s_r = m_r - m,   d = Σ d_r e^s_r,   Σ e·(x - m) = Σ (t_r + d_r s_r) e^s_r,   Σ e² = Σ q_r e^2s_r

The gradient of weight stays where its rows are. That of hidden is a sum over all classes: the ranks add their parts, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.ops._token_passes import LEAST, MOMENTS, AskedOfTokens
from liger_core.private_torch import collectives as _c10d
from liger_core.private_torch import constant_when_traced, process_group


class Vocabulary(NamedTuple):
    """The classes that the rows of weight stand for: start, start + 1, … of `classes`; rows past these are padding.

    group      name of the process group that has all of them; None if this rank has
    scattered  the rows of hidden come in equal parts from the ranks, and each needs the gradient of its own only
    """

    group: str | None
    start: int
    classes: int
    scattered: bool = False

    def mine(self, rows: int) -> int:
        """How many rows of weight are classes."""
        return max(0, min(rows, self.classes - self.start))

    def usual(self) -> int:
        """Classes of a rank if they are spread evenly: what all ranks know alike."""
        return -(-self.classes // self.ranks())

    def ranks(self) -> int:
        """How many share the vocabulary."""
        return 1 if self.group is None else _size(self.group)

    def local(self, index: Tensor) -> Tensor:
        """Where a class is in this shard; elsewhere it is none of its rows."""
        return index - self.start if self.start else index


class Exchange(NamedTuple):
    """The columns that a rank gives for each row: moments, then the sum of class weights, x of one chosen class, the arg-max class."""

    vocab: Vocabulary
    asked: AskedOfTokens

    def merge(self, moments: Tensor, selected: Tensor, prediction: Tensor | None, weights: Tensor | float) -> None:
        """Make of the sums of this shard those of all, in place. `weights`: the sum of this shard's class weights."""
        if self.vocab.group is None or not moments.shape[0]:
            return
        bits = torch.int32 if moments.dtype == torch.float32 else torch.int64
        columns = [moments]
        if self.asked.with_mean:
            column = moments.new_empty(moments.shape[0], 1)
            columns.append(column.copy_(weights) if isinstance(weights, Tensor) else column.fill_(weights))
        # Several chosen classes take more than the moments do, and only one rank has x of each.
        single = selected.shape[1] == 1
        if single:
            columns.append(selected)
        if prediction is not None:
            # The bits of an integer, whatever number they would be.
            columns.append((prediction + self.vocab.start).to(bits).view(moments.dtype)[:, None])
        mine = torch.cat(columns, -1)
        every = _everyone(mine, self.vocab)
        if single:
            selected.copy_(every[:, :, -1 - (prediction is not None)].sum(0)[:, None])
        else:
            start_sum(selected, self.vocab)
            end_sum(selected, self.vocab)
        top, total, distance, weighted, squares, anchor = every[:, :, :MOMENTS].unbind(-1)
        highest = top.amax(0)
        step = top - highest
        shrink = step.exp()
        if prediction is not None:
            best = every[:, :, -1].contiguous().view(bits).to(prediction.dtype)
            prediction.copy_(torch.where(top == highest, best, self.vocab.classes).amin(0))
        moments[:, 0] = highest
        moments[:, 1] = (total * shrink).sum(0)
        moments[:, 2] = ((distance + total * step.clamp(min=LEAST)) * shrink).sum(0)
        if self.asked.with_mean:
            moments[:, 3] = (weighted + (anchor - anchor[0]) * every[:, :, MOMENTS]).sum(0)
        moments[:, 4] = (squares * shrink.square()).sum(0)
        moments[:, 5] = anchor[0]


def merge_divergence(moments: Tensor, temperature: float, hard: bool, vocab: Vocabulary) -> None:
    """Make of a shard's moments of two sides (liger_core/ops/_divergence.py) those of all, in place, but for Σ q · (h - h₀)."""
    every = _everyone(moments, vocab)
    highest, theirs = every[:, :, 0].amax(0), every[:, :, 2].amax(0)
    step = every[:, :, 0] - highest
    moments[:, 0], moments[:, 2] = highest, theirs
    moments[:, 1] = (every[:, :, 1] * step.exp()).sum(0)
    moments[:, 3] = (every[:, :, 3] * (every[:, :, 2] - theirs).exp()).sum(0)
    moments[:, 4] = torch.where(step == 0, every[:, :, 4], -torch.inf).amax(0)
    if hard:
        moments[:, 6] = (every[:, :, 6] * (step * temperature).exp()).sum(0)


def _everyone(mine: Tensor, vocab: Vocabulary) -> Tensor:
    """(ranks, …): what each rank has."""
    assert vocab.group is not None
    ranks = _size(vocab.group)
    gathered: Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(mine, ranks, vocab.group))
    return gathered.view(ranks, *mine.shape)


def start_sum(part: Tensor, vocab: Vocabulary) -> None:
    """Start to add up what each rank has, in place."""
    if vocab.group is not None:
        _c10d.all_reduce_(part, "sum", vocab.group)


def end_sum(part: Tensor, vocab: Vocabulary) -> None:
    """Make what comes after wait for that sum."""
    if vocab.group is not None:
        _c10d.wait_tensor(part)


class RowSum:
    """Adds up over the ranks what each has of the gradient of hidden; where a rank needs that of its own rows only, in half of the traffic.

    rows   of hidden
    index  those of them that the gradient has; None if it has all
    most   of those that come at once
    shared whether there are other ranks at all
    """

    def __init__(self, vocab: Vocabulary, rows: int, index: Tensor | None, most: int) -> None:
        self.vocab, self.rows, self.index, self.shared = vocab, rows, index, vocab.group is not None
        count = rows if index is None else index.shape[0]
        # All at once, and not so few of them that to send the others costs more than what it saves.
        self.scatters = vocab.scattered and count <= most and rows % vocab.ranks() == 0 and 2 * count >= rows > 0
        self.started: Tensor | None = None

    def start(self, out: Tensor) -> None:
        """Start to add up these rows, in place."""
        if not self.scatters:
            start_sum(out, self.vocab)
            return
        whole = out if self.index is None else out.new_zeros(self.rows, *out.shape[1:]).index_copy_(0, self.index, out)
        self.started = _c10d.reduce_scatter_tensor(whole, "sum", self.vocab.ranks(), self.vocab.group)

    def end(self, out: Tensor) -> None:
        """Make what comes after wait for that sum. Scattered rows of other ranks keep what this rank has."""
        if self.started is None:
            end_sum(out, self.vocab)
            return
        assert self.vocab.group is not None
        mine: Tensor = _c10d.wait_tensor(self.started)
        self.started, count = None, mine.shape[0]
        start = count * process_group(self.vocab.group).rank()
        if self.index is None:
            out[start : start + count] = mine
        else:
            here = (self.index >= start) & (self.index < start + count)
            out.copy_(torch.where(here[:, None], mine[(self.index - start).clamp(0, count - 1)], out))


# Of a rank that has all classes.
ALONE = RowSum(Vocabulary(None, 0, 0), 0, None, 0)


@constant_when_traced
def _size(name: str) -> int:
    size: int = process_group(name).size()
    return size
