# SPDX-License-Identifier: Apache-2.0
"""What one of several ranks does for tests/conformance/test_placements.py: the samples of an op on DTensors, compared
with one process."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from conformance.cases import Case, implementations, sample_names, takes_minutes
from conformance.running import Trial, run

# For each dimension of the mesh, the placement of every argument on it.
Placements = dict[str, Placement]
# The ops are divided among this many tests.
PARTS = 8


def placements_of(arguments: Mapping[str, Any], lone: bool) -> Iterator[tuple[str, Placements]]:
    """Everything replicated, everything partial, each dimension of all tensors sharded, and, if `lone`, each dimension
    of one tensor alone."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    floating = {name for name, value in tensors.items() if value.is_floating_point()}
    whole: Placements = dict.fromkeys(tensors, Replicate())
    yield "replicated", whole
    yield "partial", whole | dict.fromkeys(floating, Partial())
    for dimension in range(max(value.dim() for value in tensors.values())):
        every: Placements = {name: Shard(dimension) for name, value in tensors.items() if dimension < value.dim()}
        yield f"dimension {dimension} sharded", whole | every
        # From behind, as tables and weights have the dimensions of rows.
        from_behind = {name: Shard(tensors[name].dim() - 1 - dimension) for name in every}
        yield f"dimension -{dimension + 1} sharded", whole | from_behind
    for name, value in tensors.items() if lone else ():
        for dimension in range(value.dim()):
            yield f"dimension {dimension} of {name} sharded", whole | {name: Shard(dimension)}


class Placed:
    """Calls an op with DTensors, as part of what autograd sees: plain tensors go in and come out, the same on all
    ranks."""

    def __init__(self, case: Case, mesh: DeviceMesh, placements: tuple[Placements, ...]) -> None:
        self.case, self.mesh, self.placements = case, mesh, placements

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        given = {n: self.spread(n, value) if isinstance(value, Tensor) else value for n, value in arguments.items()}
        results = self.case.call(given)
        return tuple(map(self.whole, results)) if isinstance(results, tuple) else self.whole(results)

    def spread(self, name: str, value: Tensor) -> Any:
        placements = [on_dimension[name] for on_dimension in self.placements]
        if any(p.is_partial() for p in placements):
            # Parts that are exactly the value between them.
            ranks = math.prod(self.mesh.size(i) for i, p in enumerate(placements) if p.is_partial())
            value = _Part.apply(value, ranks)
        start = [p if p.is_partial() else Replicate() for p in placements]
        return DTensor.from_local(value, self.mesh, start, run_check=False).redistribute(placements=placements)

    def whole(self, value: Any) -> Tensor:
        assert isinstance(value, DTensor), type(value)
        return value.full_tensor()


class _Part(torch.autograd.Function):
    """One of so many equal parts of a sum (a power of two), with the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parts: int) -> Tensor:
        return value / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def kind_of(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What calls have in common that placements treat alike: arguments, and which of their dimensions are empty, of one
    index, or longer."""

    def seen_as(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(min(size, 2) for size in value.shape)
        return value if isinstance(value, str | bool) else None

    return tuple((name, seen_as(value)) for name, value in arguments.items())


def accuracy(device: torch.device, backend: str, dtype: torch.dtype, part: int, every: bool) -> list[str]:
    """What is further from float64 than the op on one process may be, for a part of the ops that take DTensors.

    every  all kinds of calls in all ways, or the first kind with all arguments placed alike
    """
    mesh = init_device_mesh(device.type, (2,) * (dist.get_world_size() // 2))
    found, checked = [], 0
    ops = [op for op, name, _ in implementations(device, backend) if op.layout is not None and name == backend]
    for op in ops[part::PARTS]:
        kinds = set()
        for case in (Case(op, backend, dtype, sample, device) for sample in sample_names(op, device, dtype)):
            if takes_minutes(case) or (kinds and not every):
                continue
            torch.manual_seed(0)
            trial = Trial(case)
            if (kind := kind_of(trial.arguments)) in kinds:
                continue
            kinds.add(kind)
            ways = list(placements_of(trial.arguments, every))
            # On a mesh of two dimensions each has another placement than the other.
            for several in zip(*(ways[i:] + ways[:i] for i in range(mesh.ndim)), strict=True):
                how = " and ".join(words for words, _ in several)
                placed = Placed(case, mesh, tuple(placements for _, placements in several))
                got = run(placed, trial.arguments, trial.names, trial.cotangents)
                complaints = trial.complaints(got)
                found += [f"{case.id}, {how}: {each} – this sample is for: {trial.why}" for each in complaints]
                checked += 1
    assert checked or not ops[part::PARTS], f"no op of {backend} takes DTensors"
    return found
