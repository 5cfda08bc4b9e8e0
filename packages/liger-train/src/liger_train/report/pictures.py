# SPDX-License-Identifier: Apache-2.0
"""The pictures of sweeps: throughput and peak memory of each strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

# Before pyplot, which would look for a display.
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from liger_bench.printing import unit_of
from liger_bench.records import Record
from liger_train.report.sweeps import FUSED, PARTLY, PLAIN, Strategy, Sweep

GIB = 1 << 30
# Distinguishable with any kind of color vision (Okabe and Ito 2008); strategies of one selection of ops differ in
# dashes and markers.
COLORS = {PLAIN: "#4b5563", PARTLY: "#0072b2", FUSED: "#d55e00"}
MORE = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
MARKERS = ("o", "s", "^")
INK = "#000000"
# The height of the band for runs that ran out of memory, as a fraction of the axes.
BAND = 0.95
CROSS: dict[str, Any] = {"markersize": 6.5, "markeredgewidth": 2}
THROUGHPUT = ("tokens_per_second", "low_tokens_per_second", "high_tokens_per_second")
AXIS_LABELS = {"batch": "batch size per rank", "sequence": "sequence length, tokens", "ranks": "ranks"}


def sweep_picture(sweep: Sweep, strategies: Sequence[Strategy], path: Path) -> None:
    """Throughput and peak memory by size, a line per strategy with its quantiles; a cross marks out of memory."""
    shown = [row for row in sweep.rows if any(s.has(row) for s in strategies)]
    limit, peaks = sweep.first["memory_limit"], [row["peak_bytes"] for row in shown if row.get("peak_bytes")]
    scale, unit = unit_of(max([limit or 0, *peaks]) or GIB)
    # Older rows of the CPU have no peak memory for the second panel.
    has_memory = bool(limit or peaks or any(row["out_of_memory"] for row in shown))
    figure, panels = plt.subplots(
        1, 1 + has_memory, figsize=(5.25 * (1 + has_memory), 4.2), layout="constrained", squeeze=False
    )
    left, right = panels[0][0], panels[0][-1]
    figure.suptitle(f"{sweep.title}\n{sweep.setting}", fontsize=10, x=0.01, ha="left")
    # Crosses are at the memory limit, or above the highest peak. A run that failed has no throughput: its cross is in a
    # band above the data.
    ceiling = limit / scale if limit else max(peaks, default=scale) / scale * 1.08
    if limit:
        right.axhline(ceiling, color=INK, linewidth=0.9, linestyle="--")
        right.annotate(f"{ceiling:g} {unit}", (0, ceiling), (2, 3), textcoords="offset points", fontsize=8)
    failing = [s for s in strategies if any(s.has(row) and row["out_of_memory"] for row in sweep.rows)]
    for strategy in strategies:
        style = _style(strategy, sweep.strategies)
        # Slightly apart, so that crosses at the same size do not hide each other.
        apart = 0.24 * (failing.index(strategy) - (len(failing) - 1) / 2) if strategy in failing else 0.0
        rows = {x: row for x, value in enumerate(sweep.values) if (row := sweep.row(strategy, value)) is not None}
        _draw(left, strategy.label, rows, THROUGHPUT, style, apart)
        if has_memory:
            _draw(right, strategy.label, rows, ("peak_bytes",) * 3, style, apart, scale, ceiling)
    _name_axes(left, sweep, "tokens per second")
    if has_memory:
        _name_axes(right, sweep, f"peak memory per rank, {unit}" if sweep.axis == "ranks" else f"peak memory, {unit}")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if failing:
        left.add_patch(
            plt.Rectangle((0, BAND - 0.05), 1, 0.1, transform=left.transAxes, color=INK, alpha=0.08, linewidth=0)
        )
        left.annotate("out of memory", (0.01, BAND), xycoords="axes fraction", va="center", fontsize=8)
        left.set_ylim(0, left.get_ylim()[1] * 1.12)
    if has_memory:
        right.set_ylim(0, max(ceiling, *(peak / scale for peak in peaks), 0) * 1.07)
    _add_legend(figure, right, sweep, strategies, bool(failing))
    _finish(figure, panels[0], path)


def _draw(
    axes: Any,
    label: str,
    rows: Mapping[int, Record],
    columns: tuple[str, str, str],
    style: Mapping[str, Any],
    apart: float,
    scale: float = 1,
    ceiling: float | None = None,
) -> None:
    """Draw a column of rows by x, and its quantiles; a run out of memory is a cross at the ceiling, or in the band."""
    points = [
        (x, *(_value(row, column, columns[0]) / scale for column in columns))
        for x, row in rows.items()
        if _fits(row, columns[0])
    ]
    if points:
        xs, middle, low, high = zip(*points, strict=True)
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.2, linewidth=0)
        axes.plot(xs, middle, label=label, linewidth=1.8, markersize=5, **style)
    failed = [x + apart for x, row in rows.items() if row["out_of_memory"]]
    # An empty artist without clipping would break the constrained layout.
    if failed:
        height = {"transform": axes.get_xaxis_transform()} if ceiling is None else {}
        heights = [ceiling or BAND] * len(failed)
        axes.plot(failed, heights, "x", color=style["color"], clip_on=False, zorder=5, **CROSS, **height)


def _name_axes(axes: Any, sweep: Sweep, label: str) -> None:
    axes.set_xticks(range(len(sweep.values)), [str(value) for value in sweep.values])
    axes.set_xlim(-0.3, len(sweep.values) - 0.7)
    axes.set_ylim(0, None)
    axes.set_xlabel(AXIS_LABELS[sweep.axis])
    axes.set_ylabel(label)


def _add_legend(figure: Any, axes: Any, sweep: Sweep, strategies: Sequence[Strategy], failing: bool) -> None:
    handles, labels = axes.get_legend_handles_labels()
    named = list(labels)
    # A strategy that always ran out of memory has crosses only.
    for strategy in strategies:
        if strategy.label not in named:
            handles.append(plt.Line2D([], [], linewidth=1.8, markersize=5, **_style(strategy, sweep.strategies)))
            labels.append(strategy.label)
    if failing:
        handles.append(plt.Line2D([], [], color=INK, marker="x", linestyle="", **CROSS))
        labels.append("out of memory")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _style(strategy: Strategy, all_of_them: Sequence[Strategy]) -> dict[str, Any]:
    """Color by the selection of ops, dashes and marker by the rest; the same in all pictures of a sweep."""
    others = [name for name in dict.fromkeys(each.liger for each in all_of_them) if name not in COLORS]
    color = COLORS.get(strategy.liger) or MORE[others.index(strategy.liger) % len(MORE)]
    number = [each for each in all_of_them if each.liger == strategy.liger].index(strategy)
    return {"color": color, "linestyle": DASHES[number % len(DASHES)], "marker": MARKERS[number % len(MARKERS)]}


def _fits(row: Record, column: str) -> bool:
    return not row["out_of_memory"] and row.get(column) is not None


def _value(row: Record, column: str, otherwise: str) -> float:
    """The column, or the other one where it is missing."""
    value = row.get(column)
    return float(row[otherwise] if value is None else value)


def _finish(figure: Any, panels: Sequence[Any], path: Path) -> None:
    for axes in panels:
        axes.grid(axis="y", alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the date and version of matplotlib, an unchanged picture is an unchanged file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
