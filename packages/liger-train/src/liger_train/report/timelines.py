# SPDX-License-Identifier: Apache-2.0
"""The pictures of `liger train --snapshot`: memory over time by category, one run or several side by side."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from liger_bench.op_pictures import finish
from liger_bench.printing import unit_of
from liger_bench.records import Record
from liger_core.errors import OptionError
from liger_train.report.sweeps import PARTLY, PLAIN, WORDS
from liger_train.row import SETUP
from liger_train.timeline import CATEGORIES

FOLDER = "snapshots"
COLORS = dict(zip(CATEGORIES, ("#4b5563", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#e5c07b"), strict=True))


def read_timelines(folders: Sequence[Path]) -> list[Record]:
    """Return the timelines of all snapshots in these folders, small runs first.

    Raises OptionError for a file that is not a timeline.
    """
    records = []
    for path in sorted(path for folder in folders for path in (folder / FOLDER).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            complete = {"setup", "milliseconds", "bytes", "steps", "peak"} <= record.keys()
        except (ValueError, AttributeError):
            complete = False
        if not complete:
            raise OptionError(f"report: {path} must be a timeline that liger train --snapshot wrote; move it away")
        records.append(record)

    def order(record: Record) -> tuple[Any, ...]:
        setup = record["setup"]
        return setup["model"], setup["batch"] * setup["sequence"], {PLAIN: 0, PARTLY: 1}.get(setup["liger"], 2)

    return sorted(records, key=order)


def pictured_runs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return file name → the runs in a picture: all strategies of one size, or the extreme sizes of one strategy."""
    groups: dict[str, list[Record]] = {}
    for group in _grouped(records, "liger", "checkpoint"):
        setup = group[0]["setup"]
        groups[_unused_name(f"{setup['model']}-{setup['batch']}x{setup['sequence']}", groups)] = group
    for group in _grouped(records, "batch", "sequence"):
        setup = group[0]["setup"]
        if len(group) > 1:
            groups[_unused_name(f"{setup['model']}-{setup['liger']}-small-and-large", groups)] = [group[0], group[-1]]
    return groups


def timeline_picture(records: Sequence[Record], path: Path) -> None:
    """Draw the last recorded step of each run, until the memory of its update is released, in panels of one scale."""
    steps = [_last_step(record) for record in records]
    heights = (sum(layers) for each in steps for layers in zip(*each.layers, strict=True))
    highest = max(1 << 20, *heights, *(each.requested for each in steps))
    unit, name = unit_of(highest)
    figure = Figure(figsize=(5.4 * len(records) + 0.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(records), sharey=True, squeeze=False)[0]
    for record, step, axes in zip(records, steps, panels, strict=True):
        layers = [[value / unit for value in layer] for layer in step.layers]
        totals = [sum(values) for values in zip(*layers, strict=True)]
        axes.stackplot(
            step.times, layers, labels=CATEGORIES, colors=[COLORS[c] for c in CATEGORIES], linewidth=0, step="post"
        )
        # The outline shows peaks that are narrower than a pixel.
        axes.step(step.times, totals, where="post", color="#000000", linewidth=0.5)
        axes.set_title(title(record["setup"]), fontsize=10)
        axes.set_xlabel("milliseconds since the start of the step")
        axes.set_xlim(0, (step.times[-1] or 1.0) * 1.02)
        style = {"textcoords": "offset points", "fontsize": 9}
        if totals:
            peak = max(totals)
            time = step.times[totals.index(peak)]
            offset, side = (5, "left") if time < 0.6 * step.times[-1] else (-5, "right")
            axes.annotate(f"peak {peak:,.2f} {name}", (time, peak), (offset, 3), ha=side, **style)
        if step.requested:
            requested = step.requested / unit
            axes.plot(
                [step.times[-1]], [requested], "x", color="#d55e00", markersize=11, markeredgewidth=3, clip_on=False
            )
            words = f"out of memory:\n{record['asked'] / unit:,.2f} {name} more"
            axes.annotate(words, (step.times[-1], requested), (-10, 0), ha="right", va="center", **style)
        _draw_limit(axes, record["setup"].get("memory_limit"), highest, unit, name)
    panels[0].set_ylim(0, 1.12 * highest / unit)
    panels[0].set_ylabel(f"memory, {name}")
    columns = len(CATEGORIES) if len(records) > 1 else 3
    entries = panels[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    finish(figure, panels, path, grid=False)


@dataclass(frozen=True)
class Step:
    """A step of a timeline.

    times      milliseconds since its start
    layers     bytes of each category at these times
    requested  total bytes that a failed request would have reached; 0 if none failed
    """

    times: list[float]
    layers: list[list[int]]
    requested: int


def _last_step(record: Record) -> Step:
    """Return the last recorded step, without the time after it in which memory hardly changes."""
    times, totals = record["milliseconds"], [sum(sizes) for sizes in zip(*record["bytes"].values(), strict=True)]
    if not times:
        return Step([0.0], [[0] for _ in CATEGORIES], 0)
    start = min(record["steps"][-1] if record["steps"] else times[0], times[-1])
    first = max(bisect_right(times, start) - 1, 0)
    last = len(times) - 1
    if not record.get("asked"):
        small = totals[last] + (max(totals[first:]) - totals[last]) / 20
        last = next((index for index in range(last, first, -1) if totals[index] > small), last - 1) + 1
    indices = range(first, last + 1)
    requested = totals[-1] + record["asked"] if record.get("asked") else 0
    return Step(
        [max(times[index] - start, 0.0) for index in indices],
        [[record["bytes"][name][index] for index in indices] for name in CATEGORIES],
        requested,
    )


def _draw_limit(axes: Any, limit: int | None, highest: float, unit: int, name: str) -> None:
    """Draw a line at the memory limit, or a note if the limit is far above the data."""
    if not limit:
        return
    words = f"limit {limit / unit:g} {name}"
    if limit <= 1.1 * highest:
        axes.axhline(limit / unit, color="#000000", linewidth=0.9, linestyle="--")
        axes.annotate(words, (0, limit / unit), (3, 3), textcoords="offset points", fontsize=8)
    else:
        axes.annotate(f"↑ {words}", (0.01, 0.97), xycoords="axes fraction", va="top", fontsize=8)


def title(setup: dict[str, Any]) -> str:
    return f"{setup['model']} {setup['batch']} × {setup['sequence']}, {WORDS.get(setup['liger'], setup['liger'])}"


def _grouped(records: Sequence[Record], *free: str) -> list[list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        same = tuple(record["setup"].get(name) for name in SETUP if name not in (*free, "steps", "seed"))
        groups.setdefault(same, []).append(record)
    return list(groups.values())


def _unused_name(name: str, groups: dict[str, Any]) -> str:
    name = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
    count = sum(each == name or each.startswith(f"{name}-no-") for each in groups)
    return name if not count else f"{name}-no-{count + 1}"
