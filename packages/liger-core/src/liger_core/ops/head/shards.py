# SPDX-License-Identifier: Apache-2.0
"""Heads whose vocabulary is sharded over ranks: how a call says so, by a VocabShard or by DTensors, and what the ranks
exchange.

Every sum of a row over the classes is a few numbers, so that one all-gather of these a call merges the shards, whatever
the options are:

    m = max m_r,   s_r = m_r - m,   d = Σ d_r e^s_r,   Σ e·(x - m) = Σ (t_r + d_r s_r) e^s_r,   Σ e² = Σ q_r e^2s_r

The gradient of weight stays with its rows. That of hidden is a sum over all classes, and so over ranks, in float32.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, OptionError
from liger_core.ops._token_passes import LEAST, MOMENTS
from liger_core.private_torch import collectives as _c10d
from liger_core.private_torch import constant_when_traced, process_group

# Arguments with a number, or several, for each row of hidden, and those with one for each class.
OF_ROWS = ("target", "token_weight", "temperature", "allowed", "teacher_hidden")
OF_CLASSES = ("weight", "bias", "teacher_weight", "teacher_bias")


class VocabShard(NamedTuple):
    """The shard of a vocabulary whose rows of weight are on this rank.

    group      the process group whose ranks have all classes between them
    start      the class of the first row of weight here
    classes    of the whole vocabulary. Rows of weight past the last class are padding
    scattered  hidden was gathered from equal parts of its rows, one from each rank in order, and a rank reads the
               gradient of its own part only: that of other rows is unspecified, and a reduce-scatter replaces the
               all-reduce where it sends less
    ranks      the size of the group; by default the group is asked, and must exist

    Shards may be uneven, or empty but for padding; together they must have every class once. `VocabShard.of` makes them
    from the number of rows on each rank.
    """

    group: Any
    start: int
    classes: int
    scattered: bool = False
    ranks: int | None = None

    @classmethod
    def of(cls, weight: Tensor, group: Any = None, classes: int | None = None) -> Self:
        """Return this rank's shard if the ranks hold the rows of weight in order.

        group    by default all ranks; each of them must call this method, because they exchange their numbers of rows
        classes  the number of classes without padding, by default the number of all rows of weight
        """
        group = torch.distributed.group.WORLD if group is None else group
        sizes: list[int] = [0] * group.size()
        torch.distributed.all_gather_object(sizes, weight.shape[0], group=group)
        return cls(group, sum(sizes[: group.rank()]), sum(sizes) if classes is None else classes)


def vocabulary(weight: Tensor, vocab: VocabShard | None) -> "Vocabulary":
    """Return the shard's description in the form that kernels take."""
    if vocab is None:
        return Vocabulary(None, 0, weight.shape[0])
    group = vocab.group if isinstance(vocab.group, str) else vocab.group.group_name
    ranks = _size(group) if vocab.ranks is None else vocab.ranks
    return Vocabulary(group, vocab.start, vocab.classes, vocab.scattered, ranks)


def _in_order(hidden: Any, dimension: int) -> bool:
    """Whether this mesh dimension alone splits hidden, into equal parts in the order of its rows."""
    placement = hidden.placements[dimension]
    if not placement.is_shard() or sum(p.is_shard() for p in hidden.placements) > 1:
        return False
    size: int = hidden.shape[placement.dim]
    return bool(hidden.shape[: placement.dim].numel() == 1 and size % hidden.device_mesh.size(dimension) == 0)


