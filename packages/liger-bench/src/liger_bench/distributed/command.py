# SPDX-License-Identifier: Apache-2.0
"""`liger bench distributed`."""

from __future__ import annotations

import importlib.metadata
import json
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import torch
import typer

from liger_bench import machine
from liger_bench.distributed.job import COLUMNS, IMPLEMENTATIONS, PLAIN, WARM_UP, Job, Row
from liger_bench.distributed.run import measured
from liger_bench.distributed.strategies import STRATEGIES
from liger_bench.measurements import Files, check_known, completed, print_failures, rows_as
from liger_bench.printing import AllColumns, print_implementations, print_source, ratio
from liger_core.errors import DeviceError, DtypeError, OptionError
from liger_core.tables import Column, output
from liger_hf.presets import LARGE, NAMES, checked_preset

FIGURES = (
    Column("tokens/s", "summed over ranks", number=True),
    Column("÷ hf", "ratio to Transformers without Liger under the same strategy", number=True),
    Column("peak GiB", "of the rank that holds the most", number=True),
    Column("GiB ÷ hf", number=True),
    Column("first loss", number=True, detail=True),
    Column("last loss", number=True),
    Column("difference", "largest difference to a loss of Transformers without Liger", number=True),
    Column("allowed", "for that difference", number=True),
)


def distributed(
    strategies: Annotated[
        list[str] | None, typer.Option("--strategy", help=f"{', '.join(STRATEGIES)}; repeatable; all by default.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--model", help=f"{NAMES}; llama-3.2-1b on GPUs, tiny on the CPU.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes; one per GPU, two on the CPU.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per rank and step; 8 on GPUs, 2 on the CPU.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Tokens per sequence; 1024 on GPUs, 64 on the CPU.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=WARM_UP + 1, help=f"Training steps; all but the first {WARM_UP} are timed.")
    ] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default on the CPU) or bfloat16 (default on GPUs).")
    ] = None,
    patience: Annotated[float, typer.Option(min=1, help="Timeout of a run, in seconds.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    all_columns: AllColumns = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder whose distributed.csv and distributed.json the rows are appended to.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what --out already has of this commit, machine and versions.")
    ] = False,
) -> None:
    """Train a model on every GPU (NCCL), or on processes of the CPU (gloo), by DDP, FSDP2 and DeepSpeed ZeRO, with and
    without Liger.

    Random weights and tokens, activation checkpointing, AdamW. Exit code 1 if a run fails or if losses differ by more
    than rounding explains.
    """
    place = machine.measurable_device("bench distributed", device)
    precision = machine.dtype_name(machine.named_dtype("bench distributed", dtype, place))
    if precision == "float16":
        raise DtypeError(
            "bench distributed: --dtype must be float32 or bfloat16, got 'float16', in which gradients would need "
            "scaling"
        )
    if resume and out is None:
        raise OptionError("bench distributed: --resume needs --out, the folder of the run to resume")
    on_gpus = place.type == "cuda"
    size = checked_preset("bench distributed", size or ("llama-3.2-1b" if on_gpus else "tiny"))
    check_known("bench distributed", "--strategy", strategies or [], STRATEGIES)
    shape = (batch or (8 if on_gpus else 2), sequence or (1024 if on_gpus else 64))
    jobs = [
        Job(
            size,
            *shape,
            strategy,
            implementation,
            _ranks(ranks, on_gpus),
            place.type,
            precision,
            steps,
            1e-4 if size in LARGE else 1e-3,
        )
        for strategy in strategies or STRATEGIES
        for implementation in IMPLEMENTATIONS
    ]
    files = Files("distributed", COLUMNS, out)
    files.check()
    where = machine.describe(place)
    where["versions"] += _deepspeed()
    before = [row for row in rows_as(Row, files.read()) if resume and not row.failed]
    rows, found = completed(
        *(Job, jobs, where, before, files),
        lambda todo, kept, show: measured(
            todo, where, patience, kept, lambda job: show(f"{job.strategy} {job.implementation}")
        ),
    )
    if as_json:
        print(json.dumps({"rows": [row.columns() for row in rows]}))
    else:
        _print(rows, all_columns)
    print_failures(found)
    if any(row.failed or row.agrees is False for row in rows):
        raise typer.Exit(1)


def _ranks(wanted: int | None, on_gpus: bool) -> int:
    if not on_gpus:
        return wanted or 2
    there = torch.cuda.device_count()
    if wanted is not None and wanted > there:
        raise DeviceError(f"bench distributed: --ranks must be at most the number of GPUs, {there}, got {wanted}")
    return wanted or there


def _deepspeed() -> str:
    try:
        return f", deepspeed {importlib.metadata.version('deepspeed')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _print(rows: list[Row], all_columns: bool) -> None:
    console = output()
    plain = {row.strategy: row for row in rows if row.implementation == PLAIN}
    print_implementations(
        console, rows, attrgetter("strategy"), lambda row: _cells(row, plain.get(row.strategy)), FIGURES, all_columns
    )
    for last in rows[-1:]:
        tokens = (
            f"{last.model}, {last.ranks} ranks × {last.batch} × {last.sequence} tokens, {last.steps} steps, "
            f"{last.dtype}"
        )
        print_source(console, tokens, last)


def _cells(row: Row, plain: Row | None) -> list[str]:
    if row.tokens_per_second is None:
        return ["out of memory" if row.out_of_memory else "–"] + ["–"] * 7
    return [
        f"{row.tokens_per_second:,.0f}",
        ratio(row.tokens_per_second, plain.tokens_per_second if plain else None),
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}",
        ratio(row.peak_bytes, plain.peak_bytes if plain else None),
        *([f"{row.losses[0]:.5f}", f"{row.losses[-1]:.5f}"] if row.losses else ["–", "–"]),
        "–"
        if row.loss_difference is None
        else f"{row.loss_difference:.1e}" + (" too large" if row.agrees is False else ""),
        "–" if row.loss_bound is None else f"{row.loss_bound:.1e}",
    ]
