# SPDX-License-Identifier: Apache-2.0
"""All jobs of a run: those of one strategy in the same processes, unless one of them fails."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from pathlib import Path

from liger_bench.distributed.job import Job, Row, together
from liger_bench.distributed.rank import Share, answer
from liger_bench.distributed.strategies import STRATEGIES
from liger_bench.process import FAILED, Process
from liger_bench.ranks import answers_of
from liger_bench.row import Measured, row_from

Phase = Callable[[Job], object]


def measured(
    jobs: Sequence[Job],
    where: dict[str, str],
    patience: float,
    before: Sequence[Row] = (),
    phase: Phase = lambda job: None,
) -> Generator[Measured[Row], None, None]:
    """Each job's row; one that takes longer than `patience` has failed. `before` are rows to compare losses with."""
    rows = list(before)
    with tempfile.TemporaryDirectory(prefix="liger-bench-") as folder:
        for name, same in groupby(jobs, key=lambda job: job.strategy):
            rest = list(same)
            missing = STRATEGIES[name].missing()
            if missing is not None:
                yield from (Measured(row_from(Row, job, where, {"reason": missing})) for job in rest)
                continue
            while rest:
                # After a failure, the remaining jobs start in new processes.
                for found in _until_one_fails(
                    rest, where, patience, [row for row in rows if row.strategy == name], Path(folder), phase
                ):
                    rest = rest[1:]
                    rows.append(found.row)
                    yield found


def _until_one_fails(
    jobs: Sequence[Job], where: dict[str, str], patience: float, before: list[Row], folder: Path, phase: Phase
) -> Generator[Measured[Row], None, None]:
    name = uuid.uuid4().hex
    ranks: list[Process] = []
    try:
        for rank in range(jobs[0].ranks):
            share = Share(tuple(jobs), rank, str(folder / f"{name}.store"))
            ranks.append(Process(share, folder / f"{name}-{rank}.log", patience, answer))
        for job in jobs:
            phase(job)
            answers = answers_of(ranks, patience)
            failed = next((results for state, results in answers if state == FAILED), None)
            if failed is not None:
                yield Measured(row_from(Row, job, where, failed), "\n".join(process.written() for process in ranks))
                return
            row = row_from(Row, job, where, together(job, [results for _, results in answers], before))
            before.append(row)
            yield Measured(row)
        for process in ranks:
            process.end()
    finally:
        for process in ranks:
            process.kill()
