# SPDX-License-Identifier: Apache-2.0
"""The pictures of sweeps: throughput and peak memory of each strategy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from liger_bench.op_pictures import finish
from liger_bench.printing import unit_of
from liger_bench.records import Record
from liger_train.report.sweeps import FUSED, PARTLY, PLAIN, Strategy, Sweep

GIB = 1 << 30
# Colors for all kinds of color vision (Okabe and Ito 2008). Strategies with the same ops differ in dashes and markers.
COLORS = {PLAIN: "#4b5563", PARTLY: "#0072b2", FUSED: "#d55e00"}
MORE = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
MARKERS = ("o", "s", "^")
INK = "#000000"
# The center of the band for runs that ran out of memory, as a fraction of the axes.
BAND = 0.95
CROSS: dict[str, Any] = {"markersize": 6.5, "markeredgewidth": 2}
THROUGHPUT = ("tokens_per_second", "low_tokens_per_second", "high_tokens_per_second")
AXIS_LABELS = {"batch": "batch size per rank", "sequence": "sequence length, tokens", "ranks": "ranks"}


def sweep_picture(sweep: Sweep, strategies: Sequence[Strategy], path: Path) -> None:
    """Draw throughput and peak memory by size, with a line and quantiles for each strategy, and crosses for OOM."""
    shown = [row for row in sweep.rows if any(s.has(row) for s in strategies)]
    limit, peaks = sweep.first["memory_limit"], [row["peak_bytes"] for row in shown if row.get("peak_bytes")]
    scale, unit = unit_of(max([limit or 0, *peaks]) or GIB)
    # Older rows of the CPU have no peak memory, so no second panel.
    has_memory = bool(limit or peaks or any(row["out_of_memory"] for row in shown))
    figure = Figure(figsize=(5.25 * (1 + has_memory), 4.2), layout="constrained")
    panels = figure.subplots(1, 1 + has_memory, squeeze=False)[0]
    left, right = panels[0], panels[-1]
    figure.suptitle(f"{sweep.title}\n{sweep.setting}", fontsize=10, x=0.01, ha="left")
    # Crosses in the panel of memory are at the limit, or above the highest peak; in that of throughput, they are in a
    # band above the data.
    ceiling = limit / scale if limit else max(peaks, default=scale) / scale * 1.08
    if limit:
        right.axhline(ceiling, color=INK, linewidth=0.9, linestyle="--")
        right.annotate(f"{ceiling:g} {unit}", (0, ceiling), (2, 3), textcoords="offset points", fontsize=8)
    failing = [s for s in strategies if any(s.has(row) and row["out_of_memory"] for row in sweep.rows)]
    for strategy in strategies:
        style = _style(strategy, sweep.strategies)
        # Crosses at the same size must not hide each other.
        offset = 0.24 * (failing.index(strategy) - (len(failing) - 1) / 2) if strategy in failing else 0.0
        rows = {x: row for x, value in enumerate(sweep.values) if (row := sweep.row(strategy, value)) is not None}
        _draw(left, strategy.label, rows, THROUGHPUT, style, offset)
        if has_memory:
            _draw(right, strategy.label, rows, ("peak_bytes",) * 3, style, offset, scale, ceiling)
    _name_axes(left, sweep, "tokens per second")
    if has_memory:
        _name_axes(right, sweep, f"peak memory per rank, {unit}" if sweep.axis == "ranks" else f"peak memory, {unit}")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if failing:
        left.add_patch(
            Rectangle((0, BAND - 0.05), 1, 0.1, transform=left.transAxes, color=INK, alpha=0.08, linewidth=0)
        )
        left.annotate("out of memory", (0.01, BAND), xycoords="axes fraction", va="center", fontsize=8)
        left.set_ylim(0, left.get_ylim()[1] * 1.12)
    if has_memory:
        right.set_ylim(0, max(ceiling, *(peak / scale for peak in peaks), 0) * 1.07)
    _add_legend(figure, right, sweep, strategies, bool(failing))
    finish(figure, panels, path)


def _draw(
    axes: Any,
    label: str,
    rows: Mapping[int, Record],
    columns: tuple[str, str, str],
    style: Mapping[str, Any],
    offset: float,
    scale: float = 1,
    ceiling: float | None = None,
) -> None:
    """Draw a column of rows by x, with its quantiles; a run out of memory is a cross at the ceiling or in the band."""
    points = [
        # Older rows have no quantiles.
        (x, *((row.get(column) or row[columns[0]]) / scale for column in columns))
        for x, row in rows.items()
        if not row["out_of_memory"] and row.get(columns[0]) is not None
    ]
    if points:
        xs, middle, low, high = zip(*points, strict=True)
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.2, linewidth=0)
        axes.plot(xs, middle, label=label, linewidth=1.8, markersize=5, **style)
    failed = [x + offset for x, row in rows.items() if row["out_of_memory"]]
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
    known = set(labels)
    # A strategy that always ran out of memory has only crosses, which have no label.
    for strategy in strategies:
        if strategy.label not in known:
            handles.append(Line2D([], [], linewidth=1.8, markersize=5, **_style(strategy, sweep.strategies)))
            labels.append(strategy.label)
    if failing:
        handles.append(Line2D([], [], color=INK, marker="x", linestyle="", **CROSS))
        labels.append("out of memory")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _style(strategy: Strategy, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """Return a color for the selection of ops, and dashes and a marker for the rest, the same in all pictures."""
    others = [name for name in dict.fromkeys(each.liger for each in strategies) if name not in COLORS]
    color = COLORS.get(strategy.liger) or MORE[others.index(strategy.liger) % len(MORE)]
    number = [each for each in strategies if each.liger == strategy.liger].index(strategy)
    return {"color": color, "linestyle": DASHES[number % len(DASHES)], "marker": MARKERS[number % len(MARKERS)]}
