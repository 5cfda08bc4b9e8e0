# SPDX-License-Identifier: Apache-2.0
"""Heads that Transformers shards over a tensor-parallel mesh: each rank has the weight of some classes.

Transformers replaces the forward of such a head by one that gathers the logits of all classes on every rank. Liger does
not call it for a loss, which uses the sharded weight directly; only logits that are read are gathered.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from liger_hf.patch import slot
from liger_hf.private_transformers import TP_FORWARD, TP_ORIGINAL

# An attribute of heads whose weight is sharded over the classes.
SHARDED = "liger_sharded_over_classes"
AROUND = (
    "linear_cross_entropy: the head must get a plain tensor, got a DTensor from a parallel plan that was applied "
    "around Liger's forward, so all ranks gather all the logits; load the model with "
    "distributed_config=DistributedConfig(tp_size=…) and call liger_hf.apply after that"
)


@dataclass(frozen=True)
class ShardedHead:
    """The unbound forward of a sharded head, which gathers its logits, and the mesh that it gathers them from."""

    forward: Callable[..., Any]
    mesh: Any

    def share(self, classes: int) -> str:
        """Return a phrase for the report on the classes that this rank holds."""
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        most = -(-classes // ranks)
        mine = max(0, min(most, classes - rank * most))
        return (
            f"this rank holds {mine} of {classes} classes ({ranks} ranks, tensor parallelism); "
            "logits are gathered only when they are read, which must happen on all of these ranks"
        )


def sharded_head(head: nn.Module) -> ShardedHead | str | None:
    """Return the tensor-parallel forward of a head that is sharded over its classes.

    Returns None if the head has no such forward, and the reason if its forward must stay.
    """
    tp_forward = head.__dict__.get(slot(head))
    if (
        not inspect.isfunction(tp_forward)
        or tp_forward.__name__ != TP_FORWARD
        or not tp_forward.__globals__["__name__"].startswith("transformers.")
    ):
        return None
    known = inspect.getclosurevars(tp_forward).nonlocals
    style, inside, mesh = (known.get(name) for name in ("self", TP_ORIGINAL, "mesh"))
    if not (isinstance(inside, MethodType) and inside.__self__ is head and inside.__func__ is type(head).forward):
        return "its forward was already replaced on this instance before the tensor-parallel plan; call apply after it"
    layout: Any = getattr(style, "input_layouts", None)
    if mesh is None or layout is None or not layout.is_replicate() or not all(map(_rows_only, head.parameters())):
        placements = ", ".join(
            f"{name} {getattr(p, 'placements', 'a plain tensor')}" for name, p in head.named_parameters()
        )
        return (
            f"its tensor parallelism ({type(style).__name__}) must shard weight and bias over the classes (Shard(0)), "
            f"got {placements}"
        )

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        return tp_forward(*args, **options)

    return ShardedHead(forward, mesh)


def _rows_only(parameter: Any) -> bool:
    """Return whether a parameter is sharded over its rows alone, perhaps by FSDP as well."""
    return hasattr(parameter, "placements") and {getattr(p, "dim", None) for p in parameter.placements} - {None} == {0}


def over_classes(head: nn.Module) -> bool:
    """Return whether the head's weight holds all columns of some classes.

    If FSDP shards the head further, it has gathered its shards.
    """
    if not all(
        hasattr(p, "placements") and [q.is_shard(0) for q in p.placements if not q.is_replicate()] == [True]
        for p in head.parameters()
    ):
        return False
    # The mark, because a replaced forward hides the one that Transformers installed.
    return SHARDED in head.__dict__ or isinstance(sharded_head(head), ShardedHead)
