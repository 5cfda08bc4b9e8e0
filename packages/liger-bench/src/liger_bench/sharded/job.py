# SPDX-License-Identifier: Apache-2.0
"""One head on several ranks, and its row of results."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from liger_bench.row import ResultRow


@dataclass(frozen=True)
class HeadJob:
    """One row to measure: forward and backward of an op on `rows` tokens."""

    op: str
    rows: int
    width: int
    classes: int
    implementation: str
    ranks: int
    device: str
    dtype: str


@dataclass(frozen=True)
class HeadRow(ResultRow, HeadJob):
    """The figures of one job.

    seconds     the median over repetitions of the slowest rank's time
    low, high   the 0.2 and 0.8 quantiles
    efficiency  the time of Liger on one rank ÷ (ranks × seconds)
    peak_bytes  the peak memory beyond the inputs on the worst rank, gradients included
    loss        the loss of the first repetition
    """

    seconds: float | None
    low: float | None
    high: float | None
    efficiency: float | None
    peak_bytes: int | None
    loss: float | None


COLUMNS = HeadRow.header()


def combine_ranks(job: HeadJob, of_ranks: Sequence[Mapping[str, Any]], alone: float | None) -> dict[str, Any]:
    """Return the columns computed from the measurements of all ranks; `alone` is the seconds of Liger on one rank."""
    slowest = [max(seconds) for seconds in zip(*(rank["seconds"] for rank in of_ranks), strict=True)]
    low, *_, high = statistics.quantiles(slowest, n=5) if len(slowest) > 1 else (slowest[0], slowest[0])
    seconds = statistics.median(slowest)
    return {
        "seconds": seconds,
        "low": low,
        "high": high,
        "efficiency": None if alone is None else alone / (job.ranks * seconds),
        "peak_bytes": max(rank["peak_bytes"] for rank in of_ranks),
        "loss": of_ranks[0]["loss"],
    }
