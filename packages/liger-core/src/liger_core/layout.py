# SPDX-License-Identifier: Apache-2.0
"""Calls with DTensors: an op names the dimensions of its tensors once, and every rank runs it on its local tensors.

A dimension that the op treats index by index may be sharded: then each rank computes its part alone, all tensors that
have the dimension are sharded alike, and a tensor that lacks it has a part of its gradient on each rank (`Partial`).
Other dimensions must be whole. This wraps the call, so backends, references and compiled code share it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError

# The names of a tensor's dimensions; None for one that must be whole.
_Names = tuple[str | None, ...]


class Layout(NamedTuple):
    """The dimension names of an op's tensors, such as "… (width)"; a result may name the argument that it is like.

    …        any leading dimensions, the same in all tensors that have them
    (width)  must be whole on every rank; a dimension without parentheses may be sharded

    A tensor with fewer dimensions has the last of these. An argument that no result is like may have size 1 in a
    dimension that is longer in others.
    """

    arguments: Mapping[str, str]
    results: tuple[str, ...]


def run_locally(op: str, layout: Layout, call: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run call(**arguments) on local tensors and return DTensors; tensors are redistributed only if necessary.

    Raises DeviceError for plain tensors beside DTensors and for different meshes.
    """
    from torch.distributed.tensor import DTensor, Replicate

    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    mesh = _mesh_of(op, tensors)
    names = {name: _named(layout.arguments[name], value.dim()) for name, value in tensors.items()}
    split = [_split(tensors, names, i) for i in range(mesh.ndim)]
    placements = {name: _placements(names[name], split) for name in tensors}
    longer = {
        dimension
        for name in tensors
        for dimension, size in zip(names[name], tensors[name].shape, strict=True)
        if size > 1
    }
    for name in tensors.keys() - set(layout.results):
        # A dimension of size 1 that is longer in other tensors is broadcast, so it cannot be sharded.
        is_broadcast = [
            p.is_shard() and tensors[name].shape[p.dim] == 1 and names[name][p.dim] in longer for p in placements[name]
        ]
        placements[name] = [Replicate() if b else p for p, b in zip(placements[name], is_broadcast, strict=True)]
    local = {name: _local(value, mesh, placements[name], split) for name, value in tensors.items()}
    results = call(**{**arguments, **local})

    def spread(value: Tensor, like: str) -> Any:
        if like in names:
            dimensions, shapes = names[like], dict(zip(names[like], tensors[like].shape, strict=True))
        else:
            dimensions = _named(like, value.dim())
            shapes = {
                named: size for name in tensors for named, size in zip(names[name], tensors[name].shape, strict=True)
            }
        # An op may change the size of a dimension that is not sharded.
        sizes = [
            shapes[name] if name is not None and name in split else here
            for name, here in zip(dimensions, value.shape, strict=True)
        ]
        stride = _dense(value.stride(), sizes)
        return DTensor.from_local(
            value, mesh, _placements(dimensions, split), run_check=False, shape=torch.Size(sizes), stride=stride
        )

    if isinstance(results, tuple):
        return tuple(map(spread, results, layout.results))
    return spread(results, layout.results[0])


def _placements(names: _Names, split: list[str | None]) -> list[Any]:
    """Return a tensor's placements: sharded in its dimensions that are split, replicated otherwise."""
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if name is None or name not in names else Shard(names.index(name)) for name in split]


def _mesh_of(op: str, tensors: Mapping[str, Any]) -> Any:
    plain = [name for name, value in tensors.items() if not hasattr(value, "device_mesh")]
    if plain:
        checks.mixed(op, [name for name in tensors if name not in plain], plain)
    first, mesh = next((name, value.device_mesh) for name, value in tensors.items())
    for name, value in tensors.items():
        if value.device_mesh != mesh:
            checks.fail(DeviceError, op, f"{name} must be on the mesh of {first}, {mesh}, got {value.device_mesh}")
    return mesh


def _named(dimensions: str, count: int) -> _Names:
    """Return the names of `count` dimensions, None for each that must be whole."""
    names = re.findall(r"\(?\w+\)?", dimensions)
    if dimensions.startswith("…"):
        names = [*(f"…{i}" for i in range(count - len(names))), *names]
    return tuple(None if name.startswith("(") else name for name in names[len(names) - count :])


def _split(tensors: Mapping[str, Any], names: Mapping[str, _Names], i: int) -> str | None:
    """Return the name of the dimension that mesh dimension i shards, or None.

    It is taken from the first tensor that is sharded there in a dimension that may be.
    """
    from torch.distributed.tensor import Shard

    for name, value in tensors.items():
        placement = value.placements[i]
        if type(placement) is Shard and names[name][placement.dim] is not None:
            return names[name][placement.dim]
    return None


def _local(value: Any, mesh: Any, wanted: list[Any], split: list[str | None]) -> Tensor:
    """Return this rank's local tensor, redistributed to `wanted`.

    If the tensor is replicated and others are sharded, each rank has only a part of its gradient (`Partial`).
    """
    from torch.distributed.tensor import Partial

    if list(value.placements) != wanted:
        value = value.redistribute(mesh, wanted)
    grads = [Partial() if s is not None and p.is_replicate() else p for p, s in zip(wanted, split, strict=True)]
    local: Tensor = value.to_local(grad_placements=grads)
    return local


def _dense(local: tuple[int, ...], shape: list[int]) -> tuple[int, ...]:
    """Return contiguous strides for a whole tensor, in the order of the local strides."""
    stride, step = [0] * len(shape), 1
    for i in sorted(range(len(shape)), key=lambda i: (local[i], -i)):
        stride[i], step = step, step * max(1, shape[i])
    return tuple(stride)
