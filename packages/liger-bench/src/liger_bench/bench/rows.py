# SPDX-License-Identifier: Apache-2.0
"""The rows of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from liger_bench.machine import PLACE
from liger_bench.results import Columns


@dataclass(frozen=True)
class Row:
    """One pass of one implementation on one workload, with where and how it was measured.

    op, workload    what was called; `axis` and `axis_value` name the one size that a scaling workload varies, for
                    instance N and 4096
    implementation  a backend or another library, according to `kind` ("backend", "peer"); the backend `reference` is
                    pure PyTorch
    pass_           forward (inputs require gradients), backward, full (both), evaluation (no gradients, only for ops
                    whose forward pass may do the work of the backward one); dispatch is what choosing an implementation
                    costs a call
    median_ms …     over `repetitions` calls taken in turns with the other implementations; low and high are the 0.2 and
                    0.8 quantiles
    enqueue_ms      the time that the host takes to enqueue the call; None on a CPU, except for dispatch
    graph_ms        median of replaying the same call as a CUDA graph; `graph_reason` says why there is none
    limit_ms        least time by the limits of this run: bytes at copy bandwidth, operations at the rate of a large
                    matmul, or the measured time of the matmuls that the call cannot avoid. None for the backward pass,
                    whose least work depends on the forward pass
    copy_ms         median of a plain copy that moves as many bytes as necessary; None where matmuls count instead
    share           limit_ms over median_ms; may pass 1 where the data fits a cache, or where ignored rows need no work
    peak_extra_bytes  beyond inputs (and, for the backward pass, what the forward pass kept); results count
    peak_beyond_gradients_bytes  the same without the gradients that the call returned
    error_*         largest relative error among outputs and among gradients against the reference in float64
    error_eager_ratio  largest ratio, among gradients, of that error to the error of plain eager PyTorch in the same
                       dtype
    overwrites      the arguments that the implementation may write to, and so was given copies of its own of
    reason          why there are no figures, else empty; `failed` if that is a defect and not a limit of the
                    implementation
    """

    op: str
    workload: str
    axis: str | None
    axis_value: int | None
    implementation: str
    kind: str
    pass_: str
    device: str
    dtype: str
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    repetitions: int | None
    enqueue_ms: float | None
    graph_ms: float | None
    graph_reason: str
    limit_ms: float | None
    copy_ms: float | None
    share: float | None
    peak_extra_bytes: int | None
    peak_beyond_gradients_bytes: int | None
    error_outputs: float | None
    error_gradients: float | None
    error_eager_ratio: float | None
    overwrites: str
    reason: str
    failed: bool
    copy_bytes_per_second: float
    product_flops_per_second: float
    machine: str
    versions: str
    commit: str
    date: str

    def columns(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items()}


HEADER = [column.name.rstrip("_") for column in fields(Row)]


def measured(
    records: Sequence[Columns], where: dict[str, str], device: str, dtype: str
) -> set[tuple[str, str, str, str]]:
    """Return (op, workload, implementation, pass) of the rows of this device, dtype, machine, versions and commit."""
    same = {**{name: where[name] for name in PLACE}, "device": device, "dtype": dtype}
    rows = [row for row in records if all(row.get(name) == value for name, value in same.items())]
    return {(row["op"], row["workload"], row["implementation"], row["pass"]) for row in rows}
