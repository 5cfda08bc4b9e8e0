# SPDX-License-Identifier: Apache-2.0
"""All jobs of a run: several may be prepared at once, but they are measured one after the other."""

from __future__ import annotations

import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from liger_bench.model.implementations import IMPLEMENTATIONS
from liger_bench.model.job import Job, Row, row_of
from liger_bench.process import DONE, FAILED, READY, Answer, Process, failure
from liger_bench.row import Measured

# Compiling a large model takes minutes; nothing takes this long.
PATIENCE = 900.0

Phase = Callable[[Job, str], object]


@dataclass(frozen=True)
class Profiled(Measured[Row]):
    """A row, the output of its process, and the longest kernels if requested."""

    kernels: Sequence[dict[str, Any]] = ()


def measured(
    jobs: Sequence[Job], where: dict[str, str], together: int, phase: Phase = lambda job, doing: None
) -> Generator[Profiled, None, None]:
    """Each job's row. `together` processes load and compile at once; then each in turn has the device for itself.

    Running out of memory while other processes hold some is not a result: such a job is repeated alone.
    """
    groups = deque(_groups(jobs, together))
    with tempfile.TemporaryDirectory(prefix="liger-bench-") as folder:
        while groups:
            able: list[Job] = []
            for job in groups.popleft():
                missing = IMPLEMENTATIONS[job.implementation].missing(job.device)
                if missing is None:
                    able.append(job)
                else:
                    yield Profiled(row_of(job, where, {"reason": missing}))
            for process in _in_turn(able, Path(folder), phase):
                if process.ran_out_of_memory and len(able) > 1:
                    groups.append([process.job])
                else:
                    yield _result(process, where)


def answer(job: Job, connection: Connection) -> Answer:
    """The work of the process of a job."""
    try:
        # Here, so that the process which only waits need not load it.
        from liger_bench.model.training import Training

        training = Training(job)
        training.prepare()
        connection.send((READY, {}))
        connection.recv()
        figures = training.measure()
        kernels = training.kernels(job.kernels) if job.kernels else []
        return DONE, {"figures": figures, "kernels": kernels}
    except Exception as error:
        return failure(error)


def _in_turn(jobs: list[Job], folder: Path, phase: Phase) -> Iterator[Process]:
    """The processes of some jobs, each when it has ended."""
    started: list[Process] = []
    try:
        for job in jobs:
            phase(job, "preparing")
            log = folder / f"{uuid.uuid4().hex}.log"
            started.append(Process(job, log, PATIENCE, answer))
        for process in started:
            process.wait()
        for process in started:
            phase(process.job, "measuring")
            process.measure()
            process.end()
            yield process
    finally:
        for process in started:
            process.kill()


def _result(process: Process, where: dict[str, str]) -> Profiled:
    state, results = process.answered
    if state == FAILED:
        return Profiled(row_of(process.job, where, results), process.written())
    return Profiled(row_of(process.job, where, results["figures"]), kernels=results["kernels"])


def _groups(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """So many at a time, all of one shape, so that none has to wait for a larger one."""
    for _, same in groupby(jobs, key=lambda job: (job.model, job.shape)):
        rest = list(same)
        yield from (rest[start : start + size] for start in range(0, len(rest), size))
