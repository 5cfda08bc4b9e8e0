# SPDX-License-Identifier: Apache-2.0
"""`liger inspect MODEL`: the parts of a model that ops can replace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from liger_core.errors import OptionError, nearest
from liger_core.tables import Cell, Column, output, print_table
from liger_hf.presets import NAMES

if TYPE_CHECKING:
    from liger_hf.report import Report

DTYPES = ("float32", "bfloat16", "float16")

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"{NAMES}, a folder with a config.json, a model type of Transformers, or a name on the hub.",
    ),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="An op to look for; repeatable; all by default.", show_default=False)
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", help="An op to leave out; repeatable.", show_default=False)
]
Dtype = Annotated[
    str | None, typer.Option(help=f"{', '.join(DTYPES)}; that of the config by default.", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="Where to check; cuda if there is one, else cpu.", show_default=False)]
AllColumns = Annotated[bool, typer.Option("--all-columns", help="Print classes and backends, too.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare gradients too, not outputs alone.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def inspect(
    model: Source,
    only: Only = None,
    exclude: Exclude = None,
    dtype: Dtype = None,
    device: Device = None,
    verify: Verify = True,
    as_json: AsJson = False,
    all_columns: AllColumns = False,
) -> None:
    """Show which modules of a model ops can replace, and why not similar ones; no weights are loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(
            f"liger inspect: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.{nearest(dtype, DTYPES)}"
        )
    # Imported here: Transformers takes seconds to import, and other commands and a wrong name do without it.
    from liger_hf.configs import config_of

    config = config_of(model)
    from liger_hf.inspection import inspect

    report = inspect(config, only=only, exclude=exclude, verify=verify, dtype=dtype, device=device)
    if as_json:
        print(report.to_json())
        return
    _print(report, all_columns)


def _print(report: Report, all_columns: bool) -> None:
    columns = [Column("modules"), Column("count", number=True), Column("class", detail=True), Column("op")]
    columns += [Column("backend", detail=True), Column("verdict: reason", prose=True)]
    rows: list[list[Cell]] = []
    for *cells, verdict, reason in report.cells():
        style = "yellow" if verdict == "left" else "green"
        rows.append([*cells, Text.assemble((verdict, style), f": {reason}")])
    console = output()
    console.print(report.title(), markup=False)
    if rows:
        print_table(console, columns, rows, all_columns=all_columns)
    for note in report.sentences():
        console.print(note, markup=False)
