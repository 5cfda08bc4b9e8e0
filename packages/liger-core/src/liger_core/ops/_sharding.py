# SPDX-License-Identifier: Apache-2.0
"""Heads whose vocabulary is sharded over ranks: how a call says so, by a VocabShard or by DTensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, OptionError
from liger_core.ops._vocabulary import Vocabulary

# Arguments with a number, or several, for each row of hidden, and those with one for each class.
OF_ROWS = ("target", "token_weight", "temperature", "allowed", "teacher_hidden")
OF_CLASSES = ("weight", "bias", "teacher_weight", "teacher_bias")


class VocabShard(NamedTuple):
    """Which classes of a vocabulary the rows of weight on this rank are.

    group      the process group whose ranks have all classes between them
    start      the class of the first row of weight here
    classes    of the whole vocabulary. Rows of weight past the last class are padding
    scattered  hidden was gathered from equal parts of its rows, one from each rank in order, and a rank reads the gradient of its own part
               only: that of other rows is unspecified, and a reduce-scatter replaces the all-reduce where it sends less

    Shards may be uneven, or empty but for padding; together they must have every class once. `VocabShard.of` makes them from the number
    of rows on each rank.
    """

    group: Any
    start: int
    classes: int
    scattered: bool = False

    @classmethod
    def of(cls, weight: Tensor, group: Any = None, classes: int | None = None) -> VocabShard:
        """The shard of a rank whose rows of weight follow those of the ranks before it in the group (by default all ranks).

        classes  how many there are without padding, by default as many as all rows of weight

        Every rank of the group must call it, since they exchange how many rows they have.
        """
        group = torch.distributed.group.WORLD if group is None else group
        sizes: list[int] = [0] * group.size()
        torch.distributed.all_gather_object(sizes, weight.shape[0], group=group)
        return cls(group, sum(sizes[: group.rank()]), sum(sizes) if classes is None else classes)


def vocabulary(weight: Tensor, vocab: VocabShard | None) -> Vocabulary:
    """What kernels take of it."""
    if vocab is None:
        return Vocabulary(None, 0, weight.shape[0])
    group = vocab.group
    return Vocabulary(group if isinstance(group, str) else group.group_name, vocab.start, vocab.classes, vocab.scattered)


def held_classes(weight: Tensor, vocab: VocabShard | None) -> int:
    """Classes of a row of logits that a rank holds, alike on all ranks, so that none raises an error alone while the others wait for it."""
    return vocabulary(weight, vocab).usual()


def check_vocab(op: str, weight: Tensor, vocab: VocabShard | None) -> int:
    """How many classes there are in all."""
    if vocab is None:
        return weight.shape[0]
    if not isinstance(vocab, VocabShard):
        checks.fail(OptionError, op, f"vocab must be a VocabShard(group, start, classes), got {type(vocab).__name__}")
    checks.integer(op, "vocab.start", vocab.start)
    checks.integer(op, "vocab.classes", vocab.classes)
    if vocab.classes < 1 or vocab.start < 0:
        checks.fail(OptionError, op, f"vocab must have start ≥ 0 and classes > 0, got start={vocab.start} and classes={vocab.classes}")
    if not isinstance(vocab.group, (str, torch.distributed.ProcessGroup)):
        checks.fail(OptionError, op, f"vocab.group must be a process group, got {type(vocab.group).__name__}")
    return vocab.classes


def takes_dtensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation (hidden, weight, …, vocab) that also takes weight as a DTensor with its vocabulary over a mesh dimension.

    Rows may be distributed over the other dimensions of the mesh. What is returned is then distributed likewise: results for each token
    as they are, a sum as a partial one; if hidden is a plain tensor, as plain tensors.
    """

    @functools.wraps(function)
    def implementation(hidden: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
        if not hasattr(weight, "device_mesh"):
            return function(hidden, weight, *args, **options)
        bound = inspect.signature(function).bind(hidden, weight, *args, **options).arguments
        return _distributed(function, **bound)

    return implementation


def _in_order(hidden: Any, dimension: int) -> bool:
    """Whether this dimension of the mesh alone splits hidden, into equal parts that follow each other in the order of its rows."""
    placement = hidden.placements[dimension]
    if not placement.is_shard() or sum(p.is_shard() for p in hidden.placements) > 1:
        return False
    size: int = hidden.shape[placement.dim]
    return bool(hidden.shape[: placement.dim].numel() == 1 and size % hidden.device_mesh.size(dimension) == 0)


def _distributed(function: Callable[..., Any], hidden: Any, weight: Any, **options: Any) -> Any:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    op, mesh, placed = function.__name__, weight.device_mesh, weight.placements
    over = [i for i, p in enumerate(placed) if p.is_shard(0)]
    if options.get("vocab") is not None:
        checks.fail(OptionError, op, "vocab must be None where weight is a DTensor, whose placements say the same")
    if len(over) > 1 or any(not (p.is_replicate() or p.is_shard(0)) for p in placed):
        checks.fail(
            DeviceError, op,
            f"weight must be replicated, or sharded over its classes (Shard(0)) on one dimension of its mesh, got {placed}; "
            "redistribute it, or call the op inside the module that FSDP unshards",
        )  # fmt: skip
    spread = isinstance(hidden, DTensor)
    # What each dimension of the mesh does to rows. On that of the vocabulary all ranks need all rows.
    rows = [p if spread and i not in over else Replicate() for i, p in enumerate(hidden.placements if spread else placed)]
    if any(p.is_partial() or p.is_shard(hidden.dim() - 1) for p in rows):
        checks.fail(DeviceError, op, f"hidden must be replicated or sharded over its rows, got {hidden.placements}; redistribute it")
    split = [i for i, p in enumerate(rows) if p.is_shard()]

    def local(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wanted = rows if name in OF_ROWS else [Replicate()] * mesh.ndim
        if name in OF_CLASSES:
            wanted = list(placed)
        if isinstance(value, DTensor):
            # The ranks of the vocabulary add up the gradient of hidden themselves; what other dimensions split has a part of it on each.
            back = [Partial() if name in OF_CLASSES and i in split else p for i, p in enumerate(wanted)]
            return value.redistribute(mesh, wanted).to_local(grad_placements=back)
        if name in OF_CLASSES and over:
            return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim).redistribute(mesh, wanted).to_local()
        if name in OF_ROWS and split and value.dim():
            checks.fail(DeviceError, op, f"{name} must be a DTensor like hidden, whose rows are distributed ({hidden.placements})")
        return value

    takes = inspect.signature(function).parameters
    if (
        split
        and "reduction" in takes
        and options.get("reduction", takes["reduction"].default) == "mean"
        and options.get("normalizer") is None
    ):
        sentence = "reduction='mean' needs a normalizer where rows are distributed: the number of tokens on all ranks; got None"
        checks.fail(OptionError, op, sentence)
    given = {name: local(name, value) for name, value in options.items()}
    if over:
        # As DTensor shards: all ranks have the same number of rows, until there are no more. In plain numbers, which a compiler can trace.
        classes, most = weight.shape[0], -(-weight.shape[0] // mesh.size(over[0]))
        start = min(most * mesh.get_local_rank(over[0]), classes)
        given["vocab"] = VocabShard(mesh.get_group(over[0]), start, classes, spread and _in_order(hidden, over[0]))
    # Every rank of the vocabulary has all these rows, and all of their gradient.
    x = hidden.redistribute(mesh, rows).to_local(grad_placements=rows) if spread else hidden
    results = function(x, local("weight", weight), **given)
    if not spread:
        return results
    summed = [Partial() if i in split else Replicate() for i in range(mesh.ndim)]

    def back(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(back, value)) if hasattr(value, "_fields") else tuple(map(back, value))
        return DTensor.from_local(value, mesh, rows if value.dim() else summed, run_check=False)

    return back(results)
