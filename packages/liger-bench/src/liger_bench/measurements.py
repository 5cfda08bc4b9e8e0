# SPDX-License-Identifier: Apache-2.0
"""Measure one job after the other, reuse the rows of earlier runs, and write each new row at once."""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from liger_bench.machine import ENVIRONMENT
from liger_bench.progress import progress_bar
from liger_bench.results import Columns, append_csv, append_json, check_csv, read_json
from liger_bench.row import Measurement, ResultRow
from liger_bench.writable import check_file, check_folder
from liger_core.errors import OptionError, nearest

Job = TypeVar("Job")
R = TypeVar("R", bound=ResultRow)
M = TypeVar("M", bound=Measurement[Any])
Show = Callable[[str], object]
# A function that measures the remaining jobs, given the known rows, and shows its progress.
Measure = Callable[[list[Job], list[R], Show], Generator[M, None, None]]


def check_known(command: str, option: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise OptionError for a name that is not a known value of the option."""
    for name in names:
        if name not in known:
            raise OptionError(
                f"{command}: {option} must be one of {', '.join(known)}, got {name!r}.{nearest(name, known)}"
            )


@dataclass(frozen=True)
class Files:
    """The files that rows are written to, if any.

    name, out  the rows go to `name`.csv and `name`.json in the folder `out`
    header     the column names in the first line of a table
    csv        another table
    """

    name: str
    header: list[str]
    out: Path | None = None
    csv: Path | None = None

    @property
    def tables(self) -> list[Path]:
        return [path for path in (self.csv, self.out / f"{self.name}.csv" if self.out else None) if path]

    @property
    def rows(self) -> Path | None:
        return self.out / f"{self.name}.json" if self.out else None

    def check(self) -> None:
        """Raise OptionError if rows cannot be appended, before hours are spent on them."""
        if self.out is not None:
            check_folder("results: --out", self.out)
        if self.csv is not None:
            check_file("results: --csv", self.csv)
        for path in self.tables:
            check_csv(path, self.header)
        self.read()

    def read(self) -> list[Columns]:
        return read_json(self.rows) if self.rows else []

    def append(self, rows: Sequence[Columns]) -> None:
        for path in self.tables:
            append_csv(rows, path, self.header)
        if self.rows:
            append_json(rows, self.rows)


def rows_as(kind: type[R], rows: Sequence[Columns]) -> list[R]:
    """Return the rows read from a file; a column that an older version did not write is empty."""
    names = [field.name for field in fields(kind)]
    return [kind(**{name: row.get(name) for name in names}) for row in rows]  # type: ignore[arg-type]


def completed(
    case: type, jobs: list[Job], where: dict[str, str], before: list[R], files: Files, measure: Measure[Job, R, M]
) -> tuple[list[R], list[M]]:
    """Return the rows of all jobs, in order, and the measurements of those jobs without a row in `before`.

    case  a dataclass whose fields are those of a job and its row that identify a measurement on one machine with the
          same versions and commit
    """
    identity, environment = attrgetter(*(field.name for field in fields(case))), attrgetter(*ENVIRONMENT)
    known = {identity(row): row for row in before if environment(row) == tuple(where[name] for name in ENVIRONMENT)}
    todo = [job for job in jobs if identity(job) not in known]
    reused = [known[identity(job)] for job in jobs if identity(job) in known]
    results = _measured(len(todo), lambda show: measure(todo, reused, show), files)
    order = {identity(job): number for number, job in enumerate(jobs)}
    return sorted([*reused, *(result.row for result in results)], key=lambda row: order[identity(row)]), results


def _measured(count: int, begin: Callable[[Show], Generator[M, None, None]], files: Files) -> list[M]:
    """Measure with a progress bar, and write each row at once, because a later job may crash."""
    measurements: list[M] = []
    with progress_bar() as bar:
        task = bar.add_task("", total=count)
        # Closing the generator ends its processes, also after an interruption.
        with closing(begin(lambda doing: bar.update(task, description=doing))) as results:
            for result in results:
                measurements.append(result)
                files.append([result.row.columns()])
                bar.advance(task)
    return measurements


def print_failures(results: Sequence[Measurement[Any]]) -> None:
    """Print the last output of failed processes to standard error."""
    for result in results:
        if result.row.failed:
            Console(stderr=True).print(result.written[-4000:], markup=False, highlight=False)