def run_distributed(function: Callable[..., Any], hidden: Any, weight: Any, **options: Any) -> Any:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    op, mesh, placed = function.__name__, weight.device_mesh, weight.placements
    over = [i for i, p in enumerate(placed) if p.is_shard(0)]
    if options.get("vocab") is not None:
        checks.fail(OptionError, op, "vocab must be None where weight is a DTensor, whose placements say the same")
    if len(over) > 1 or any(not (p.is_replicate() or p.is_shard(0)) for p in placed):
        sentence = "weight must be replicated, or sharded over its classes (Shard(0)) on one dimension of its mesh, got"
        advice = "redistribute it, or call the op inside the module that FSDP unshards"
        checks.fail(DeviceError, op, f"{sentence} {placed}; {advice}")
    spread = isinstance(hidden, DTensor)
    # What each dimension of the mesh does to rows. On that of the vocabulary all ranks need all rows.
    rows = [
        p if spread and i not in over else Replicate() for i, p in enumerate(hidden.placements if spread else placed)
    ]
    if any(p.is_partial() or p.is_shard(hidden.dim() - 1) for p in rows):
        sentence = "hidden must be replicated or sharded over its rows"
        checks.fail(DeviceError, op, f"{sentence}, got {hidden.placements}; redistribute it")
    split = [i for i, p in enumerate(rows) if p.is_shard()]
    takes = inspect.signature(function).parameters
    mean = "reduction" in takes and options.get("reduction", takes["reduction"].default) == "mean"
    if split and mean and options.get("normalizer") is None:
        sentence = "reduction='mean' needs a normalizer where rows are distributed"
        checks.fail(OptionError, op, f"{sentence}: the number of tokens on all ranks; got None")
    local = functools.partial(_local, op, mesh, placed, rows, bool(over), split)
    arguments = {name: local(name, value) for name, value in options.items()}
    if over:
        # As DTensor shards: all ranks have the same number of rows, until there are no more. In plain numbers, which a
        # compiler can trace.
        classes, most = weight.shape[0], -(-weight.shape[0] // mesh.size(over[0]))
        start = min(most * mesh.get_local_rank(over[0]), classes)
        arguments["vocab"] = VocabShard(mesh.get_group(over[0]), start, classes, spread and _in_order(hidden, over[0]))
    # Every rank of the vocabulary has all these rows, and all of their gradient.
    x = hidden.redistribute(mesh, rows).to_local(grad_placements=rows) if spread else hidden
    results = function(x, local("weight", weight), **arguments)
    if not spread:
        return results
    summed = [Partial() if i in split else Replicate() for i in range(mesh.ndim)]

    def back(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(back, value)) if hasattr(value, "_fields") else tuple(map(back, value))
        return DTensor.from_local(value, mesh, rows if value.dim() else summed, run_check=False)

    return back(results)


def _local(
    op: str, mesh: Any, placed: Any, rows: list[Any], over: bool, split: list[int], name: str, value: Any
) -> Any:
    """Return the part of an argument that this rank needs.

    placed, rows  the placements of weight and of rows
    over          whether some dimension of the mesh has the vocabulary
    split         the dimensions of the mesh that split the rows
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(value, Tensor):
        return value
    whole = [Replicate()] * mesh.ndim
    wanted = rows if name in OF_ROWS else list(placed) if name in OF_CLASSES else whole
    if isinstance(value, DTensor):
        # The ranks of the vocabulary add up the gradient of hidden themselves; what other dimensions split has a part
        # of it on each.
        back = [Partial() if name in OF_CLASSES and i in split else p for i, p in enumerate(wanted)]
        return value.redistribute(mesh, wanted).to_local(grad_placements=back)
    if name in OF_CLASSES and over:
        return DTensor.from_local(value, mesh, whole).redistribute(mesh, wanted).to_local()
    if name in OF_ROWS and split and value.dim():
        sentence = f"{name} must be a DTensor like hidden, whose rows are distributed"
        checks.fail(DeviceError, op, f"{sentence} ({rows})")
    return value


class Vocabulary(NamedTuple):
    """The classes that the rows of weight stand for: start, start + 1, … of `classes`; rows past these are padding.

    group      name of the process group that has all classes; None if this rank has them all
    scattered  the rows of hidden come in equal parts from the ranks, and each needs the gradient of its own only
    ranks      the number of ranks that share the vocabulary
    """

    group: str | None
    start: int
    classes: int
    scattered: bool = False
    ranks: int = 1

    def mine(self, rows: int) -> int:
        """Return the number of rows of weight that are classes, not padding."""
        return max(0, min(rows, self.classes - self.start))

    def usual(self) -> int:
        """Return the classes per rank of an even split, the same number on all ranks: an error on one rank alone would
        leave the others waiting."""
        return -(-self.classes // self.ranks)

    def local(self, index: Tensor) -> Tensor:
        """Return the row of a class in this shard; for a class elsewhere, it is outside the shard's rows."""
        return index - self.start if self.start else index


def merge_tokens(
    moments: Tensor, selected: Tensor, prediction: Tensor | None, weights: Tensor | float, mean: bool, vocab: Vocabulary
) -> None:
    """Reduce this shard's sums of tokens over all shards, in place.

    Each rank sends columns: moments, for the mean `weights`, the sum of its class weights, x of a single chosen class,
    and the arg-max class.
    """
    if vocab.group is None or not moments.shape[0]:
        return
    bits = torch.int32 if moments.dtype == torch.float32 else torch.int64
    columns = [moments]
    if mean:
        column = moments.new_empty(moments.shape[0], 1)
        columns.append(column.copy_(weights) if isinstance(weights, Tensor) else column.fill_(weights))
    # Several chosen classes take more than the moments do, and only one rank has x of each.
    single = selected.shape[1] == 1
    if single:
        columns.append(selected)
    if prediction is not None:
        # The bits of an integer, whatever number they would be.
        columns.append((prediction + vocab.start).to(bits).view(moments.dtype)[:, None])
    mine = torch.cat(columns, -1)
    every = _everyone(mine, vocab)
    if single:
        selected.copy_(every[:, :, -1 - (prediction is not None)].sum(0)[:, None])
    else:
        start_sum(selected, vocab)
        end_sum(selected, vocab)
    top, total, distance, weighted, squares, anchor = every[:, :, :MOMENTS].unbind(-1)
    highest = top.amax(0)
    step = top - highest
    shrink = step.exp()
    if prediction is not None:
        best = every[:, :, -1].contiguous().view(bits).to(prediction.dtype)
        prediction.copy_(torch.where(top == highest, best, vocab.classes).amin(0))
    moments[:, 0] = highest
    moments[:, 1] = (total * shrink).sum(0)
    moments[:, 2] = ((distance + total * step.clamp(min=LEAST)) * shrink).sum(0)
    if mean:
        moments[:, 3] = (weighted + (anchor - anchor[0]) * every[:, :, MOMENTS]).sum(0)
    moments[:, 4] = (squares * shrink.square()).sum(0)
    moments[:, 5] = anchor[0]


def merge_divergence(moments: Tensor, temperature: float, hard: bool, vocab: Vocabulary) -> None:
    """Reduce a shard's moments of both sides over all shards, in place, except for Σ q · (h - h₀).

    liger_core/ops/_divergence.py defines the moments.
    """
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
    """Return the tensors of all ranks, (ranks, …)."""
    gathered: Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(mine, vocab.ranks, vocab.group))
    return gathered.view(vocab.ranks, *mine.shape)


