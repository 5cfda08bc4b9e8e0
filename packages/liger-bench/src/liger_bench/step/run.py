# SPDX-License-Identifier: Apache-2.0
"""All jobs of a run: each round has a process for each implementation, one after the other."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from liger_bench.process import DONE, Answer, Process, failure
from liger_bench.row import Measured, row_from
from liger_bench.step.cases import CASES
from liger_bench.step.job import Job, Row

QUANTILES = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
LIMITS = ("product_flops_per_second", "copy_bytes_per_second", "limit_seconds", "limit_without_recompute_seconds")


@dataclass(frozen=True)
class Timing:
    """The length of a measurement: `rounds` processes of at most `steps` steps and `seconds` seconds.

    A process that takes longer than `patience` seconds has failed.
    """

    steps: int
    seconds: float
    rounds: int
    patience: float


@dataclass(frozen=True)
class Turn:
    """The job of one process, and how long it measures."""

    job: Job
    steps: int
    seconds: float


def measured(
    jobs: Sequence[Job], where: Mapping[str, str], timing: Timing, phase: Callable[[Job], object] = lambda job: None
) -> Generator[Measured[Row], None, None]:
    """Measure each job and yield its row.

    The implementations of a case alternate, so changes on the machine affect all of them.
    """
    from liger_bench.step.training import missing

    with tempfile.TemporaryDirectory(prefix="liger-bench-") as folder:
        for _, same in groupby(jobs, key=lambda job: job.case):
            these = list(same)
            answers: dict[Job, list[Answer]] = {job: [] for job in these}
            written = dict.fromkeys(these, "")
            reasons = {job: missing(job) for job in these}
            for _ in range(timing.rounds):
                for job in these:
                    if reasons[job] is None and all(state == DONE for state, _ in answers[job]):
                        phase(job)
                        found, log = _answer(Turn(job, timing.steps, timing.seconds), timing.patience, Path(folder))
                        answers[job].append(found)
                        written[job] += log
            for job in these:
                batch, sequence = CASES[job.case].shape(job.tiny)
                figures = _together(answers[job], reasons[job], batch * sequence)
                yield Measured(
                    row_from(Row, job, where, {"batch": batch, "sequence": sequence} | figures), written[job]
                )


def _answer(turn: Turn, patience: float, folder: Path) -> tuple[Answer, str]:
    process = Process(turn, folder / f"{uuid.uuid4().hex}.log", patience, answer)
    try:
        found = process.wait()
        process.end()
        return found, process.written()
    finally:
        process.kill()


def answer(turn: Turn, connection: Connection) -> Answer:
    """Measure one turn, in its own process."""
    try:
        # Here, so that the process which only waits need not load Transformers.
        from liger_bench.step.training import measured as figures

        return DONE, figures(turn.job, turn.steps, turn.seconds)
    except Exception as error:
        return failure(error)


def _together(answers: Sequence[Answer], reason: str | None, tokens: int) -> dict[str, Any]:
    """Return the columns of a row from the results of all rounds."""
    if reason is not None:
        return {"reason": reason}
    failed = next((results for state, results in answers if state != DONE), None)
    if failed is not None:
        return failed
    rounds = [results for _, results in answers]
    taken = torch.tensor([seconds for results in rounds for seconds in results["taken"]], dtype=torch.float64)
    low, middle, high = taken.quantile(QUANTILES).tolist()
    limits = {name: median(results[name] for results in rounds) for name in LIMITS}
    return limits | {
        "tokens_per_second": tokens / middle,
        "step_seconds": middle,
        "low_seconds": low,
        "high_seconds": high,
        "share": limits["limit_seconds"] / middle,
        "peak_bytes": max(results["peak_bytes"] for results in rounds),
        "loss": rounds[0]["loss"],
        "replaced": rounds[0]["replaced"],
        "steps": len(taken),
        "rounds": len(rounds),
    }
