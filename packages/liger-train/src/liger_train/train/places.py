# SPDX-License-Identifier: Apache-2.0
"""Execute the runs of a sweep, each in its own process: on the CPU, on one GPU, or on several under torchrun."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from liger_bench.measurements import rows_as
from liger_bench.process import DONE, FAILED, READY, Answer, Process, failure
from liger_bench.results import read_json
from liger_bench.row import Measurement
from liger_core.errors import OptionError
from liger_train.row import Row, row_of
from liger_train.setup import Setup

# Seconds after which a process that is still loading has failed.
LOADING = 600.0


@dataclass(frozen=True)
class Extras:
    """The recordings of a run besides its row, and the folder for them."""

    folder: Path | None = None
    snapshot: bool = False
    profile: bool = False


class Place:
    """One GPU, or the CPU: a process that trains, and one that loads for the next run.

    folder    the folder for logs
    gpu       its index among the GPUs that this process sees; None for the default device
    share     the number of places that share the processors
    patience  seconds after which a run has failed
    answer    the function that the process runs
    """

    def __init__(
        self, folder: Path, gpu: int | None, share: int, patience: float, answer: Callable[[Any, Connection], Answer]
    ) -> None:
        self.folder, self.gpu, self.share, self.patience, self.answer = folder, gpu, share, patience, answer
        self.setup: Setup | None = None
        self.deadline = 0.0
        self._spare: Process | None = None
        self._running: Process | None = None

    def load(self) -> None:
        """Start a process that waits for a run, unless there is one."""
        if self._spare is None:
            with _environment(variables(self.gpu, self.share)):
                self._spare = Process(None, self.folder / f"{uuid.uuid4().hex}.log", LOADING, self.answer)

    def begin(self, setup: Setup, extras: Extras) -> None:
        self.load()
        self._running, self._spare, self.setup = self._spare, None, setup
        # If it died while loading, reading its answer reports that.
        if self._process.wait()[0] == READY:
            with contextlib.suppress(OSError):
                self._process.connection.send((setup, extras))
        self.deadline = time.monotonic() + self.patience

    @property
    def died(self) -> bool:
        """Whether the process will send no more answers."""
        return self._process.answered[0] == FAILED

    @property
    def connection(self) -> Connection:
        return self._process.connection

    def end(self, where: dict[str, str]) -> Measurement[Row]:
        """The row of the run, once it has answered or timed out."""
        process, setup = self._process, self.setup
        if setup is None:
            raise RuntimeError("nothing is running here")
        if not self.died:
            # Do not wait if there is no answer yet.
            process.patience = 0.0
            process.wait()
        state, results = process.answered
        late = state == FAILED and results["reason"].startswith("no answer")
        # It is done, and the cleanup of libraries at exit can take long.
        process.kill()
        self._running = self.setup = None
        if late:
            results = results | {"reason": f"timed out after {self.patience:.0f} s"}
        row = row_of(setup, where, results) if state == FAILED else results["row"]
        return Measurement(row, process.written())

    def close(self) -> None:
        for process in (self._running, self._spare):
            if process is not None:
                process.kill()

    @property
    def _process(self) -> Process:
        if self._running is None:
            raise RuntimeError("nothing is running here")
        return self._running


def finished(busy: Sequence[Place]) -> list[Place]:
    """The places whose run has answered or timed out; waits for the first one."""
    died = [worker for worker in busy if worker.died]
    if died or not busy:
        return died
    by_connection: dict[Any, Place] = {worker.connection: worker for worker in busy}
    ready = wait(list(by_connection), timeout=max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
    return [by_connection[each] for each in ready] or [worker for worker in busy if time.monotonic() >= worker.deadline]


def launched(
    setup: Setup, where: dict[str, str], gpus: Sequence[int], extras: Extras, folder: Path, patience: float
) -> Measurement[Row]:
    """A run of several ranks: the command that a user would run, with this Python and its own port."""
    out, log = folder / uuid.uuid4().hex, folder / f"{uuid.uuid4().hex}.log"
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        *shlex.split(setup.command())[1:],
        "--out",
        str(out),
    ]
    words += [f"--{name}" for name in ("snapshot", "profile") if getattr(extras, name)]
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(variables(gpu, 1)["CUDA_VISIBLE_DEVICES"] for gpu in gpus)
    reason = f"timed out after {patience:.0f} s"
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code = process.wait(timeout=patience)
            reason = f"torchrun ended with exit code {code} and without a row"
        except subprocess.TimeoutExpired:
            pass
        finally:
            # This also stops its ranks.
            process.terminate()
            process.wait()
    written = log.read_text(errors="replace")
    rows = rows_as(Row, read_json(out / "train.json"))
    if not rows:
        return Measurement(row_of(setup, where, {"reason": reason, "failed": True}), written)
    if extras.folder is not None:
        for subfolder in out.glob("*/"):
            shutil.copytree(subfolder, extras.folder / subfolder.name, dirs_exist_ok=True)
    return Measurement(rows[-1], written)


def check(setup: Setup, extras: Extras) -> None:
    """Raise OptionError if the extras cannot be recorded."""
    if (extras.snapshot or extras.profile) and extras.folder is None:
        raise OptionError("train: --snapshot and --profile need --out, the folder that they write to")
    if extras.snapshot and extras.profile and setup.device == "cpu":
        raise OptionError(
            "train: --snapshot and --profile need the same profiler on the CPU, got both; give one at a time"
        )


def observers(setup: Setup, extras: Extras, stack: ExitStack) -> list[Any]:
    """The callbacks that record a run until the stack is closed."""
    callbacks: list[Any] = []
    if extras.folder is not None and extras.snapshot:
        from liger_train.train.snapshot import Snapshot

        callbacks.append(stack.enter_context(Snapshot(setup, extras.folder)))
    if extras.folder is not None and extras.profile:
        from liger_train.train.profile import Profile

        callbacks.append(stack.enter_context(Profile(setup, extras.folder)))
    return callbacks


def variables(gpu: int | None, share: int) -> dict[str, str]:
    """Environment variables for a process that uses only this GPU and its share of the processors."""
    environment: dict[str, str] = {}
    if gpu is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu] if seen else str(gpu)
    if share > 1:
        environment["OMP_NUM_THREADS"] = str(threads(share))
    return environment


def threads(share: int) -> int:
    """Threads for each of `share` concurrent runs."""
    return max(1, (os.cpu_count() or 1) // share)


def train(job: None, connection: Connection) -> Answer:
    """Load the libraries, wait for a setup, and train; this is the main function of a process."""
    try:
        # Imported here, so that the parent process does not load it.
        from liger_train.train.run import run

        connection.send((READY, {}))
        setup, extras = connection.recv()
        with ExitStack() as stack:
            return DONE, {"row": run(setup, observers=observers(setup, extras, stack))}
    except Exception as error:
        return failure(error)


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for processes started within this context."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
