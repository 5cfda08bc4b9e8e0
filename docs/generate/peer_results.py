# SPDX-License-Identifier: Apache-2.0
"""Rows of committed results in which an op of ours and liger-kernel were measured in one run."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liger_bench.results import read_json

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# The first one has every op.
CARDS = ("NVIDIA H200", "NVIDIA H100")
DTYPE, OURS, PEER, EAGER = "bfloat16", "triton", "liger-kernel", "eager"
# Rows with the same values here were measured in one run.
RUN = ("folder", "machine", "versions", "commit", "date")
# The columns of a pass; losses that may compute gradients in their forward pass are measured without gradients instead.
PASSES = {"forward": ("evaluation", "forward"), "full": ("full",)}
ERRORS = ("error_outputs", "error_gradients")
# The least fraction of copy bandwidth that a memory-bound op must reach.
COPY = 0.9
# Errors up to it are equal: they are the last digit of float32.
PRECISION = torch.finfo(torch.float32).eps

Row = dict[str, Any]
Rows = dict[str, Row]


def measured(card: str, folder: Path = RESULTS) -> list[Row]:
    """The rows of ops in this dtype on a card, without series over a size."""
    rows: list[Row] = []
    for path in sorted({path.parent for path in folder.glob("*/results.*")}):
        rows += [
            _typed(row) | {"folder": path.name}
            for row in read_json(path / "results.json") or _read_csv(path / "results.csv")
        ]
    rows = [row for row in rows if row["machine"].startswith(card) and row["dtype"] == DTYPE]
    return [row for row in rows if not row["axis"] and row["pass"] != "dispatch"]


def _read_csv(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _typed(row: Row) -> Row:
    """Figures as numbers; empty ones as None, and columns that older files lack, too."""
    figures = (
        "median_ms",
        "low_ms",
        "high_ms",
        "graph_ms",
        "limit_ms",
        "copy_ms",
        "share",
        "error_eager_ratio",
        *ERRORS,
    )
    return {**row, **{name: float(row[name]) if row.get(name) else None for name in figures}}


def runs(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[str, Rows]]:
    """Return (op, workload, *RUN) → implementation → pass → row, for rows with a time."""
    found: dict[tuple[str, ...], dict[str, Rows]] = {}
    for row in rows:
        if row["median_ms"] is not None:
            same = found.setdefault((row["op"], row["workload"], *(row[name] for name in RUN)), {})
            same.setdefault(row["implementation"], {})[row["pass"]] = row
    return found


def pairs(rows: Iterable[Row], ops: Iterable[str]) -> list[Pair]:
    """Of every op, shape and variant of the peer the newest run with figures of both, in the order of the ops."""
    newest: dict[tuple[str, str, str], Pair] = {}
    for (op, shape, *run), found in sorted(runs(rows).items(), key=lambda item: item[0][-1]):
        for variant in found:
            if OURS in found and variant.startswith(PEER):
                newest[op, shape, variant] = Pair(
                    op, shape, variant, tuple(run), found[OURS], found[variant], found.get(EAGER, {})
                )
    order = list(ops)
    known = [pair for pair in newest.values() if pair.op in order]
    return sorted(
        known,
        key=lambda pair: (
            order.index(pair.op),
            [int(n) for n in re.findall(r"\d+", pair.shape)],
            pair.shape,
            pair.variant,
        ),
    )


def failures(rows: Iterable[Row], found: Sequence[Pair]) -> list[tuple[str, str]]:
    """Shapes at which the peer has no figures in the newest run of the op, and why."""
    newest = {pair.op: max(other.run[-1] for other in found if other.op == pair.op) for pair in found}
    failed = [
        row
        for row in rows
        if row["implementation"].startswith(PEER) and row["reason"] and newest.get(row["op"], "~") <= row["date"]
    ]
    return [(f"{row['op']}, {row['workload']}, {row['implementation']}", row["reason"]) for row in failed]


@dataclass(frozen=True)
class Pair:
    """One shape of one op, measured in one run with one variant of the peer: pass → row of either, and of eager PyTorch."""

    op: str
    shape: str
    variant: str
    run: tuple[str, ...]
    ours: Rows
    peer: Rows
    eager: Rows

    @property
    def place(self) -> tuple[str, ...]:
        """The run without its time of day."""
        return self.run[:-1]

    def speed(self, name: str) -> float | None:
        """The peer's time ÷ ours."""
        return _ratio(self._figure(self.peer, name, "median_ms"), self._figure(self.ours, name, "median_ms"))

    def within_spread(self, name: str) -> bool:
        """Whether each median is within the quantiles of the other time."""
        mine, theirs = (
            [self._figure(rows, name, f"{part}_ms") for part in ("low", "median", "high")]
            for rows in (self.ours, self.peer)
        )
        if None in mine or None in theirs:
            return False
        return mine[0] <= theirs[1] <= mine[2] and theirs[0] <= mine[1] <= theirs[2]

    def bandwidth(self, name: str) -> float | None:
        """Least bytes ÷ time as a fraction of copy bandwidth; None where matmuls are the limit."""
        return None if self._figure(self.ours, name, "copy_ms") is None else self._figure(self.ours, name, "share")

    def of_copy(self, name: str) -> float | None:
        """The time of a plain copy of as many bytes ÷ ours."""
        return _ratio(self._figure(self.ours, name, "copy_ms"), self._figure(self.ours, name, "median_ms"))

    def replayed(self, name: str) -> float | None:
        """Least bytes ÷ the time of a CUDA graph of the call, whose results are always in the same memory, as a fraction of copy bandwidth."""
        return _ratio(self._figure(self.ours, name, "limit_ms"), self._figure(self.ours, name, "graph_ms"))

    def short(self, name: str) -> bool:
        """Whether that copy itself does not reach the bound of a long one's bandwidth."""
        reached = _ratio(self._figure(self.ours, name, "limit_ms"), self._figure(self.ours, name, "copy_ms"))
        return reached is not None and reached < COPY

    def error(self, column: str, other: Rows) -> float | None:
        """Our error ÷ that of another implementation; 1 if both are the last digit of float32."""
        mine, theirs = error(self.ours, column), error(other, column)
        if mine is not None and theirs is not None and max(mine, theirs) <= PRECISION:
            return 1.0
        return _ratio(mine, theirs)

    def gradient_error_to_eager(self) -> float | None:
        """The largest ratio among gradients, as `liger bench` computes it."""
        return error(self.ours, "error_eager_ratio")

    def _figure(self, rows: Rows, name: str, column: str) -> Any:
        """Of the first pass of this name that both have."""
        return next((rows[pass_][column] for pass_ in PASSES[name] if pass_ in self.ours and pass_ in self.peer), None)


def error(rows: Rows, column: str) -> float | None:
    """It belongs to a call, and is the same in every pass."""
    return next((row[column] for row in rows.values()), None)


def _ratio(value: float | None, divisor: float | None) -> float | None:
    return value / divisor if value is not None and divisor else None
