# SPDX-License-Identifier: Apache-2.0
"""The table of rows for the terminal."""

from collections.abc import Sequence

from rich.text import Text

from liger_bench.bench.rows import OpRow
from liger_core.tables import Cell, Column, output, print_table

COLUMNS = (
    Column("implementation"),
    Column("pass"),
    Column("ms", "median milliseconds of a call", number=True),
    Column("0.2 – 0.8", "quantiles of the same, in ms", number=True, detail=True),
    Column("enqueue", "ms until the call returns to the host, before the device is done", number=True, detail=True),
    Column("graph", "the same call replayed as a CUDA graph, in ms", number=True, detail=True),
    Column("roofline", "fraction of the roofline: least possible time on this machine ÷ measured time", number=True),
    Column("MiB", "peak memory beyond the inputs", number=True, detail=True),
    Column("new MiB", "peak memory beyond inputs and returned gradients", number=True),
    Column("error", "largest relative error of a gradient, against float64", number=True, detail=True),
    Column("× eager", "gradient error ÷ that of plain PyTorch in the same dtype, both against float64", number=True),
)


def print_rows(rows: Sequence[OpRow], absent: dict[str, str], *, all_columns: bool = False) -> None:
    """Print the figures, then why some are missing, then where they were measured."""
    console = output()
    cells: list[list[Cell]] = []
    before = ("", "", "")
    for row in rows:
        group = (row.op, row.workload, row.implementation)
        if group[0] != before[0]:
            cells.append(_heading(Text(row.op, "bold")))
        if group[:2] != before[:2]:
            cells.append(_heading(f"  {row.workload}"))
        cells.append([f"    {row.implementation}" if group != before else "", row.pass_, *_figures(row)])
        before = group
    print_table(console, COLUMNS, cells, all_columns=all_columns)
    # One sentence for all workloads that share it.
    reasons = dict.fromkeys(
        f"{row.op} by {row.implementation} {row.pass_}".rstrip() + f": {row.reason}" for row in rows if row.reason
    )
    for reason in [*reasons, *(f"{name} is unavailable: {reason}" for name, reason in absent.items())]:
        console.print(reason, markup=False)
    if rows:
        first = rows[0]
        copy, product = first.copy_bytes_per_second / 1e9, first.product_flops_per_second / 1e12
        limits = f"measured peaks: copy {copy:,.1f} GB/s, matmul {product:,.3f} TFLOP/s"
        source = f"{first.versions}; commit {first.commit}; {first.date}"
        console.print(f"{first.dtype} on {first.machine}; {limits}\n{source}", markup=False)


def _heading(words: Cell) -> list[Cell]:
    return [words, *[""] * (len(COLUMNS) - 1)]


def _figures(row: OpRow) -> list[str]:
    return [
        _form("{:.3f}", row.median_ms),
        f"{_form('{:.3f}', row.low_ms)} – {_form('{:.3f}', row.high_ms)}",
        _form("{:.4f}", row.enqueue_ms),
        _form("{:.3f}", row.graph_ms),
        _form("{:.2f}", row.share),
        _form("{:.1f}", row.peak_extra_bytes, 2**20),
        _form("{:.1f}", row.peak_beyond_gradients_bytes, 2**20),
        _form("{:.1e}", row.error_gradients),
        _form("{:.2f}", row.error_eager_ratio),
    ]


def _form(form: str, value: float | None, unit: float = 1) -> str:
    return "–" if value is None else form.format(value / unit)
