# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a run, and each run of a sweep as a process, by the command that a user would enter."""

import logging
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
from liger_train import ranks
from liger_train.errors import SetupError
from liger_train.options import RunOptions
from liger_train.row import Row, row_of
from liger_train.setup import Setup


class RunProcess:
    """The process of a run, which writes to files in `folder`.

    gpus     indices of the GPUs that it uses, among those that this process sees; none for the default device
    share    the number of runs that share the processors
    timeout  seconds after which the run has failed
    """

    def __init__(
        self, setup: Setup, options: RunOptions, folder: Path, gpus: list[int], share: int, timeout: float
    ) -> None:
        self.setup, self.options, self.gpus, self.timeout = setup, options, gpus, timeout
        self.deadline = time.monotonic() + timeout
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
    def has_ended(self) -> bool:
        """Whether the process has ended or timed out."""
        return self.process.poll() is not None or time.monotonic() >= self.deadline

    def kill(self) -> None:
        # On SIGTERM, torchrun stops its ranks, but a single process would finish its step.
        (self.process.terminate if self.setup.ranks > 1 else self.process.kill)()
        self.process.wait()

    def row(self, where: dict[str, str]) -> Measurement[Row]:
        """Return the row of the run after it has ended."""
        code = self.process.poll()
        self.kill()
        log = self.log.read_text(errors="replace")
        if rows := rows_as(Row, read_json(self.out / "train.json")):
            if self.options.out is not None:
                for subfolder in self.out.glob("*/"):
                    shutil.copytree(subfolder, self.options.out / subfolder.name, dirs_exist_ok=True)
            return Measurement(rows[-1], log)
        reason = f"timed out after {self.timeout:.0f} s"
        if code is not None:
            reason = f"the process died: {ending(code)}{last_words(log)}"
        return Measurement(row_of(self.setup, where, {"reason": reason, "failed": True}), log)


def command(setup: Setup) -> list[str]:
    """Return the command of a run, with explicit values for options whose defaults depend on the device."""
    words = shlex.split(setup.command())
    words = words[words.index("train") :]
    for name in ("ranks", "device", "liger", "precision", "checkpoint"):
        words += [f"--{name}", str(getattr(setup, name))]
    return [sys.executable, "-m", "liger_core", *words]


def start_ranks(count: int) -> int:
    """Start this command again by torchrun, as so many ranks, and return the exit code of the first that failed.

    The ranks print errors: torchrun's traceback is not printed. It passes Ctrl-C on to them.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)
    # DistributedDataParallel warns that it found no unused parameters, for which it must look; see arguments.py.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    options = ["--standalone", "--nproc-per-node", str(count)]
    try:
        run.main([*options, "-m", "liger_core", *sys.argv[1:]])
    except SignalException as caught:
        return 128 + caught.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        print(f"train: rank {rank} died: {ending(failure.exitcode)}", file=sys.stderr)
        return ranks.FAILED
    return 0


def check(setup: Setup, options: RunOptions) -> None:
    """Raise OptionError for --snapshot or --profile without --out, or for both on the CPU."""
    if (options.snapshot or options.profile) and options.out is None:
        raise SetupError("--snapshot and --profile need --out, the folder that they write to")
    if options.snapshot and options.profile and setup.device == "cpu":
        raise SetupError("--snapshot and --profile need the same profiler on the CPU, got both; give one at a time")


def observers(setup: Setup, options: RunOptions, stack: ExitStack) -> list[Any]:
    """Return the callbacks for --snapshot and --profile, which record until the stack is closed."""
    callbacks: list[Any] = []
    if options.out is not None and options.snapshot:
        from liger_train.runs.snapshot import Snapshot

        callbacks.append(stack.enter_context(Snapshot(setup, options.out)))
    if options.out is not None and options.profile:
        from liger_train.runs.profile import Profile

        callbacks.append(stack.enter_context(Profile(setup, options.out)))
    return callbacks


def variables(gpus: Sequence[int], share: int) -> dict[str, str]:
    """Return environment variables for a process that uses these GPUs and its share of the processors."""
    environment: dict[str, str] = {}
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[gpu] if visible else str(gpu) for gpu in gpus)
    if share > 1:
        environment["OMP_NUM_THREADS"] = str(threads(share))
    return environment


def threads(share: int) -> int:
    """Return the number of threads for each of `share` concurrent runs."""
    return max(1, (os.cpu_count() or 1) // share)
