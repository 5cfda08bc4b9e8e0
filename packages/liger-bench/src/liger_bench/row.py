# SPDX-License-Identifier: Apache-2.0
"""The columns that all result rows share: whether there are figures, and where and when they were measured."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Generic, TypeVar


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """The last columns of a row.

    out_of_memory  whether it ran out of memory, which is a result and not a failure
    failed         whether the measurement ended without a result
    reason         why there are no figures, else empty
    """

    out_of_memory: bool = False
    failed: bool = False
    reason: str = ""
    machine: str
    versions: str
    commit: str
    date: str

    @classmethod
    def header(cls) -> list[str]:
        """Return the names of all columns in the order of a table."""
        last = [field.name for field in fields(ResultRow)]
        return [*(field.name for field in fields(cls) if field.name not in last), *last]

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.header()}


R = TypeVar("R", bound=ResultRow)


@dataclass(frozen=True)
class Measurement(Generic[R]):
    """A row and the output of the processes that measured it."""

    row: R
    written: str = ""


def row_from(kind: type[R], job: Any, where: Mapping[str, str], results: Mapping[str, Any]) -> R:
    """Return the row of a job; a column that is in neither the job nor the results is empty."""
    names = kind.header()
    empty = {field.name: None for field in fields(kind) if field.default is MISSING}
    job_values = {name: value for name, value in asdict(job).items() if name in names}
    return kind(**(empty | job_values | dict(where) | dict(results)))
