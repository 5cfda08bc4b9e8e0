# SPDX-License-Identifier: Apache-2.0
"""One training run on several ranks, and its row of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from liger_bench.agreement import bound, largest_difference
from liger_bench.row import Recorded

PLAIN, REORDERED, LIGER = "hf", "hf-reordered", "liger"
IMPLEMENTATIONS = (PLAIN, REORDERED, LIGER)
# The kernels are compiled in the first steps, and the optimizer makes its state.
WARM_UP = 2


@dataclass(frozen=True)
class Job:
    """One row to measure; `batch` sequences per rank and step."""

    model: str
    batch: int
    sequence: int
    strategy: str
    implementation: str
    ranks: int
    device: str
    dtype: str
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Row(Recorded, Job):
    """A run of one implementation under one strategy, with where and how it was measured.

    backend             what runs Liger's ops
    tokens_per_second   summed over ranks; from the median step after the first two, where the slowest rank counts
    peak_bytes          the most memory that a rank held at once in those steps; peak_bytes_by_rank has them all (on
                        GPUs)
    losses              of every step, the mean over the ranks
    loss_difference     the largest one to the losses of hf under the same strategy
    loss_bound          what that may be for Liger: in float32 1e-3, else three times that of hf-reordered
    agrees              whether it is within the bound
    """

    backend: str | None
    tokens_per_second: float | None
    step_seconds: float | None
    peak_bytes: int | None
    peak_bytes_by_rank: list[int] | None
    losses: list[float] | None
    loss_difference: float | None
    loss_bound: float | None
    agrees: bool | None
    parameters: int | None


COLUMNS = Row.header()


def together(job: Job, of_ranks: Sequence[dict[str, Any]], before: Sequence[Row]) -> dict[str, Any]:
    """The columns that follow from what every rank measured, and from the rows of the same strategy that were measured
    before."""
    slowest = [max(seconds) for seconds in zip(*(rank["seconds"] for rank in of_ranks), strict=True)]
    step = statistics.median(slowest[WARM_UP:])
    peaks = [rank["peak_bytes"] for rank in of_ranks]
    losses = [statistics.fmean(of_step) for of_step in zip(*(rank["losses"] for rank in of_ranks), strict=True)]
    return {
        "backend": of_ranks[0]["backend"],
        "parameters": of_ranks[0]["parameters"],
        "tokens_per_second": job.ranks * job.batch * job.sequence / step,
        "step_seconds": step,
        "peak_bytes": None if None in peaks else max(peaks),
        "peak_bytes_by_rank": None if None in peaks else peaks,
        # JSON has no word for a number that is not finite.
        "losses": losses if all(map(math.isfinite, losses)) else None,
        **_agreement(job, losses, {row.implementation: row for row in before if row.losses is not None}),
    }


def _agreement(job: Job, losses: Sequence[float], others: dict[str, Row]) -> dict[str, Any]:
    if not all(map(math.isfinite, losses)):
        return {"agrees": False, "reason": "a loss is not finite", "failed": True}
    plain, reordered = others.get(PLAIN), others.get(REORDERED)
    if plain is None or plain.losses is None or job.implementation == PLAIN:
        return {}
    difference = largest_difference(plain.losses, losses)
    if job.implementation != LIGER or (job.dtype != "float32" and reordered is None):
        return {"loss_difference": difference}
    allowed = bound(None if job.dtype == "float32" or reordered is None else reordered.loss_difference)
    return {"loss_difference": difference, "loss_bound": allowed, "agrees": difference <= allowed}
