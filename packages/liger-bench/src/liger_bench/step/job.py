# SPDX-License-Identifier: Apache-2.0
"""One training step to measure, and its row of results."""

from __future__ import annotations

from dataclasses import dataclass

from liger_bench.row import Recorded


@dataclass(frozen=True)
class Job:
    """One row to measure:

    `steps` timed steps in each of `rounds` processes, which alternate with those of the peers.
    """

    case: str
    implementation: str
    tiny: bool
    device: str
    dtype: str


@dataclass(frozen=True)
class Row(Recorded, Job):
    """The figures of one job, with where and how they were measured.

    step_seconds  median over the steps of all rounds; low and high: 0.2 and 0.8 quantile
    limit_seconds  lower bound set by the arithmetic, with recomputation: operations ÷ the rate of a large matmul
    limit_without_recompute_seconds  the same for a step that keeps every activation
    share         limit_seconds ÷ step_seconds
    loss          of the first step: the same weights and tokens for all implementations
    """

    batch: int
    sequence: int
    tokens_per_second: float | None
    step_seconds: float | None
    low_seconds: float | None
    high_seconds: float | None
    limit_seconds: float | None
    limit_without_recompute_seconds: float | None
    share: float | None
    peak_bytes: int | None
    loss: float | None
    steps: int | None
    rounds: int | None
    replaced: str | None
    product_flops_per_second: float | None
    copy_bytes_per_second: float | None


COLUMNS = Row.header()
