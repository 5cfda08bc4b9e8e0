# SPDX-License-Identifier: Apache-2.0
"""What the commands share that print tables."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    """Standard output. A file has no width of its own, and 80 columns would break every cell and sentence."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    return console


def ratio(value: float | None, base: float | None) -> str:
    """A cell: how often the base goes into the value, if both are known."""
    return f"{value / base:.2f}" if value is not None and base else "–"
