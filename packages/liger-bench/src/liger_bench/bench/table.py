# SPDX-License-Identifier: Apache-2.0
"""Rows as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from liger_bench.bench.rows import Row

COLUMNS = ("op", "workload", "implementation", "pass", "ms", "0.2 – 0.8", "enqueue", "graph", "share", "MiB", "new MiB", "error", "× eager")


def print_rows(rows: list[Row], absent: dict[str, str]) -> None:
    """The figures, then why some are missing, then where they were taken."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # A file has no width of its own, and 80 columns would break every cell.
        console.width = 180
    table = Table(*COLUMNS)
    for column in table.columns[4:]:
        column.justify = "right"
    before: tuple[str, ...] = ()
    for row in rows:
        group = (row.op, row.workload, row.implementation)
        table.add_row(*(group if group != before else ("", "", "")), row.pass_, *_figures(row))
        before = group
    console.print(table)
    # One sentence for all workloads that it holds for.
    reasons = dict.fromkeys(f"{row.op} by {row.implementation} {row.pass_}".rstrip() + f": {row.reason}" for row in rows if row.reason)
    for reason in [*reasons, *(f"{name} is unavailable: {reason}" for name, reason in absent.items())]:
        console.print(reason, markup=False)
    if rows:
        first = rows[0]
        limits = f"copy {first.copy_bytes_per_second / 1e9:,.1f} GB/s, product {first.product_flops_per_second / 1e12:,.3f} TFLOP/s"
        console.print(
            f"{first.dtype} on {first.machine}; limits of this run: {limits}\n{first.versions}; commit {first.commit}; {first.date}"
        )


def _figures(row: Row) -> list[str]:
    return [
        _form("{:.3f}", row.median_ms),
        f"{_form('{:.3f}', row.low_ms)} – {_form('{:.3f}', row.high_ms)}",
        _form("{:.4f}", row.enqueue_ms),
        _form("{:.3f}", row.graph_ms),
        _form("{:.2f}", row.share),
        _mebibytes(row.peak_extra_bytes),
        _mebibytes(row.peak_beyond_gradients_bytes),
        _form("{:.1e}", row.error_gradients),
        _form("{:.2f}", row.error_eager_ratio),
    ]


def _mebibytes(size: int | None) -> str:
    return _form("{:.1f}", None if size is None else size / 2**20)


def _form(form: str, value: float | None) -> str:
    return "–" if value is None else form.format(value)
