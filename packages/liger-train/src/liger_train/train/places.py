# SPDX-License-Identifier: Apache-2.0
"""Execute the runs of a sweep: each is the command that a user would run, on the CPU or on some of the GPUs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from liger_bench.measurements import rows_as
from liger_bench.process import ending, last_words
from liger_bench.results import read_json
from liger_bench.row import Measurement
from liger_core.errors import OptionError
from liger_train.options import RunOptions
from liger_train.row import Row, row_of
from liger_train.setup import Setup


class Started:
    """A run in a process of its own, which writes to files in `folder`.

    gpus      the GPUs that it uses, among those that this process sees; none for the default device
    share     the number of runs that share the processors
    patience  seconds after which it has failed
    """

    def __init__(
        self, setup: Setup, options: RunOptions, folder: Path, gpus: list[int], share: int, patience: float
    ) -> None:
        self.setup, self.options, self.gpus, self.patience = setup, options, gpus, patience
        self.deadline = time.monotonic() + patience
        self.out = folder / uuid.uuid4().hex
        self.log = self.out.with_suffix(".log")
        words = [*command(setup), "--out", str(self.out)]
        words += [f"--{name}" for name in ("snapshot", "profile") if getattr(options, name)]
        environment = os.environ | variables(gpus, share)
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def over(self) -> bool:
        """Whether it has ended or taken too long."""
        return self.process.poll() is not None or time.monotonic() >= self.deadline

    def kill(self) -> None:
        # torchrun stops its ranks when it is asked to end; a single process would finish its step.
        (self.process.terminate if self.setup.ranks > 1 else self.process.kill)()
        self.process.wait()

    def row(self, where: dict[str, str]) -> Measurement[Row]:
        """Return the row of the run, once it is over."""
        code = self.process.poll()
        self.kill()
        written = self.log.read_text(errors="replace")
        if rows := rows_as(Row, read_json(self.out / "train.json")):
            if self.options.out is not None:
                for subfolder in self.out.glob("*/"):
                    shutil.copytree(subfolder, self.options.out / subfolder.name, dirs_exist_ok=True)
            return Measurement(rows[-1], written)
        reason = f"timed out after {self.patience:.0f} s"
        if code is not None:
            reason = f"the process died: {ending(code)}{last_words(written)}"
        return Measurement(row_of(self.setup, where, {"reason": reason, "failed": True}), written)


def command(setup: Setup) -> list[str]:
    """Return the command of a run with this Python, with a port of its own for several ranks, and without defaults."""
    _, *words = shlex.split(setup.command())
    words = ["torch.distributed.run", "--standalone", *words] if setup.ranks > 1 else ["liger_core", *words]
    for name in ("device", "liger", "precision", "checkpoint"):
        words += [f"--{name}", getattr(setup, name)]
    return [sys.executable, "-m", *words]


def check(setup: Setup, options: RunOptions) -> None:
    """Raise OptionError if --snapshot or --profile cannot be recorded."""
    if (options.snapshot or options.profile) and options.out is None:
        raise OptionError("train: --snapshot and --profile need --out, the folder that they write to")
    if options.snapshot and options.profile and setup.device == "cpu":
        raise OptionError(
            "train: --snapshot and --profile need the same profiler on the CPU, got both; give one at a time"
        )


def observers(setup: Setup, options: RunOptions, stack: ExitStack) -> list[Any]:
    """The callbacks that record a run until the stack is closed."""
    callbacks: list[Any] = []
    if options.out is not None and options.snapshot:
        from liger_train.train.snapshot import Snapshot

        callbacks.append(stack.enter_context(Snapshot(setup, options.out)))
    if options.out is not None and options.profile:
        from liger_train.train.profile import Profile

        callbacks.append(stack.enter_context(Profile(setup, options.out)))
    return callbacks


def variables(gpus: Sequence[int], share: int) -> dict[str, str]:
    """Environment variables for a process that uses only these GPUs and its share of the processors."""
    environment: dict[str, str] = {}
    if gpus:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[gpu] if seen else str(gpu) for gpu in gpus)
    if share > 1:
        environment["OMP_NUM_THREADS"] = str(threads(share))
    return environment


def threads(share: int) -> int:
    """Threads for each of `share` concurrent runs."""
    return max(1, (os.cpu_count() or 1) // share)
