# SPDX-License-Identifier: Apache-2.0
"""Formats of figures, and other parts of printed tables that several commands share."""

from typing import Annotated

import typer

AllColumns = Annotated[
    bool, typer.Option("--all-columns", help="Print every column, even if the table gets wider than 100 characters.")
]


def change(value: float, base: float) -> str:
    """Format the change from a base in percent, like −48 %; 0 has no sign."""
    percent = round(100 * (value / base - 1))
    return f"{'−' if percent < 0 else '+' if percent else ''}{abs(percent)} %"


def ratio(value: float | None, base: float | None) -> str:
    """Format the ratio of a value to its base, if both are known."""
    return f"{value / base:.2f}" if value is not None and base else "–"


def unit_of(largest: float) -> tuple[int, str]:
    """Return the unit for a column of sizes and its name, given the largest size in bytes."""
    return next(
        ((1 << bits, name) for bits, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 1 << bits),
        (1, "bytes"),
    )


def size(count: float) -> str:
    """Format a number of bytes, like 1.24 GiB."""
    scale, name = unit_of(count)
    return f"{count / scale:,.2f}".removesuffix(".00") + f" {name}"


def amount(count: float) -> str:
    """Format a number to three digits, like 33.8 K."""
    scale, name = next(
        ((10**power, f" {name}") for power, name in ((9, "B"), (6, "M"), (3, "K")) if count >= 10**power), (1, "")
    )
    value = count / scale
    return f"{value:.{max(0, 3 - len(str(int(value)))) if scale > 1 else 0}f}{name}"
