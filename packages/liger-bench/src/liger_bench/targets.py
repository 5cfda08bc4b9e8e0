# SPDX-License-Identifier: Apache-2.0
"""Targets: what a figure of a row, or its ratio to a figure of another row, must reach."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from liger_bench.records import Record, find
from liger_core.errors import OptionError

TARGETS, REASONS = Path("benchmarks/targets.json"), Path("benchmarks/reasons.toml")
FIELDS = {"id", "row", "metric", "against", "bound", "of_copy", "equal_within"}
OPTIONAL = {"against", "of_copy", "equal_within"}
# A bound that is not a number: the figure is stated and not judged.
STATED = "stated"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Target:
    """One entry of the file of targets.

    row           column → value: the row that the target is for
    metric        the column to judge
    against       the divisor: column → value where its row differs from `row`, and `metric` if it is another column. None: no divisor
    bound         a comparison and a number, for bytes with a unit: "<= 1.04", ">= 0.9", "<= 300 MiB"; or "stated"
    of_copy       lowers the bound to this fraction of what a plain copy of as many bytes reaches in the same run
    equal_within  ratios of two implementations that differ from the bound by at most this fraction are equal: neither met nor missed
    """

    id: str
    row: Record
    metric: str
    bound: str
    against: Record | None = None
    of_copy: float | None = None
    equal_within: float = 0.0

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

    def corrected(self, rows: Sequence[Record]) -> Target:
        """The target with the bound that the copy of the same run allows."""
        row = find(rows, self.row) if self.of_copy else None
        if row is None or not row.get("copy_ms") or not row.get("limit_ms"):
            return self
        allowed = self.of_copy * row["limit_ms"] / row["copy_ms"]
        comparison, number, _ = self._parts()
        return self if allowed >= number else replace(self, bound=f"{comparison} {allowed:.3f}")

    def verdict(self, value: float) -> str:
        if self.bound == STATED:
            return STATED
        comparison, number, unit = self._parts()
        number *= UNITS[unit]
        if self.equal_within and abs(value / number - 1) <= self.equal_within:
            return "equal"
        return "met" if (value >= number if comparison == ">=" else value <= number) else "missed"

    def shown(self, value: float) -> str:
        """With a digit more than the bound, so that a value just beyond it shows."""
        if self.bound == STATED:
            return f"{value:.3f}"
        unit = self._parts()[2]
        written = len(self.bound.split()[1].partition(".")[2])
        digits = written + 1 if unit else max(3, written + 1) if written else 0
        return f"{value / UNITS[unit]:,.{digits}f}{unit and ' ' + unit}"

    def _parts(self) -> tuple[str, float, str]:
        found = re.fullmatch(r"(<=|>=) ([0-9.]+)(?: (KiB|MiB|GiB))?", self.bound)
        if self.bound == STATED:
            return "", 0.0, ""
        if found is None:
            raise OptionError(f"bench report: the bound of {self.id!r} must be like '<= 1.04' or '<= 300 MiB', got {self.bound!r}")
        return found[1], float(found[2]), found[3] or ""


@dataclass(frozen=True)
class Verdict:
    """A target with the value that was reached, and the reason if it was missed."""

    target: Target
    value: float | None
    reason: str = ""

    @property
    def word(self) -> str:
        if self.value is None:
            return "not measured"
        return self.target.verdict(self.value)


def read_targets(path: Path) -> list[Target]:
    """The targets of a file: an object with `row`, the columns that all rows have in common, and `targets`.

    Raises OptionError if an entry is not a target.
    """
    found = _loaded(path, json.loads)
    if not isinstance(found, dict) or not isinstance(found.get("targets"), list) or not isinstance(found.get("row"), dict):
        raise OptionError(f"bench report: {path} must be an object with row and targets, got {json.dumps(found)[:200]}")
    targets: list[Target] = []
    for line in found["targets"]:
        if not isinstance(line, dict) or not line.keys() <= FIELDS or not line.keys() >= FIELDS - OPTIONAL:
            raise OptionError(
                f"bench report: each target in {path} must have {', '.join(sorted(FIELDS - OPTIONAL))}, got {json.dumps(line)[:200]}"
            )
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
    return [Verdict(target.corrected(rows), target.reached(rows), reasons.get(target.id, "")) for target in targets]


def _loaded(path: Path, load: Any) -> Any:
    try:
        return load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"bench report: {path} must be a file that can be read, got {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"bench report: {path} cannot be read: {error}") from None
