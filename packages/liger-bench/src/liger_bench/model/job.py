# SPDX-License-Identifier: Apache-2.0
"""One measurement, which has its own process, and the resulting row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_bench.row import Recorded, row_from


@dataclass(frozen=True)
class Case:
    """One implementation on one shape."""

    model: str
    batch: int
    sequence: int
    implementation: str
    device: str
    dtype: str
    memory_limit_bytes: int | None

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.sequence}"


@dataclass(frozen=True)
class Job(Case):
    """One row to measure:

    `steps` timed steps, or as many as fit into `seconds`; the `kernels` longest kernels on demand.
    """

    steps: int
    seconds: float
    kernels: int = 0


@dataclass(frozen=True)
class Row(Recorded, Case):
    """The figures of forward and backward of one case, with where and how they were measured.

    backend           what runs Liger's ops
    *_per_second      median, 0.2 and 0.8 quantile of the steps
    peak_bytes        the most memory held at once: weights, gradients, activations and the batch
    loss, grad_norm   of the first step: the same weights and tokens for all implementations
    compile_seconds   the time of the first step, which compiles graphs and kernels, minus that of a median one
    """

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


COLUMNS = Row.header()


def row_of(job: Job, where: Mapping[str, str], results: Mapping[str, Any]) -> Row:
    """Return the row of a job, whose `steps` are the timed ones, or None without a result."""
    return row_from(Row, job, where, {"steps": None, **results})
