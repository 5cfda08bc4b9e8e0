# SPDX-License-Identifier: Apache-2.0
"""The pictures of ops: fraction of the limit of all, and time against size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from liger_bench.op_page import NAMES, OURS, SHARE, largest
from liger_bench.records import Record, Records, distinct, sizes_of

# Distinguishable with any color vision (Okabe and Ito 2008). Variants of one library differ in dashes and markers.
COLORS = {
    "triton": "#d55e00",
    "reference": "#9ca3af",
    "eager": "#4b5563",
    "separate": "#f0e442",
    "torch": "#56b4e9",
    "compile": "#0072b2",
    "liger-kernel": "#009e73",
    "cut-cross-entropy": "#cc79a7",
    "quack": "#e69f00",
}
INK = "#000000"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D")
# As a fraction of the axes' height; closer labels overlap.
LABEL_GAP = 0.065
SIZES = {
    "N": "N, tokens",
    "T": "T, tokens",
    "H": "H, hidden size",
    "V": "V, classes",
    "I": "I, width",
    "chunk": "rows of a chunk",
    "heads": "heads of q",
}


@dataclass(frozen=True)
class LineStyle:
    color: str
    dashes: Any
    marker: str


LineStyles = dict[str, LineStyle]


def draw(records: Records, folder: Path) -> dict[str, Path]:
    """Draw every picture that there are figures for, and return the paths by the keys that `op_page.page` uses."""
    drawn: dict[str, Path] = {}
    if share_picture(records.ops, folder / "ops.png"):
        drawn[SHARE] = folder / "ops.png"
    look = styles(distinct(records.scaling, "implementation"))
    for op in distinct(records.scaling, "op"):
        path = folder / f"{op}-scaling.png"
        if scaling_picture(op, [row for row in records.scaling if row["op"] == op], path, look):
            drawn[f"{op} scaling"] = path
    return drawn


def share_picture(rows: Sequence[Record], path: Path) -> bool:
    """Draw the fraction of the limit that every implementation of every op reaches in forward and backward, at the
    shapes of the table; return False without anything to draw."""
    shares: dict[str, dict[str, float]] = {}
    for op in distinct(rows, "op"):
        for row in largest([row for row in rows if row["op"] == op]):
            name = _family(row["implementation"])
            if row["pass"] == "full" and row["share"] is not None:
                by_name = shares.setdefault(op, {})
                by_name[name] = max(row["share"], by_name.get(name, 0.0))
    if not shares:
        return False
    figure = Figure(figsize=(8, 1.7 + 0.24 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for name in sorted({name for each in shares.values() for name in each}, key=lambda name: name in OURS):
        lines = [index for index, each in enumerate(shares.values()) if name in each]
        reached = [each[name] for each in shares.values() if name in each]
        size, label = (55 if name in OURS else 28), NAMES.get(name, name)
        axes.scatter(reached, lines, s=size, color=COLORS.get(name, INK), label=label, zorder=3)
    axes.set_yticks(range(len(shares)), [*shares])
    axes.invert_yaxis()
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xlim(left=0)
    axes.set_title(
        f"Fraction of the limit, forward and backward (higher is better)\n{_source(rows)}", fontsize=11, loc="left"
    )
    figure.legend(loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    finish(figure, [axes], path)
    return True


def scaling_picture(op: str, rows: Sequence[Record], path: Path, look: LineStyles) -> bool:
    """Draw the time of forward and backward and the roofline against each size; return False without a time to draw."""
    rows = [row for row in rows if row["median_ms"] is not None and row["pass"] == "full"]
    # The size with the most implementations comes last, because their names are at the right.
    names = sorted(
        distinct(rows, "axis"), key=lambda name: len({row["implementation"] for row in rows if row["axis"] == name})
    )
    if not names:
        return False
    figure = Figure(figsize=(len(names) * 2.9 + 1.8, 3.6), layout="constrained")
    heading = f"{op}: time of forward and backward (lower is better; dashed: roofline)\n{_source(rows)}"
    figure.suptitle(heading, fontsize=11, x=0.01, ha="left")
    panels = list(figure.subplots(1, len(names), squeeze=False)[0])
    for name, axes in zip(names, panels, strict=True):
        here = sorted((row for row in rows if row["axis"] == name), key=lambda row: row["axis_value"])
        later = {row["implementation"] for row in rows if row["axis"] in names[names.index(name) + 1 :]}
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(SIZES.get(name, name))
        axes.set_title(_fixed(here), fontsize=9)
        values = distinct(here, "axis_value")
        axes.set_xlim(values[0] / 1.2, values[-1] * 1.2)
        axes.set_xticks([v for v in values if math.log2(v).is_integer()] or values)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        least = {row["axis_value"]: row["limit_ms"] for row in here if row["limit_ms"]}
        low, high = min(row["low_ms"] for row in here), max(row["high_ms"] for row in here)
        axes.set_ylim(min([low, *least.values()]) / 1.3, high * 1.3)
        axes.plot(list(least), list(least.values()), color=INK, linewidth=0.9, linestyle="--")
        _draw(axes, here, later, look)
    panels[0].set_ylabel("ms")
    finish(figure, panels, path)
    return True


def _source(rows: Sequence[Record]) -> str:
    """Return the device and dtype of the rows, for a heading."""
    machine, _, _ = rows[0]["machine"].partition("; ")
    return f"{machine}, {rows[0]['dtype']}"


def _fixed(rows: Sequence[Record]) -> str:
    """Return the sizes that a series keeps, from the names of its workloads: 8192x1024, 8192x2048 → 8192 × ·."""
    parts = [sizes_of(row["workload"]).split("x") for row in rows]
    if len({len(p) for p in parts}) != 1:
        return ""
    return " × ".join(values[0] if len(set(values)) == 1 else "·" for values in zip(*parts, strict=True))


def _draw(axes: Any, rows: Sequence[Record], later: set[str], look: LineStyles) -> None:
    """Draw the lines with their bands, and at the right the names that no later panel has."""
    ends = []
    # Liger's own lines are drawn last, on top.
    for name in sorted(distinct(rows, "implementation"), key=lambda name: _family(name) == "triton"):
        line, style = [row for row in rows if row["implementation"] == name], look[name]
        columns = ("axis_value", "median_ms", "low_ms", "high_ms")
        xs, ys, low, high = ([row[column] for row in line] for column in columns)
        axes.fill_between(xs, low, high, color=style.color, alpha=0.2, linewidth=0)
        options = {"linestyle": style.dashes, "marker": style.marker, "linewidth": 1.6, "markersize": 3.5}
        axes.plot(xs, ys, clip_on=False, color=style.color, **options)
        if name not in later:
            ends.append((name, style.color, xs[-1], ys[-1]))
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((x, y)) for _, _, x, y in ends]
    heights = _spread([float(y) for _, y in points], LABEL_GAP)
    for (name, color, _, _), (x, y), height in zip(ends, points, heights, strict=True):
        coordinates = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False}
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
        look_of_text = {"color": color, "fontsize": 9, "va": "center"}
        axes.annotate(NAMES.get(name, name), (x, y), (1.06, height), arrowprops=leader, **look_of_text, **coordinates)


def _spread(heights: list[float], gap: float) -> list[float]:
    """Return the heights, moved as little as possible to be `gap` apart."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [heights[i] for i in order]
    for _ in range(200):
        for lower, upper in pairwise(range(len(placed))):
            missing = gap - (placed[upper] - placed[lower])
            if missing > 1e-9:
                placed[lower] -= missing / 2
                placed[upper] += missing / 2
    return [height for _, height in sorted(zip(order, placed, strict=True))]


def _family(implementation: str) -> str:
    return implementation.partition(" ")[0]


def styles(implementations: Sequence[str]) -> LineStyles:
    """Return the styles of all pictures of a report: a color per family, dashes and a marker per member."""
    by_name: LineStyles = {}
    seen: dict[str, int] = {}
    for name in sorted(implementations):
        family = _family(name)
        number = seen[family] = seen.get(family, -1) + 1
        by_name[name] = LineStyle(COLORS.get(family, INK), DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)])
    return by_name


def finish(figure: Any, panels: Sequence[Any], path: Path, *, grid: bool = True) -> None:
    """Add grid lines, leave out the frame, and write the file."""
    for axes in panels:
        if grid:
            axes.grid(axis="y", alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib, an unchanged picture is an unchanged file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