def start_sum(tensor: Tensor, vocab: Vocabulary) -> None:
    """Start to sum a tensor over the ranks, in place."""
    if vocab.group is not None:
        _c10d.all_reduce_(tensor, "sum", vocab.group)


def end_sum(tensor: Tensor, vocab: Vocabulary) -> None:
    """Wait for the sum, on the device."""
    if vocab.group is not None:
        _c10d.wait_tensor(tensor)


class RowSum:
    """The sum over ranks of the gradient of hidden; if a rank needs only its own rows, it takes half of the traffic.

    rows    the number of rows of hidden
    index   the rows that the gradient has; None if it has all
    most    the largest number of rows that come at once
    shared  whether there are other ranks
    """

    def __init__(self, vocab: Vocabulary, rows: int, index: Tensor | None, most: int) -> None:
        self.vocab, self.rows, self.index, self.shared = vocab, rows, index, vocab.group is not None
        count = rows if index is None else index.shape[0]
        # Only if all rows come at once, and not so few that sending the zeros of the others costs more than it saves.
        self.scatters = vocab.scattered and count <= most and rows % vocab.ranks == 0 and 2 * count >= rows > 0
        self.started: Tensor | None = None

    def start(self, out: Tensor) -> None:
        """Start to sum these rows over the ranks, in place."""
        if not self.scatters:
            start_sum(out, self.vocab)
            return
        whole = out if self.index is None else out.new_zeros(self.rows, *out.shape[1:]).index_copy_(0, self.index, out)
        self.started = _c10d.reduce_scatter_tensor(whole, "sum", self.vocab.ranks, self.vocab.group)

    def end(self, out: Tensor) -> None:
        """Wait for the sum, on the device. If it was scattered, the rows of other ranks keep this rank's part."""
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


# The vocabulary of a rank that holds every class; the number of classes is not used.
ALONE = Vocabulary(None, 0, 0)


@constant_when_traced
def _size(name: str) -> int:
    size: int = process_group(name).size()
    return size
