# SPDX-License-Identifier: Apache-2.0
"""`liger bench model`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from liger_bench import machine
from liger_bench.measurements import Files, check_known, completed, print_failures, rows_as
from liger_bench.memory import bytes_of
from liger_bench.model.implementations import IMPLEMENTATIONS
from liger_bench.model.job import COLUMNS, Case, Job, Row
from liger_bench.model.run import Profiled, measured
from liger_bench.model.table import FIGURES, cells, title
from liger_bench.printing import AllColumns, print_implementations, print_source
from liger_core.errors import DeviceError, OptionError
from liger_core.tables import Column, output, print_table
from liger_hf.presets import NAMES, checked_preset

# (batch, sequence) of each model, small to large. The capped ones are sized for --memory-limit 24GiB.
SHAPES = {
    "tiny": [(2, 64)],
    "small": [(4, 384)],
    "llama-3.2-1b": [(1, 1024), (4, 1024), (8, 1024)],
    "llama-3-8b": [(64, 512), (128, 512)],
}
CAPPED = {"llama-3.2-1b": [(16, 1024), (128, 1024), (4, 8192), (4, 32768)]}
OTHERS = [(8, 1024)]
# Those that are measured on a GPU unless others are named.
DEFAULT = ("llama-3.2-1b", "llama-3-8b")
LONGEST_KERNELS = 25


def model(
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help=f"{NAMES}; repeatable; {' and '.join(DEFAULT)} on a GPU, tiny on the CPU."),
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", help="batch x sequence, for instance 8x1024; repeatable.")
    ] = None,
    implementations: Annotated[
        list[str] | None,
        typer.Option("--implementation", help=f"{', '.join(IMPLEMENTATIONS)}; repeatable; all by default."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, if they fit into the seconds.")] = 20,
    seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of timed steps; three steps are taken even if they take longer.")
    ] = 8.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default on the CPU), bfloat16 (default on a GPU) or float16.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Cap GPU memory, to simulate a smaller card, for instance 24GiB.")
    ] = None,
    together: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that load and compile at once, if their memory allows; they are timed one by one."
        ),
    ] = 1,
    profile: Annotated[bool, typer.Option("--profile", help="Also list the longest kernels of a step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    all_columns: AllColumns = False,
    csv: Annotated[Path | None, typer.Option(help="File to append the rows to.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder whose model.csv and model.json the rows are appended to.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what --out already has of this commit, machine, versions and dtype.")
    ] = False,
) -> None:
    """Measure forward and backward of whole models, each implementation in a process of its own.

    Random weights and tokens, activation checkpointing, no optimizer. Running out of memory is a result; exit code 1 if
    anything else fails.
    """
    place = machine.measurable_device("bench model", device)
    precision = machine.dtype_name(machine.named_dtype("bench model", dtype, place))
    limit = None if memory_limit is None else bytes_of("bench model: --memory-limit", memory_limit)
    if limit is not None and place.type == "cpu":
        raise DeviceError("bench model: --memory-limit needs a GPU, got --device cpu")
    if resume and out is None:
        raise OptionError("bench model: --resume needs --out, the folder of the run to resume")
    check_known("bench model", "--implementation", implementations or [], IMPLEMENTATIONS)
    names = [checked_preset("bench model", name) for name in models or (DEFAULT if place.type == "cuda" else ["tiny"])]
    jobs = [
        Job(
            name,
            *shape,
            implementation,
            place.type,
            precision,
            limit,
            steps,
            seconds,
            LONGEST_KERNELS if profile else 0,
        )
        for name in names
        for shape in _shapes(shapes, name, limit)
        for implementation in implementations or IMPLEMENTATIONS
    ]
    files = Files("model", COLUMNS, out, csv)
    files.check()
    where = machine.describe(place)
    before = [row for row in rows_as(Row, files.read()) if resume and not row.failed]
    rows, found = completed(
        *(Case, jobs, where, before, files),
        lambda todo, kept, show: measured(
            todo, where, together, lambda job, doing: show(f"{doing} {job.model} {job.shape} {job.implementation}")
        ),
    )
    if as_json:
        print(json.dumps(_object(rows, found)))
    else:
        _print(rows, found, all_columns)
    print_failures(found)
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def _object(rows: list[Row], found: list[Profiled]) -> dict[str, Any]:
    kernels = [
        {"model": r.row.model, "shape": r.row.shape, "implementation": r.row.implementation, "kernels": r.kernels}
        for r in found
        if r.kernels
    ]
    return {"rows": [row.columns() for row in rows], "kernels": kernels}


def _shapes(given: list[str] | None, model: str, limit: int | None) -> list[tuple[int, int]]:
    if not given:
        usual = SHAPES.get(model, OTHERS)
        return CAPPED.get(model, usual) if limit else usual
    found = []
    for shape in given:
        sizes = re.fullmatch(r"([1-9][0-9]*)\s*[x×]\s*([1-9][0-9]*)", shape)
        if sizes is None or int(sizes[2]) < 2:
            raise OptionError(
                f"bench model: --shape must be batch x sequence like 8x1024, with at least two tokens, got {shape!r}"
            )
        found.append((int(sizes[1]), int(sizes[2])))
    return sorted(found, key=lambda sizes: sizes[0] * sizes[1])


def _print(rows: list[Row], found: list[Profiled], all_columns: bool) -> None:
    console = output()
    columns = list(map(vars, rows))
    print_implementations(
        console, rows, lambda row: title(vars(row)), lambda row: cells(vars(row), columns), FIGURES, all_columns
    )
    for result in found:
        if result.kernels:
            _print_kernels(console, result)
    for last in rows[-1:]:
        print_source(console, last.dtype, last)


def _print_kernels(console: Console, result: Profiled) -> None:
    row = result.row
    step = f"{row.step_seconds * 1e3:.2f} ms" if row.step_seconds else "–"
    title = f"{row.model} {row.shape} {row.implementation}: the longest kernels of a step of {step}"
    columns = [Column("kernel", prose=True), *(Column(name, number=True) for name in ("calls", "ms", "share"))]
    lines = [
        [
            kernel["name"][:90],
            "" if kernel["calls"] is None else f"{kernel['calls']:g}",
            f"{kernel['ms']:.3f}",
            f"{kernel['share']:.1%}",
        ]
        for kernel in result.kernels
    ]
    print_table(console, columns, lines, title=title)
