# SPDX-License-Identifier: Apache-2.0
"""The progress of long commands: a bar on a terminal, and lines in a log."""

from datetime import timedelta
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

# Seconds until the first line of a log, and from one line to the next.
FIRST_LINE, NEXT_LINE = 1.0, 5.0


def progress_bar() -> Progress:
    """Return a progress bar on standard error, or a log of a line every few seconds if that is not a terminal.

    The `unit` of a task names what it counts in a log: bar.add_task("training", total=20, unit="step").
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    kind = Progress if console.is_terminal else _Log
    return kind(*columns, console=console, transient=True, disable=not console.is_terminal)


class _Log(Progress):
    """Print the newest task's state whenever it changes, so a job that is killed leaves a log of its progress."""

    def start(self) -> None:
        self._ended = Event()
        self._said = ""
        self._thread = Thread(target=self._watch, name="liger-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._say()

    def _watch(self) -> None:
        wait = FIRST_LINE
        while not self._ended.wait(wait):
            wait = NEXT_LINE
            self._say()

    def _say(self) -> None:
        if not self.tasks:
            return
        task = self.tasks[-1]
        state = " · ".join(text for text in (_counted(task), task.description) if text)
        if state and state != self._said:
            self._said = state
            elapsed = timedelta(seconds=int(task.elapsed or 0))
            self.console.print(f"{state} · {elapsed}", markup=False, highlight=False, soft_wrap=True)


def _counted(task: Task) -> str:
    return (
        "" if task.total is None else f"{task.fields.get('unit', '')} {task.completed:,.0f}/{task.total:,.0f}".strip()
    )
