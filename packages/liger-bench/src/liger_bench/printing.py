# SPDX-License-Identifier: Apache-2.0
"""What the commands share that print tables."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from liger_core.tables import output

AllColumns = Annotated[bool, typer.Option("--all-columns", help="Print every column, even if the table gets wider than 100 characters.")]


def wide_console() -> Console:
    """Standard output."""
    return output()


def ratio(value: float | None, base: float | None) -> str:
    """A cell: how often the base goes into the value, if both are known."""
    return f"{value / base:.2f}" if value is not None and base else "–"
