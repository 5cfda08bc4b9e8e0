# SPDX-License-Identifier: Apache-2.0
"""What one process measures, and the resulting row."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Job:
    """One row to measure: `steps` timed steps, or as many as fit into `seconds`; the `kernels` longest kernels on demand."""

    model: str
    batch: int
    sequence: int
    implementation: str
    device: str
    dtype: str
    memory_limit_bytes: int | None
    steps: int
    seconds: float
    kernels: int = 0

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.sequence}"


@dataclass(frozen=True)
class Row:
    """Forward and backward of one implementation on one shape, with where and how it was measured.

    backend           what runs Liger's ops
    *_per_second      median, 0.2 and 0.8 quantile of the steps
    peak_bytes        the most memory held at once: weights, gradients, activations and the batch
    loss, grad_norm   of the first step: the same weights and tokens for all implementations
    compile_seconds   the time of the first step, which compiles graphs and kernels, minus that of a median one
    reason            why there are no figures, else empty; no memory left is a result and not a failure
    """

    model: str
    batch: int
    sequence: int
    implementation: str
    device: str
    dtype: str
    memory_limit_bytes: int | None
    backend: str | None
    tokens_per_second: float | None
    low_tokens_per_second: float | None
    high_tokens_per_second: float | None
    step_seconds: float | None
    steps: int | None
    peak_bytes: int | None
    loss: float | None
    grad_norm: float | None
    compile_seconds: float | None
    parameters: int | None
    out_of_memory: bool
    failed: bool
    reason: str
    machine: str
    versions: str
    commit: str
    date: str

    def columns(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.sequence}"


COLUMNS = [field.name for field in fields(Row)]
# The columns that identify a measurement; the same machine, versions and commit give the same figures.
IDENTITY = ("model", "batch", "sequence", "implementation", "device", "dtype", "memory_limit_bytes", "machine", "versions", "commit")


def row_of(job: Job, where: dict[str, str], results: dict[str, Any]) -> Row:
    empty: dict[str, Any] = dict.fromkeys(COLUMNS) | {"out_of_memory": False, "failed": False, "reason": ""}
    known = {name: value for name, value in asdict(job).items() if name in empty and name != "steps"}
    return Row(**(empty | known | where | results))
