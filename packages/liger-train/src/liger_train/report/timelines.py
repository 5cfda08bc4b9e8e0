# SPDX-License-Identifier: Apache-2.0
"""The pictures of `liger train --snapshot`: memory over time by category, one run or several side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

# Before pyplot, which would look for a display.
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from liger_bench.printing import unit_of
from liger_bench.records import Record
from liger_core.errors import OptionError
from liger_train.report.sweeps import WORDS
from liger_train.row import SETUP
from liger_train.timeline import CATEGORIES

FOLDER = "snapshots"
COLORS = dict(zip(CATEGORIES, ("#4b5563", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#e5c07b"), strict=True))


def read_timelines(folders: Sequence[Path]) -> list[Record]:
    """The timelines of all snapshots in these folders, small runs first.

    Raises OptionError for a file that is not a timeline.
    """
    found = []
    for path in sorted(path for folder in folders for path in (folder / FOLDER).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            complete = {"setup", "milliseconds", "bytes", "steps", "peak"} <= record.keys()
        except (ValueError, AttributeError):
            complete = False
        if not complete:
            raise OptionError(f"report: {path} must be a timeline that liger train --snapshot wrote; move it away")
        found.append(record)
    return sorted(found, key=lambda r: (r["setup"]["model"], r["setup"]["batch"] * r["setup"]["sequence"], -_order(r["setup"]["liger"])))


def pairs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """File name → the runs in one picture: all strategies at one size, and the smallest and largest run of one strategy."""
    found: dict[str, list[Record]] = {}
    for records_, name in (_grouped(records, ("liger", "checkpoint"), "strategies"), _grouped(records, ("batch", "sequence"), "sizes")):
        for group in records_:
            setup = group[0]["setup"]
            if name == "sizes" and len(group) > 1:
                found[_named(f"{setup['model']}-{setup['liger']}-small-and-large", found)] = [group[0], group[-1]]
            elif name == "strategies":
                found[_named(f"{setup['model']}-{setup['batch']}x{setup['sequence']}", found)] = group
    return found


def timeline_picture(records: Sequence[Record], path: Path) -> None:
    """A panel per run, all to one scale; a dotted line marks the start of a step, a cross out of memory."""
    unit, name = unit_of(max(max(_totals(r), default=0) for r in records) or 1 << 20)
    figure, panels = plt.subplots(
        1, len(records), figsize=(5.4 * len(records) + 0.6, 4.2), sharey=True, layout="constrained", squeeze=False
    )
    for record, axes in zip(records, panels[0], strict=True):
        setup, times = record["setup"], record["milliseconds"]
        layers = [[value / unit for value in record["bytes"][category]] for category in CATEGORIES]
        axes.stackplot(times, layers, labels=CATEGORIES, colors=[COLORS[c] for c in CATEGORIES], linewidth=0, step="post")
        axes.set_title(title(setup), fontsize=10)
        axes.set_xlabel("milliseconds")
        for step in record["steps"]:
            axes.axvline(step, color="#000000", linewidth=0.8, linestyle=":")
        totals = _totals(record)
        if totals:
            highest = totals.index(max(totals))
            beside = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 9}
            axes.annotate(f"{totals[highest] / unit:,.2f} {name}", (times[highest], totals[highest] / unit), **beside)
        if record.get("asked") and totals:
            wanted = (totals[-1] + record["asked"]) / unit
            axes.plot([times[-1]], [wanted], "x", color="#d55e00", markersize=11, markeredgewidth=3)
            words = f"out of memory:\n{record['asked'] / unit:,.2f} {name} more"
            axes.annotate(words, (times[-1], wanted), (-8, 0), textcoords="offset points", ha="right", va="center", fontsize=9)
        if setup.get("memory_limit"):
            axes.axhline(setup["memory_limit"] / unit, color="#000000", linewidth=0.9, linestyle="--")
    panels[0][0].set_ylabel(f"memory, {name}")
    panels[0][0].margins(y=0.1)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(CATEGORIES) if len(records) > 1 else 3, frameon=False, fontsize=9)
    for axes in panels[0]:
        axes.set_xlim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def title(setup: dict[str, Any]) -> str:
    return f"{setup['model']} {setup['batch']} × {setup['sequence']}, {WORDS.get(setup['liger'], setup['liger'])}"


def _totals(record: Record) -> list[int]:
    return [sum(values) for values in zip(*record["bytes"].values(), strict=True)]


def _grouped(records: Sequence[Record], free: tuple[str, ...], name: str) -> tuple[list[list[Record]], str]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record["setup"].get(n) for n in SETUP if n not in (*free, "steps", "seed")), []).append(record)
    return list(groups.values()), name


def _named(name: str, taken: dict[str, Any]) -> str:
    """Names that are already taken get a number."""
    name = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
    count = sum(each == name or each.startswith(f"{name}-no-") for each in taken)
    return name if not count else f"{name}-no-{count + 1}"


def _order(liger: str) -> int:
    return {"none": 2, "all-but-loss": 1}.get(liger, 0)
