# SPDX-License-Identifier: Apache-2.0
"""Targets: what a figure of a row, or its ratio to a figure of another row, must be."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_bench.records import Record, find
from liger_core.errors import OptionError

TARGETS, REASONS = Path("benchmarks/targets.json"), Path("benchmarks/reasons.toml")
FIELDS = {"id", "row", "metric", "against", "bound"}
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Target:
    """One line of the file of targets.

    row      column → value: the row it is about
    metric   the column whose value counts
    against  column → value where another row differs from the first, and `metric` where another of its columns is meant; the value is
             then divided by that one. None: the value itself counts
    bound    a comparison and a number, of bytes with a unit: "<= 1.04", ">= 0.9", "<= 300 MiB"
    """

    id: str
    row: Record
    metric: str
    bound: str
    against: Record | None = None

    def __post_init__(self) -> None:
        self._parts()

    def reached(self, rows: Sequence[Record]) -> float | None:
        """The value, or None if it was not measured."""
        row = find(rows, self.row)
        value = None if row is None else row.get(self.metric)
        if value is None or self.against is None:
            return None if value is None else float(value)
        other = dict(self.against)
        metric = other.pop("metric", self.metric)
        base = find(rows, self.row | other)
        divisor = None if base is None else base.get(metric)
        return value / divisor if divisor else None

    def met(self, value: float) -> bool:
        comparison, number, unit = self._parts()
        return value >= number * UNITS[unit] if comparison == ">=" else value <= number * UNITS[unit]

    def shown(self, value: float) -> str:
        """With a digit more than the bound, so that a value just beyond it shows."""
        unit = self._parts()[2]
        written = len(self.bound.split()[1].partition(".")[2])
        digits = written + 1 if unit else max(3, written + 1) if written else 0
        return f"{value / UNITS[unit]:,.{digits}f}{unit and ' ' + unit}"

    def _parts(self) -> tuple[str, float, str]:
        found = re.fullmatch(r"(<=|>=) ([0-9.]+)(?: (KiB|MiB|GiB))?", self.bound)
        if found is None:
            raise OptionError(f"bench report: the bound of {self.id!r} must be like '<= 1.04' or '<= 300 MiB', got {self.bound!r}")
        return found[1], float(found[2]), found[3] or ""


@dataclass(frozen=True)
class Verdict:
    """A target with what was reached, and the reason if it was missed."""

    target: Target
    value: float | None
    reason: str = ""

    @property
    def word(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if self.target.met(self.value) else "missed"


def read_targets(path: Path) -> list[Target]:
    """The targets of a file: an object with `row`, the columns that all rows have in common, and `targets`.

    Raises OptionError if an entry is not a target.
    """
    found = _loaded(path, json.loads)
    if not isinstance(found, dict) or not isinstance(found.get("targets"), list) or not isinstance(found.get("row"), dict):
        raise OptionError(f"bench report: {path} must be an object with row and targets, got {json.dumps(found)[:200]}")
    targets: list[Target] = []
    for line in found["targets"]:
        if not isinstance(line, dict) or not line.keys() <= FIELDS or not line.keys() >= FIELDS - {"against"}:
            raise OptionError(f"bench report: each target in {path} must have {', '.join(sorted(FIELDS))}, got {json.dumps(line)[:200]}")
        targets.append(Target(**line | {"row": found["row"] | line["row"]}))
    names = [target.id for target in targets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(f"bench report: the ids of the targets in {path} must differ, got {', '.join(twice)} twice")
    return targets


def read_reasons(path: Path) -> dict[str, str]:
    """Id of a target → why it is missed."""
    reasons: dict[str, str] = _loaded(path, tomllib.loads)
    return {name: " ".join(str(text).split()) for name, text in reasons.items()}


def judged(targets: Sequence[Target], rows: Sequence[Record], reasons: dict[str, str]) -> list[Verdict]:
    return [Verdict(target, target.reached(rows), reasons.get(target.id, "")) for target in targets]


def _loaded(path: Path, load: Any) -> Any:
    try:
        return load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"bench report: {path} must be a file that can be read, got {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"bench report: {path} cannot be read: {error}") from None
