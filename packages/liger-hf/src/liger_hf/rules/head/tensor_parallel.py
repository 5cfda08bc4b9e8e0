# SPDX-License-Identifier: Apache-2.0
"""Heads that Transformers shards over a tensor-parallel mesh: each rank has the weight of some classes.

Transformers replaces the forward of such a head on the instance by one that gathers the logits of all classes on every
rank. Liger goes around it: the loss takes the sharded weight as it is, and only logits that are read are gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from liger_hf.patch import Patch, slot
from liger_hf.private_transformers import TP_FORWARD, TP_ORIGINAL

# Set on an instance whose weight is sharded over the classes.
SHARDED = "liger_sharded_over_classes"
AROUND = (
    "linear_cross_entropy: the head must get a plain tensor, got a DTensor from a parallel plan that was applied "
    "around Liger's forward, so all "
    "ranks gather all the logits; load the model with distributed_config=DistributedConfig(tp_size=…) and call "
    "liger_hf.apply after that"
)


@dataclass(frozen=True)
class Gathering:
    """The unbound forward of a sharded head, which gathers its logits, and the mesh that it gathers them from."""

    forward: Callable[..., Any]
    mesh: Any

    def held(self, classes: int) -> str:
        """Say for the report which classes this rank holds."""
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        most = -(-classes // ranks)
        mine = max(0, min(most, classes - rank * most))
        return (
            f"this rank holds {mine} of {classes} classes ({ranks} ranks, tensor parallelism); "
            "logits are gathered only when they are read, which must happen on all of these ranks"
        )


def gathering(head: nn.Module) -> Gathering | str | None:
    """The forward of tensor parallelism on a head that is sharded over its classes; None without one, or why another
    one must stay."""
    own = head.__dict__.get(slot(head))
    if (
        not inspect.isfunction(own)
        or own.__name__ != TP_FORWARD
        or not own.__globals__["__name__"].startswith("transformers.")
    ):
        return None
    known = inspect.getclosurevars(own).nonlocals
    style, inside, mesh = (known.get(name) for name in ("self", TP_ORIGINAL, "mesh"))
    if not (isinstance(inside, MethodType) and inside.__self__ is head and inside.__func__ is type(head).forward):
        return "its forward was already replaced on this instance before the tensor-parallel plan; call apply after it"
    layout: Any = getattr(style, "input_layouts", None)
    if mesh is None or layout is None or not layout.is_replicate() or not all(map(_rows_only, head.parameters())):
        placed = ", ".join(
            f"{name} {getattr(p, 'placements', 'a plain tensor')}" for name, p in head.named_parameters()
        )
        return (
            f"its tensor parallelism ({type(style).__name__}) must shard weight and bias over the classes (Shard(0)), "
            f"got {placed}"
        )

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        return own(*args, **options)

    return Gathering(forward, mesh)


def _rows_only(parameter: Any) -> bool:
    """Sharded over its rows alone, by FSDP as well perhaps."""
    return hasattr(parameter, "placements") and {getattr(p, "dim", None) for p in parameter.placements} - {None} == {0}


def mark(head: nn.Module) -> Patch:
    return Patch(head, SHARDED, True)


def over_classes(head: nn.Module) -> bool:
    """The weight here is that of some classes and of these whole:

    FSDP, where it shards a head further, has gathered its part.
    """
    if not all(
        hasattr(p, "placements") and [q.is_shard(0) for q in p.placements if not q.is_replicate()] == [True]
        for p in head.parameters()
    ):
        return False
    # A replaced forward hides the one that Transformers put there.
    return SHARDED in head.__dict__ or isinstance(gathering(head), Gathering)
