# SPDX-License-Identifier: Apache-2.0
"""What one of several ranks does for tests/conformance/test_placements.py: the samples of an op on DTensors, compared with one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from conformance.cases import Case, implementations, pattern_names, takes_minutes
from conformance.running import Trial, run

Placements = dict[str, Placement]


def placements_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Placements]]:
    """Everything replicated, everything partial, each dimension of all tensors sharded, and each dimension of one tensor alone."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    floating = {name for name, value in tensors.items() if value.is_floating_point()}
    whole: Placements = dict.fromkeys(tensors, Replicate())
    yield "replicated", whole
    yield "partial", whole | dict.fromkeys(floating, Partial())
    for dimension in range(max(value.dim() for value in tensors.values())):
        every: Placements = {name: Shard(dimension) for name, value in tensors.items() if dimension < value.dim()}
        yield f"dimension {dimension} sharded", whole | every
        # From behind, as tables and weights have the dimensions of rows.
        yield f"dimension -{dimension + 1} sharded", whole | {n: Shard(v.dim() - 1 - dimension) for n, v in tensors.items() if n in every}
    for name, value in tensors.items():
        for dimension in range(value.dim()):
            yield f"dimension {dimension} of {name} sharded", whole | {name: Shard(dimension)}


class Placed:
    """Calls an op with DTensors, as part of what autograd sees: plain tensors go in and come out, the same on all ranks."""

    def __init__(self, case: Case, mesh: DeviceMesh, placements: Placements) -> None:
        self.case, self.mesh, self.placements = case, mesh, placements

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        given = {name: self.spread(name, value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
        results = self.case.call(given)
        return tuple(map(self.whole, results)) if isinstance(results, tuple) else self.whole(results)

    def spread(self, name: str, value: Tensor) -> Any:
        placement = self.placements[name]
        if placement.is_partial():
            # The ranks have parts that are exactly the value between them.
            part = value / 2 if self.mesh.size() == 2 else value if self.mesh.get_local_rank() == 0 else value * 0
            return DTensor.from_local(_Whole.apply(part, value), self.mesh, [placement], run_check=False)
        return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False).redistribute(placements=[placement])

    def whole(self, value: Any) -> Tensor:
        assert isinstance(value, DTensor), type(value)
        return value.full_tensor()


class _Whole(torch.autograd.Function):
    """A part of a sum, with the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor) -> Tensor:
        return part.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def accuracy(device: torch.device, backend: str, dtype: torch.dtype) -> list[str]:
    """What is further from float64 than the op on one process may be, for every op that takes DTensors."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    found, checked = [], 0
    for op, name, _ in implementations(device, backend):
        if op.layout is None or name != backend:
            continue
        for case in (Case(op, backend, dtype, sample, device) for sample in pattern_names(op, device)):
            if takes_minutes(case):
                continue
            torch.manual_seed(0)
            trial = Trial(case)
            for how, placements in placements_of(trial.arguments):
                got = run(Placed(case, mesh, placements), trial.arguments, trial.names, trial.cotangents)
                found += [f"{case.id}, {how}: {complaint} – this sample is for: {trial.why}" for complaint in trial.complaints(got)]
                checked += 1
    assert checked, f"no op of {backend} takes DTensors"
    return found
