# SPDX-License-Identifier: Apache-2.0
"""Run a job in its own process: libraries may patch classes, memory starts clean, and a crash affects no other job."""

import multiprocessing
import os
import re
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from liger_bench.ending import end

# Parts of the messages of PyTorch's allocators, CUDA, and cuBLAS, which allocates its own workspace.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
DONE, FAILED = "done", "failed"
Answer = tuple[str, dict[str, Any]]


class Process:
    """A process that runs a job and ends.

    answer(job, connection) runs in the process; it may send answers, and returns the last one.
    """

    def __init__(self, job: Any, log: Path, patience: float, answer: Callable[[Any, Connection], Answer]) -> None:
        self.log, self.patience = log, patience
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(job, theirs, log, answer))
        self.process.start()
        # Only the process holds the other end now, so reading fails if it dies.
        theirs.close()

    def wait(self) -> Answer:
        """Return the next answer, or a failure with its reason if the process died or took too long."""
        try:
            if self.connection.poll(self.patience):
                return self.connection.recv()
            self.process.kill()
            return FAILED, {"reason": f"no answer in {self.patience:.0f} s", "failed": True}
        except (EOFError, OSError):
            self.process.join(timeout=10)
            reason = f"the process died: {ending(self.process.exitcode)}{last_words(self.written())}"
            return FAILED, {"reason": reason, "failed": True}

    def end(self) -> None:
        """Wait for the process to end by itself, which frees the device's memory for the next one."""
        self.process.join(timeout=30)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()

    def written(self) -> str:
        """Return the output and errors of the process."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def last_words(written: str) -> str:
    """The end of a sentence on a process: the last line of its output."""
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    return f"; it wrote: {lines[-1][:300]}" if lines else ""


def ending(code: int | None) -> str:
    """How a process with this exit code ended."""
    if code is None:
        return "for no known reason"
    if code < 0:
        return signal.Signals(-code).name + (", as when the host is out of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"


def _work(job: Any, connection: Connection, log: Path, answer: Callable[[Any, Connection], Answer]) -> None:
    # The output of libraries and compilers would break the progress bar.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    connection.send(answer(job, connection))
    end()


def failure(error: Exception) -> Answer:
    """Return the answer for an error, and print its traceback to the log unless the process ran out of memory."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return FAILED, {"reason": f"out of memory: {_requested_size(str(error))}", "out_of_memory": True}
    traceback.print_exception(error)
    return FAILED, {"reason": f"{type(error).__name__}: {error}".splitlines()[0], "failed": True}


def _requested_size(message: str) -> str:
    """Return the parts of PyTorch's message with the requested size and the memory of the device or the limit on it."""
    first = next(iter(message.splitlines()), "of the host")
    tried, *rest = first.removeprefix("CUDA out of memory. ").split(". ")
    allowed = re.search(r"[0-9.]+ [KMGT]iB allowed", message)
    return ". ".join([tried, allowed[0] if allowed else rest[0]]) if rest else tried
