# SPDX-License-Identifier: Apache-2.0
"""Rows of training runs, grouped into sweeps of the batch size, the sequence length, or the number of ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_bench.records import Record, distinct
from liger_bench.results import read_json
from liger_core.errors import OptionError
from liger_train.implementations import PEER
from liger_train.row import DEFAULTS, FREE, SETUP, chosen_options

ROWS = "train.json"
SIZES = ("batch", "sequence")
AXES = (*SIZES, "ranks")
# The columns that differ between the lines of a picture; all others are equal.
STRATEGY = ("liger", "compile", "checkpoint")
# Rows of earlier versions may lack other columns.
REQUIRED = ("model", "machine", "versions", "commit", "date")
PLAIN, FUSED, PARTLY = "none", "all", "all-but-loss"
WORDS = {PLAIN: "Transformers", PARTLY: "Liger without fused loss", FUSED: "Liger", PEER: PEER}


@dataclass(frozen=True)
class Strategy:
    """One line of a picture."""

    liger: str
    compile: str
    checkpoint: str
    label: str

    def has(self, row: Record) -> bool:
        return _line(row) == (self.liger, self.compile, self.checkpoint)


@dataclass(frozen=True)
class Sweep:
    """Runs that differ only in strategy and in one size, `axis`, by which `rows` are sorted."""

    axis: str
    rows: list[Record]

    @property
    def first(self) -> Record:
        return self.rows[0]

    @property
    def fixed(self) -> str:
        """The sizes that do not vary, as text."""
        return ", ".join(f"{name} {self.first[name]}" for name in SIZES if name != self.axis)

    @property
    def values(self) -> list[int]:
        return distinct(self.rows, self.axis)

    @property
    def strategies(self) -> list[Strategy]:
        """The strategies: the baseline first, then other selections of ops, and Liger last."""
        order = [PLAIN, *sorted(set(distinct(self.rows, "liger")) - {PLAIN, PARTLY, FUSED}), PARTLY, FUSED]
        lines = dict.fromkeys(map(_line, self.rows))
        several = len({checkpoint for *_, checkpoint in lines}) > 1
        compiled = {"none": "", "default": ", compiled"}
        strategies = []
        for liger, compile, checkpoint in sorted(lines, key=lambda line: (order.index(line[0]), line[1] != "none")):
            label = WORDS.get(liger, f"Liger: {liger}") + compiled.get(compile, f", compile {compile}")
            label += f", checkpoint {checkpoint}" if several else ""
            strategies.append(Strategy(liger, compile, checkpoint, label))
        return strategies

    def strategy(self, liger: str) -> Strategy | None:
        """Return the first strategy with a selection of ops."""
        return next((strategy for strategy in self.strategies if strategy.liger == liger), None)

    def row(self, strategy: Strategy | None, value: int) -> Record | None:
        return next((row for row in self.rows if strategy and strategy.has(row) and row[self.axis] == value), None)

    @property
    def title(self) -> str:
        return f"{self.first['model']}: {self.axis} at {self.fixed}"

    @property
    def setting(self) -> str:
        """The options of all runs that are not the defaults, and the device."""
        chosen = chosen_options(self.first).items()
        words = [self.first["precision"]]
        words += [f"{name} {value}" for name, value in chosen if name not in ("precision", "ranks", *STRATEGY)]
        if len({strategy.checkpoint for strategy in self.strategies}) == 1:
            words.append(f"checkpoint {self.first['checkpoint']}")
        cards = _limited(self.first, f"{_device(self.first)} per rank")
        return f"{', '.join(words)}; {cards if self.axis == 'ranks' else where(self.first)}"

    @property
    def name(self) -> str:
        """The name of the sweep in file names."""
        chosen = chosen_options(self.first).items()
        words = [self.first["model"], self.axis, self.fixed]
        words += [str(value) for name, value in chosen if name not in (self.axis, *STRATEGY)]
        if self.first["memory_limit"]:
            words.append(f"{self.first['memory_limit'] / 2**30:g}GiB")
        return re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-")


def where(row: Record) -> str:
    """Return the number and kind of a row's devices, with the memory limit if there is one."""
    device = _device(row)
    count = row["ranks"]
    return _limited(row, f"{'one' if count == 1 else count} {device}{'' if count == 1 else 's'}")


def read(folders: Sequence[Path]) -> list[Record]:
    """Return the rows of these folders.

    Of repeated runs the last one counts, unless it was interrupted and an earlier one was not.

    Raises OptionError for rows that are not of training runs.
    """
    rows_by_run: dict[tuple[Any, ...], Record] = {}
    for folder in folders:
        for row in read_json(folder / ROWS):
            if missing := [name for name in REQUIRED if name not in row]:
                raise OptionError(
                    f"report: {folder / ROWS} must hold rows of liger train, got one without {', '.join(missing)}"
                )
            complete = DEFAULTS | {"tokens_per_second": None, "reason": "", "interrupted": False} | row
            run = (*(complete[name] for name in SETUP if name not in FREE), _card(complete))
            if run not in rows_by_run or rows_by_run[run]["interrupted"] or not complete["interrupted"]:
                rows_by_run[run] = complete
    return list(rows_by_run.values())


def sweeps(rows: Sequence[Record]) -> list[Sweep]:
    """Return all sweeps, in the order of their first rows; a row may belong to several."""
    all_sweeps: list[Sweep] = []
    for axis in AXES:
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for row in rows:
            same = tuple(row[name] for name in SETUP if name not in (axis, *STRATEGY, *FREE))
            groups.setdefault((*same, _card(row)), []).append(row)
        for group in groups.values():
            # A strategy needs two values for a line.
            lines = [row for row in group if len({r[axis] for r in group if _line(r) == _line(row)}) > 1]
            if lines:
                all_sweeps.append(Sweep(axis, sorted(lines, key=lambda row: row[axis])))
    # Group sweeps by model.
    models = distinct(rows, "model")
    return sorted(all_sweeps, key=lambda sweep: models.index(sweep.first["model"]))


def _line(row: Record) -> tuple[str, str, str]:
    return row["liger"], row["compile"], row["checkpoint"]


def _limited(row: Record, device: str) -> str:
    return device if row["memory_limit"] is None else f"{row['memory_limit'] / 2**30:g} GiB of {device}"


def _device(row: Record) -> str:
    return _card(row) if row["device"] == "cuda" else "CPU"


def _card(row: Record) -> str:
    """Return the GPU without its host, or the processor and its threads."""
    return str(row["machine"]).partition("; ")[0]
