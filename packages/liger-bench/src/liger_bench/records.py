# SPDX-License-Identifier: Apache-2.0
"""The rows of a folder of results as dictionaries, of which the last measurement of each case counts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_bench.bench.rows import read_csv
from liger_bench.results import read_json
from liger_core.errors import OptionError

Record = dict[str, Any]
OPS, TABLE, SHARDED = "results.json", "results.csv", "sharded.json"
# Two rows with these columns equal measure the same case.
OP_IDENTITY = ("op", "workload", "implementation", "pass", "dtype", "device", "machine")
SHARDED_IDENTITY = ("op", "rows", "width", "classes", "implementation", "ranks", "dtype", "device", "machine")


@dataclass(frozen=True)
class Records:
    """Rows of ops, of ops along one size, and of heads on several ranks, each in the order of its first measurement."""

    ops: list[Record]
    scaling: list[Record]
    sharded: list[Record]

    @property
    def all(self) -> list[Record]:
        return [*self.ops, *self.scaling, *self.sharded]


def read(folder: Path) -> Records | None:
    """Return the rows of a folder, or None if there are none. Rows of ops are also read from a table without its JSON.

    Raises OptionError for rows of several machines or dtypes.
    """
    rows = _latest(read_json(folder / OPS) or read_csv(folder / TABLE), OP_IDENTITY)
    sharded = _latest(read_json(folder / SHARDED), SHARDED_IDENTITY)
    places = dict.fromkeys((row["machine"], row["dtype"]) for row in [*rows, *sharded])
    if len(places) > 1:
        pairs = "; ".join(f"{dtype} on {machine}" for machine, dtype in places)
        raise OptionError(
            f"report: {folder} must hold results of one machine and dtype, got {pairs}; give each a folder of its own"
        )
    ops = [row for row in rows if row.get("axis") is None]
    scaling = [row for row in rows if row.get("axis") is not None]
    return Records(ops, scaling, sharded) if places else None


def distinct(rows: Iterable[Record], column: str) -> list[Any]:
    """Return the distinct values of a column in the order of their first appearance."""
    return list(dict.fromkeys(row[column] for row in rows))


def sizes_of(workload: str) -> str:
    """Return the sizes at the beginning of a workload's name; a variant or the axis of a series follows them."""
    match = re.match(r"[0-9x+]+", workload)
    return match[0] if match else ""


def _latest(rows: list[Record], identity: tuple[str, ...]) -> list[Record]:
    """Return the rows, where a later measurement replaces the earlier one in its position."""
    return list({tuple(row.get(name) for name in identity): row for row in rows}.values())
