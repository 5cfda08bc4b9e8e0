# SPDX-License-Identifier: Apache-2.0
"""Memory by category as bars: in the terminal, and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from liger_bench.printing import size, unit_of
from liger_train.plan.ledger import CATEGORIES, COLORS
from liger_train.plan.step import Prediction

WIDTH = 48

Bar = tuple[str, Prediction]


def print_bars(console: Console, bars: Sequence[Bar], limit: int | None) -> None:
    """A bar for each prediction, to one scale, with a mark at the memory limit."""
    most = max([prediction.peak_bytes for _, prediction in bars] + ([limit] if limit else []))
    table = Table.grid(padding=(0, 1))
    for name, prediction in bars:
        verdict = "" if limit is None else ", fits" if prediction.fits(limit) else ", does not fit"
        table.add_row(name, _line(prediction, most, limit), size(prediction.peak_bytes) + verdict)
    console.print(table)
    used = [category for category in CATEGORIES if any(prediction.held.get(category) for _, prediction in bars)]
    console.print(Text("  ").join([Text("█ ", COLORS[c]) + Text(c, "default") for c in used]))


def picture(bars: Sequence[Bar], limit: int | None, path: Path, title: str) -> None:
    """The same bars as a PNG."""
    figure = Figure(figsize=(9, 1.4 + 0.45 * len(bars)), layout="constrained")
    axes = figure.subplots()
    names = [name for name, _ in bars]
    scale, unit = unit_of(max(limit or 0, *(prediction.peak_bytes for _, prediction in bars)))
    left = [0.0] * len(bars)
    for category in CATEGORIES:
        sizes = [prediction.held.get(category, 0) / scale for _, prediction in bars]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=COLORS[category], label=category, height=0.7)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f}", va="center", fontsize=9)
    if limit:
        axes.axvline(limit / scale, color="black", linestyle="--", linewidth=1)
        axes.text(limit / scale, -0.75, f"{limit / scale:g} {unit}", ha="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"predicted peak memory, {unit}")
    axes.set_title(title, fontsize=10, loc="left", pad=18)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _line(prediction: Prediction, most: int, limit: int | None) -> Text:
    line = Text()
    filled, total = 0, 0
    for category in CATEGORIES:
        total += prediction.held.get(category, 0)
        cells = round(WIDTH * total / most) - filled
        line.append("█" * cells, COLORS[category])
        filled += cells
    line.append(" " * (WIDTH - filled))
    if limit and limit < most:
        end = min(WIDTH - 1, round(WIDTH * limit / most))
        line = line[:end] + Text("│", "bold") + line[end + 1 :]
    return line
