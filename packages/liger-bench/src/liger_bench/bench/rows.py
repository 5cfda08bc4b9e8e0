# SPDX-License-Identifier: Apache-2.0
"""The rows of a benchmark."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from liger_bench.machine import ENVIRONMENT
from liger_bench.results import Columns


@dataclass(frozen=True, kw_only=True)
class OpRow:
    """One pass of one implementation on one workload.

    axis, axis_value  the size that a scaling workload varies, for instance N and 4096
    implementation    a backend or another library, according to `kind` ("backend", "peer"); the backend `reference` is
                      pure PyTorch
    pass_             forward (inputs require gradients), backward, full (both), evaluation (no gradients, only for ops
                      whose forward pass may do work of the backward pass), or dispatch (choosing an implementation)
    median_ms         over `repetitions` calls, interleaved with other implementations; low_ms and high_ms are the 0.2
                      and 0.8 quantiles
    enqueue_ms        the time that the host takes to enqueue the call; None on a CPU, except for dispatch
    graph_ms          the median of replaying the call as a CUDA graph; `graph_reason` says why there is none
    limit_ms          the least time by the limits of this run: bytes at copy bandwidth, and operations at the rate of a
                      large matmul or the measured time of the call's own matmuls. None for the backward pass, whose
                      work depends on the forward pass
    copy_ms           the median of a plain copy of as many bytes as the op must move; None if matmuls bound the op
    share             limit_ms / median_ms; above 1 if the data fits a cache, or if ignored rows need no work
    peak_extra_bytes  beyond the inputs and, for the backward pass, the tensors saved for it; results count
    peak_beyond_gradients_bytes  the same without the gradients that the call returned
    error_outputs, error_gradients  the largest relative error against the reference in float64
    error_eager_ratio the largest ratio of a gradient's error to that of eager PyTorch in the same dtype
    overwrites        the arguments that the implementation may write to; it gets copies of them
    reason            why there are no figures, else empty; `failed` if that is a defect and not a limit of the
                      implementation
    """

    op: str
    workload: str
    axis: str | None = None
    axis_value: int | None = None
    implementation: str
    kind: str
    pass_: str
    device: str
    dtype: str
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    repetitions: int | None = None
    enqueue_ms: float | None = None
    graph_ms: float | None = None
    graph_reason: str = ""
    limit_ms: float | None = None
    copy_ms: float | None = None
    share: float | None = None
    peak_extra_bytes: int | None = None
    peak_beyond_gradients_bytes: int | None = None
    error_outputs: float | None = None
    error_gradients: float | None = None
    error_eager_ratio: float | None = None
    overwrites: str = ""
    reason: str = ""
    failed: bool = False
    copy_bytes_per_second: float
    product_flops_per_second: float
    machine: str
    versions: str
    commit: str
    date: str

    def columns(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items()}


TYPES = {column.name.rstrip("_"): column.type for column in fields(OpRow)}
HEADER = [*TYPES]


def read_csv(path: Path) -> list[Columns]:
    """Return the rows of a table that `liger bench` wrote, or none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: _value(cell, TYPES.get(name, str)) for name, cell in row.items()} for row in csv.DictReader(file)
        ]


def _value(cell: str, kind: Any) -> Any:
    """Return the value of a column of this type."""
    kinds = get_args(kind) or (kind,)
    if not cell and NoneType in kinds:
        return None
    return cell == "True" if bool in kinds else cell if str in kinds else float(cell)


def measured(
    records: Sequence[Columns], where: dict[str, str], device: str, dtype: str
) -> set[tuple[str, str, str, str]]:
    """Return (op, workload, implementation, pass) of the rows of this device, dtype, machine, versions and commit."""
    same = {**{name: where[name] for name in ENVIRONMENT}, "device": device, "dtype": dtype}
    rows = [row for row in records if all(row.get(name) == value for name, value in same.items())]
    return {(row["op"], row["workload"], row["implementation"], row["pass"]) for row in rows}
