# SPDX-License-Identifier: Apache-2.0
"""`liger bench step`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from liger_bench import machine
from liger_bench.measurements import Files, check_known, completed, print_failures, rows_as
from liger_bench.printing import AllColumns, print_implementations, print_source
from liger_bench.step.cases import CASES, HF, LIGER, LIGER_KERNEL
from liger_bench.step.job import COLUMNS, Job, Row
from liger_bench.step.run import Timing, measured
from liger_bench.step.table import FIGURES, cells, title
from liger_core.errors import DeviceError, OptionError
from liger_core.tables import output

IMPLEMENTATIONS = (HF, LIGER_KERNEL, LIGER)


def step(
    cases: Annotated[
        list[str] | None, typer.Option("--case", help=f"{', '.join(CASES)}; repeatable; all by default.")
    ] = None,
    implementations: Annotated[
        list[str] | None,
        typer.Option("--implementation", help=f"{', '.join(IMPLEMENTATIONS)}; repeatable; all by default."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The same steps with two layers and 64 tokens, which run on the CPU.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a process, if they fit into the seconds.")] = 10,
    seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of timed steps; three are taken even if they take longer.")
    ] = 8.0,
    rounds: Annotated[
        int, typer.Option(min=1, help="Processes of each implementation; the implementations alternate.")
    ] = 2,
    patience: Annotated[float, typer.Option(min=1, help="Timeout of a process, in seconds.")] = 600.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default on the CPU), bfloat16 (default on a GPU) or float16.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    all_columns: AllColumns = False,
    csv: Annotated[Path | None, typer.Option(help="File to append the rows to.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder whose step.csv and step.json the rows are appended to.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what --out already has of this commit, machine, versions and dtype.")
    ] = False,
) -> None:
    """Measure training steps as users run them (LoRA, experts, compiled, long sequences, …), and the time that their
    arithmetic takes at least.

    Random weights and tokens. Each implementation runs in its own processes, which also measure the limits. Exit code 1
    if one fails.
    """
    place = machine.measurable_device("bench step", device)
    precision = machine.dtype_name(machine.named_dtype("bench step", dtype, place))
    if place.type == "cpu" and not tiny:
        raise DeviceError("bench step: models of billions of weights need a GPU, got --device cpu; give --tiny")
    if resume and out is None:
        raise OptionError("bench step: --resume needs --out, the folder of the run to resume")
    check_known("bench step", "--case", cases or [], CASES)
    check_known("bench step", "--implementation", implementations or [], IMPLEMENTATIONS)
    jobs = [
        Job(name, implementation, tiny, place.type, precision)
        for name in cases or CASES
        for implementation in CASES[name].implementations
        if implementation in (implementations or IMPLEMENTATIONS)
    ]
    files = Files("step", COLUMNS, out, csv)
    files.check()
    where = machine.describe(place)
    before = [row for row in rows_as(Row, files.read()) if resume and not row.failed]
    timing = Timing(steps, seconds, rounds, patience)
    rows, found = completed(
        *(Job, jobs, where, before, files),
        lambda todo, kept, show: measured(todo, where, timing, lambda job: show(f"{job.case} {job.implementation}")),
    )
    if as_json:
        print(json.dumps({"rows": [row.columns() for row in rows]}))
    else:
        _print(rows, all_columns)
    print_failures(found)
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def _print(rows: list[Row], all_columns: bool) -> None:
    console = output()
    columns = list(map(vars, rows))
    print_implementations(
        console, rows, lambda row: title(vars(row)), lambda row: cells(vars(row), columns), FIGURES, all_columns
    )
    for known in [row for row in rows if row.product_flops_per_second][-1:]:
        rate, copy = (known.product_flops_per_second or 0) / 1e12, (known.copy_bytes_per_second or 0) / 1e12
        console.print(f"measured peaks: matmul {rate:,.3g} TFLOP/s, copy {copy:.3g} TB/s", markup=False)
    for last in rows[-1:]:
        print_source(console, last.dtype, last)
