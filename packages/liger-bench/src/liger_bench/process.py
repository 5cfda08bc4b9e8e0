# SPDX-License-Identifier: Apache-2.0
"""One job in a process of its own: other libraries patch classes, memory starts clean, and a crash does not affect the
other jobs."""

from __future__ import annotations

import contextlib
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

# Of PyTorch's allocators, CUDA, and cuBLAS, which takes its workspace past them.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
READY, DONE, FAILED = "ready", "done", "failed"
Answer = tuple[str, dict[str, Any]]


class Process:
    """A started job: it gets ready, waits for a signal, measures, and ends.

    answer(job, connection) is what the process does: it may send answers, and returns the last one.
    """

    def __init__(self, job: Any, log: Path, patience: float, answer: Callable[[Any, Connection], Answer]) -> None:
        self.job, self.log, self.patience = job, log, patience
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(job, theirs, log, answer))
        self.process.start()
        # Only the process itself holds the other end now, so that its death is noticed.
        theirs.close()
        self._answer: Answer | None = None

    @property
    def answered(self) -> Answer:
        """Its last answer, waited for if there is none yet."""
        return self.wait() if self._answer is None else self._answer

    def wait(self) -> Answer:
        """Its next answer; a process that died or took too long is a failure with its reason."""
        self._answer = self._receive()
        return self._answer

    def measure(self) -> None:
        """Let it measure, and wait for the result; a job that has already failed stays as it is."""
        if self.answered[0] == READY:
            # If it died meanwhile, reading its answer reports that.
            with contextlib.suppress(OSError):
                self.connection.send("go")
            self.wait()

    def end(self) -> None:
        """Let it end by itself, so that the device's memory is free when the next one begins."""
        self.process.join(timeout=30)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()

    def _receive(self) -> Answer:
        try:
            if self.connection.poll(self.patience):
                answer: Answer = self.connection.recv()
                return answer
            self.process.kill()
            return FAILED, {"reason": f"no answer in {self.patience:.0f} s", "failed": True}
        except (EOFError, OSError):
            self.process.join(timeout=10)
            return FAILED, {
                "reason": f"the process died: {_ending(self.process.exitcode)}{self._last_words()}",
                "failed": True,
            }

    def written(self) -> str:
        """Its output and errors."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.written().splitlines() if line.strip()]
        return f"; it wrote: {lines[-1][:300]}" if lines else ""


def _ending(code: int | None) -> str:
    if code is None:
        return "for no known reason"
    if code < 0:
        return signal.Signals(-code).name + (", as when the host is out of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"


def _work(job: Any, connection: Connection, log: Path, answer: Callable[[Any, Connection], Answer]) -> None:
    """The work of the process."""
    # Warnings of libraries, and what compilers write, would tear the progress bar.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    connection.send(answer(job, connection))
    end()


def failure(error: Exception) -> Answer:
    """The answer of a process that could not measure; unless it ran out of memory, the traceback goes to its log."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return FAILED, {"reason": f"out of memory: {_asked(str(error))}", "out_of_memory": True}
    traceback.print_exception(error)
    return FAILED, {"reason": f"{type(error).__name__}: {error}".splitlines()[0], "failed": True}


def _asked(message: str) -> str:
    """The parts of PyTorch's message that say what was requested, and how much memory the device has or is allowed."""
    first = next(iter(message.splitlines()), "of the host")
    tried, *rest = first.removeprefix("CUDA out of memory. ").split(". ")
    allowed = re.search(r"[0-9.]+ [KMGT]iB allowed", message)
    return ". ".join([tried, allowed[0] if allowed else rest[0]]) if rest else tried
