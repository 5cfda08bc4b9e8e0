# SPDX-License-Identifier: Apache-2.0
"""The command `liger bench sharded`."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from liger_bench import machine
from liger_bench.measurements import Files, check_known, completed, print_failures, rows_as
from liger_bench.printing import AllColumns
from liger_bench.sharded.heads import GATHERED, IMPLEMENTATIONS, LIGER, OPS
from liger_bench.sharded.job import COLUMNS, HeadJob, HeadRow
from liger_bench.sharded.run import measure
from liger_core.errors import DeviceError, OptionError
from liger_core.tables import Column, output, print_table

FIGURES = (
    Column("ranks", number=True),
    Column(
        "implementation",
        f"{GATHERED}: logits of all ranks on each, as with tp_plan='auto'; loss-parallel: PyTorch's, on all logits",
    ),
    Column("ms", "forward and backward; of the slowest rank", number=True),
    Column("efficiency", "time of one rank ÷ (ranks × time)", number=True),
    Column("peak MiB", "beyond hidden and weight, gradients included; of the rank that holds the most", number=True),
    Column("loss", number=True),
)


def sharded(
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, such as 1,2,4; 1,2 on the CPU, 1 to all on GPUs.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Tokens; 8192 on GPUs, 256 on the CPU.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Of hidden; 4096 on GPUs, 64 on the CPU.")] = None,
    classes: Annotated[
        list[int] | None, typer.Option(min=2, help="Of the vocabulary; repeatable; 128256 and 131072 on GPUs.")
    ] = None,
    ops: Annotated[
        list[str] | None, typer.Option("--op", help=f"{', '.join(OPS)}; repeatable; all by default.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each implementation, in turn.")] = 11,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default on the CPU), bfloat16 (default on GPUs) or float16.")
    ] = None,
    patience: Annotated[float, typer.Option(min=1, help="Timeout of a run, in seconds.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    all_columns: AllColumns = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder whose sharded.csv and sharded.json the rows are appended to.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what --out has already of this commit, machine and versions.")
    ] = False,
) -> None:
    """Time the loss of a head with its vocabulary sharded over ranks, against gathered logits and loss parallelism."""
    torch_device = machine.measurable_device("bench sharded", device)
    on_gpus = torch_device.type == "cuda"
    precision = machine.dtype_name(machine.named_dtype("bench sharded", dtype, torch_device))
    if resume and out is None:
        raise OptionError("bench sharded: --resume needs --out, the folder of the run to resume")
    check_known("bench sharded", "--op", ops or [], OPS)
    sizes = (rows or (8192 if on_gpus else 256), width or (4096 if on_gpus else 64))
    jobs = [
        HeadJob(op, *sizes, count, implementation, of_ranks, torch_device.type, precision)
        for op in ops or OPS
        for count in classes or ([128256, 131072] if on_gpus else [1000])
        for of_ranks in _ranks(ranks, on_gpus)
        for implementation in IMPLEMENTATIONS
        # The peers' per-token results have no gradient; on one rank nothing is sharded.
        if implementation == LIGER or (op == OPS[0] and of_ranks > 1)
    ]
    files = Files("sharded", COLUMNS, out)
    files.check()
    where = machine.describe(torch_device)
    before = [row for row in rows_as(HeadRow, files.read()) if resume and not row.failed]
    measured_rows, results = completed(
        *(HeadJob, jobs, where, before, files),
        lambda todo, reused, show: measure(
            todo, where, repetitions, patience, lambda job: show(f"{job.op} on {job.ranks} ranks")
        ),
    )
    if as_json:
        print(json.dumps({"rows": [row.columns() for row in measured_rows]}))
    else:
        _print(measured_rows, all_columns)
    print_failures(results)
    if any(row.failed for row in measured_rows):
        raise typer.Exit(1)


def _ranks(wanted: str | None, on_gpus: bool) -> list[int]:
    there = torch.cuda.device_count() if on_gpus else 0
    if wanted is None:
        return [count for count in (1, 2, 4, 8) if count <= (there or 2)]
    if not all(number.strip().isdecimal() and int(number) > 0 for number in wanted.split(",")):
        raise OptionError(f"bench sharded: --ranks must be numbers like 1,2,4, got {wanted!r}")
    counts = sorted({int(number) for number in wanted.split(",")})
    if on_gpus and counts[-1] > there:
        raise DeviceError(f"bench sharded: --ranks must be at most the number of GPUs, {there}, got {counts[-1]}")
    return counts


def _print(rows: list[HeadRow], all_columns: bool) -> None:
    console = output()
    for row in rows:
        if row.reason:
            console.print(f"{row.op} {row.implementation} on {row.ranks} ranks: {row.reason}", markup=False)
    heads = list(dict.fromkeys((row.op, row.classes) for row in rows))
    for op, classes in heads:
        lines = [
            [
                str(row.ranks),
                row.implementation,
                "out of memory" if row.out_of_memory else "–" if row.seconds is None else f"{row.seconds * 1e3:.2f}",
                "–" if row.efficiency is None else f"{row.efficiency:.3f}",
                "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}",
                "–" if row.loss is None else f"{row.loss:.6f}",
            ]
            for row in rows
            if (row.op, row.classes) == (op, classes)
        ]
        title = f"{op}: {rows[0].rows} × {rows[0].width} × {classes}, {rows[0].dtype}"
        print_table(console, FIGURES, lines, title=title, all_columns=all_columns)
    for last in rows[-1:]:
        console.print(f"{last.machine}\n{last.versions}; commit {last.commit}; {last.date}", markup=False)
