# SPDX-License-Identifier: Apache-2.0
"""The tables that commands print: cells are never cut, and tables of Liger's own commands fit in 100 columns."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WIDTH = 100
NOTHING = ("", "–")
Cell = str | Text


@dataclass(frozen=True)
class Column:
    """A column of a table.

    name     its heading
    meaning  its meaning, for the legend; empty if the heading is enough
    number   align to the right
    prose    sentences, which wrap between words; any other cell stays on one line
    detail   shown only with all columns
    """

    name: str
    meaning: str = ""
    number: bool = False
    prose: bool = False
    detail: bool = False


def output() -> Console:
    """Return a console for standard output.

    A file has no width of its own: tables get 100 columns there unless COLUMNS is set; sentences stay on one line.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.soft_wrap = True
        if not os.environ.get("COLUMNS", "").isdigit():
            console.width = WIDTH
    return console


def print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    title: str = "",
    all_columns: bool = True,
) -> None:
    """Print rows of cells, then a legend and the names of the columns that were left out.

    Unless all columns are asked for, details are left out, and so are columns without a value. A terminal that is too
    narrow gets a table wider than itself instead of one with cut names.
    """
    shown = [
        i
        for i, column in enumerate(columns)
        if all_columns or not (column.detail or _is_empty(column, [row[i] for row in rows]))
    ]
    table = Table(
        title=Text(title) if title else None, title_justify="left", show_header=any(column.name for column in columns)
    )
    for i in shown:
        column, cells = columns[i], [_text(row[i]) for row in rows]
        # A column on one line is as wide as its widest cell, however narrow the terminal is.
        least = None if column.prose else max((cell.cell_len for cell in [_text(column.name), *cells]), default=None)
        table.add_column(
            column.name, justify="right" if column.number else "left", min_width=least, no_wrap=not column.prose
        )
    for row in rows:
        table.add_row(*(_text(row[i]) for i in shown))
    needed = Measurement.get(console, console.options.update(width=10_000), table).minimum
    if needed > console.width:
        table.width = needed
    console.print(table, crop=False, soft_wrap=False)
    _print_legend(console, [columns[i] for i in shown])
    hidden = [column.name for i, column in enumerate(columns) if i not in shown and column.detail]
    if hidden:
        console.print(f"--all-columns also shows {', '.join(hidden)}.", markup=False)


def _print_legend(console: Console, columns: Sequence[Column]) -> None:
    explained = [column for column in columns if column.meaning]
    width = max((len(column.name) for column in explained), default=0)
    for column in explained:
        console.print(f"{column.name:>{width}}  {column.meaning}", markup=False)


def _is_empty(column: Column, cells: Sequence[Cell]) -> bool:
    return bool(cells) and column.number and all(str(cell) in NOTHING for cell in cells)


def _text(cell: Cell) -> Text:
    """Return a cell as text whose brackets are not markup."""
    return cell if isinstance(cell, Text) else Text(cell)
