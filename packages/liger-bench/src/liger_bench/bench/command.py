# SPDX-License-Identifier: Apache-2.0
"""`liger bench [OP]…`: the benchmark of the ops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from liger_bench import machine
from liger_bench.bench.case import make_case
from liger_bench.bench.limits import measure_limits
from liger_bench.bench.rows import Bench, Row, append_csv, append_json, check_csv
from liger_bench.progress import progress_bar
from liger_core.errors import BackendError, OptionError, nearest
from liger_core.op import Op, Workload
from liger_core.plugins import Registry, registry
from liger_core.selection import use

Plan = list[tuple[Op[..., Any], Workload, list[str]]]


def ops(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to measure; all of them by default.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32 (default on the CPU), bfloat16 (default on a GPU) or float16.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="A backend to measure beside the eager reference; repeatable; all by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the small workloads, briefly.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    csv: Annotated[Path | None, typer.Option(help="File to append the rows to.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder whose results.csv and results.json the rows are appended to.")] = None,
) -> None:
    """Measure time, peak memory, accuracy and share of the machine's limit of every op; exit code 1 if an implementation fails."""
    place = machine.measurable_device("bench", device)
    precision = machine.named_dtype("bench", dtype, place)
    plan = _plan(registry(), names or [], backend or [], place, quick)
    files = [path for path in (csv, out / "results.csv" if out else None) if path]
    for path in files:
        check_csv(path)
    with progress_bar() as bar:
        rows = list(_rows(plan, place, precision, quick, bar))
    for path in files:
        append_csv(rows, path)
    if out:
        append_json(rows, out / "results.json")
    if as_json:
        print(json.dumps({"device": place.type, "rows": [row.columns() for row in rows]}))
    else:
        _print(rows)
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def _plan(found: Registry, names: list[str], backends: list[str], device: torch.device, quick: bool) -> Plan:
    for name in names:
        if name not in found.ops:
            raise OptionError(f"bench: no op named {name!r}; known: {', '.join(sorted(found.ops))}.{nearest(name, found.ops)}")
    for name in backends:
        _check_backend(found, name, device)
    plan: Plan = []
    for op in (found.ops[name] for name in names or found.ops):
        implementations = _implementations(found, op, backends, device)
        plan += [(op, workload, implementations) for workload in op.workloads() if workload.quick or not quick]
    return plan


def _check_backend(found: Registry, name: str, device: torch.device) -> None:
    """The sentences for an unknown or unavailable backend are those of the selection."""
    use(name).undo()
    if name not in found.backends:
        raise OptionError(f"bench: --backend must name a backend, got {name!r}; installed: {', '.join(sorted(found.backends))}")
    if device.type not in found.backends[name].device_types:
        kinds = " and ".join(found.backends[name].device_types)
        raise BackendError(f"bench: backend {name!r} runs on {kinds} tensors, got --device {device.type}")


def _implementations(found: Registry, op: Op[..., Any], asked: list[str], device: torch.device) -> list[str]:
    """The reference first, then the backends in the order asked for, or all that run on this device."""
    able = [name for name, table in found.implementations.items() if op.name in table and device.type in found.backends[name].device_types]
    reference = [name for name in able if found.implementations[name][op.name] is op.reference]
    others = [name for name in asked or able if name not in reference]
    return [*reference, *others]


def _rows(plan: Plan, device: torch.device, dtype: torch.dtype, quick: bool, bar: Progress) -> Iterator[Row]:
    task = bar.add_task("measuring the limits", total=1 + sum(len(implementations) for _, _, implementations in plan))
    seconds = 0.15 if quick else 1.0
    run = Bench(device, dtype, measure_limits(device, dtype, seconds), seconds, machine.describe(device))
    bar.advance(task)
    for op, workload, implementations in plan:
        case = make_case(op, workload, device, dtype)
        case.set_exact()
        for name in implementations:
            bar.update(task, description=f"{op.name} {workload.name} {name}")
            yield from run.rows(case, name)
            bar.advance(task)


def _print(rows: list[Row]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A file has no width of its own, and 80 columns would break every cell.
        console.width = 140
    table = Table("op", "workload", "implementation", "pass", "ms", "0.2 – 0.8", "peak MiB", "share", "error", "gradients")
    for column in table.columns[4:]:
        column.justify = "right"
    before: tuple[str, ...] = ()
    for row in rows:
        group = (row.op, row.workload, row.implementation)
        table.add_row(*(group if group != before else ("", "", "")), row.pass_, *_figures(row))
        before = group
    console.print(table)
    for row in rows:
        if row.reason:
            console.print(f"{row.op} {row.workload} {row.implementation}: {row.reason}", markup=False)
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
        _form("{:.1f}", None if row.peak_extra_bytes is None else row.peak_extra_bytes / 2**20),
        _form("{:.2f}", row.share),
        _form("{:.1e}", row.error_outputs),
        _form("{:.1e}", row.error_gradients),
    ]


def _form(form: str, value: float | None) -> str:
    return "–" if value is None else form.format(value)
