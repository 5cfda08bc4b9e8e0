# SPDX-License-Identifier: Apache-2.0
"""`liger train --sweep`: many training runs, each in a fresh process; running out of memory is a result, after which
the next run starts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import typer

from liger_bench import machine
from liger_bench.measurements import Files, completed, print_failures, rows_as
from liger_bench.printing import ratio, unit_of
from liger_bench.row import Measurement
from liger_core.errors import DeviceError, OptionError
from liger_core.tables import Column, output, print_table
from liger_train import techniques
from liger_train.cells import IMPLEMENTATION, cells, hopeless, strategies_of, swept
from liger_train.options import RunOptions
from liger_train.row import COLUMNS, WITHIN_SPREAD, Row, overlapping, row_of, where_of
from liger_train.setup import Setup
from liger_train.train.data import check_source
from liger_train.train.places import Started, check, threads

# Two warm-up steps and four timed ones.
STEPS = 6
# More steps for --checkpoint auto, in which it settles and which are not timed.
SETTLING = 10
# A run of few steps that takes longer hangs.
PATIENCE = 1800.0
# Seconds between two looks at the processes of runs.
POLL = 0.05

Phase = Callable[[Setup], object]


def measured(
    setups: Sequence[Setup],
    where: dict[str, str],
    *,
    gpus: Sequence[int] = (),
    before: Sequence[Row] = (),
    options: RunOptions | None = None,
    patience: float = PATIENCE,
    phase: Phase = lambda setup: None,
) -> Generator[Measurement[Row], None, None]:
    """Yield the row of each run as soon as it ends.

    gpus    one run at a time on each of these; runs of several ranks use all of them, after the others
    before  the rows of earlier runs, by which --skip-larger skips runs, too
    """
    known, options = list(before), options or RunOptions()
    waiting = deque(sorted(setups, key=lambda setup: setup.ranks > 1))
    free: list[list[int]] = [[gpu] for gpu in gpus] or [[]]
    running: list[Started] = []
    with tempfile.TemporaryDirectory(prefix="liger-train-") as folder:
        try:
            while waiting or running:
                while waiting and (free if waiting[0].ranks == 1 else not running):
                    setup = waiting.popleft()
                    if options.skip_larger and (reason := hopeless(setup, known)):
                        yield Measurement(row_of(setup, where, {"reason": reason}))
                        continue
                    phase(setup)
                    alone = setup.ranks == 1
                    used, share = (free.pop(0), len(gpus)) if alone else (list(gpus), 1)
                    running.append(Started(setup, options, Path(folder), used, share, patience))
                for run in [run for run in running if run.over]:
                    running.remove(run)
                    free += [run.gpus] if run.setup.ranks == 1 else []
                    result = run.row(where)
                    known.append(result.row)
                    yield result
                time.sleep(POLL)
        finally:
            for run in running:
                run.kill()


def sweep(base: Setup, options: RunOptions, settle: bool = False) -> list[Row]:
    """Run every cell, write each row at once, and print them all.

    The exit code is 1 if any run failed other than by running out of memory.

    With --resume, cells whose rows of this machine, commit and versions are in --out are skipped. With settle, runs
    with `--checkpoint auto` take more steps, in which it settles.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError(
            "train: --sweep starts its own ranks, so it must not run under torchrun; give --sweep ranks=1,2,4 to vary "
            "them"
        )
    if options.resume and options.out is None:
        raise OptionError("train: --sweep with --resume needs --out, the folder of the sweep to resume")
    check(base, options)
    varied = swept(options.sweeps or [])
    setups = cells(base, varied, strategies_of(options.strategies, varied))
    if settle:
        setups = [replace(each, steps=each.steps + SETTLING) if each.checkpoint == "auto" else each for each in setups]
    for setup in setups:
        techniques.check(setup)
        check_source(setup.data)
    chosen = _gpus(options.gpus, base)
    there, most = len(chosen) or torch.cuda.device_count(), max(setup.ranks for setup in setups)
    if base.device == "cuda" and most > there:
        raise OptionError(f"train: every rank needs a GPU of its own, got {most} ranks and {there} GPUs")
    if len(chosen) > 1:
        # Each run gets this number of threads; it is part of the machine's description.
        torch.set_num_threads(threads(len(chosen)))
    where = machine.describe(machine.measurable_device("train", base.device))
    files = Files("train", COLUMNS, options.out, options.csv)
    files.check()
    before = rows_as(Row, files.read()) if options.resume else []
    tried = [row for row in before if options.skip_larger or row.tokens_per_second is not None or row.out_of_memory]
    good = [row for row in tried if not row.failed and not row.interrupted]
    rows, measurements = completed(
        *(Setup, setups, where, good, files),
        lambda todo, rows_before, show: measured(
            *(todo, where),
            gpus=chosen,
            before=rows_before,
            options=options,
            phase=lambda setup: show(f"{setup.model} {setup.batch} × {setup.sequence} {_compared(setup, varied)}"),
        ),
    )
    if options.as_json:
        print(json.dumps({"rows": [row.columns() for row in rows]}))
    else:
        show(rows, list(varied))
    print_failures(measurements)
    if any(row.failed for row in rows):
        raise typer.Exit(1)
    return rows


def show(rows: Sequence[Row], varied: Sequence[str]) -> None:
    """A table of the rows, with ratios to the first implementation or strategy at the same place."""
    console = output()
    compared = {id(row): _compared(row, varied) for row in rows}
    column = IMPLEMENTATION if IMPLEMENTATION in varied else "liger"
    varied = [name for name in varied if name != IMPLEMENTATION]
    first = compared[id(rows[0])] if rows else ""
    scale, unit = unit_of(max((row.peak_bytes or 0 for row in rows), default=0) or 1 << 30)
    lines: list[list[str]] = []
    base: Row | None = None
    for row in rows:
        name = compared[id(row)]
        if name == first:
            # The memory of a run that ran out of it is not a baseline.
            base = None if row.tokens_per_second is None else row
        values = [str(getattr(row, option)) for option in varied]
        lines.append([*(values if name == first else [""] * len(varied)), name, *_figures(row, base, scale)])
    spread = ""
    if any(WITHIN_SPREAD in cell for line in lines for cell in line):
        spread = f"{WITHIN_SPREAD.strip()} within the spread of the steps: their 20th to 80th percentiles overlap"
    columns = [Column(name) for name in (*varied, column)]
    columns += [Column("tokens/s", number=True), Column(f"÷ {first}", spread, number=True)]
    columns += [Column(name, number=True) for name in (f"peak {unit}", f"÷ {first}", "last loss")]
    print_table(console, columns, lines)
    for row in rows:
        if row.reason:
            words = [*(f"{name} {getattr(row, name)}" for name in varied), compared[id(row)]]
            console.print(f"{', '.join(words)}: {row.reason}", markup=False)
    for note in dict.fromkeys(note for row in rows for note in row.notes or []):
        console.print(note, markup=False)
    if rows:
        console.print(where_of(rows[-1]), markup=False)


def _compared(setup: Setup, varied: Collection[str]) -> str:
    """The name of what a sweep compares: the implementation, or the value of --liger."""
    return setup.implementation if IMPLEMENTATION in varied else setup.liger


def _figures(row: Row, base: Row | None, scale: int) -> list[str]:
    if row.tokens_per_second is None:
        return ["out of memory" if row.out_of_memory else "–"] + ["–"] * 4
    about = WITHIN_SPREAD if base not in (None, row) and overlapping(vars(row), vars(base)) else ""
    return [
        f"{row.tokens_per_second:,.0f}",
        about + ratio(row.tokens_per_second, base.tokens_per_second if base else None),
        "–" if row.peak_bytes is None else f"{row.peak_bytes / scale:.2f}",
        ratio(row.peak_bytes, base.peak_bytes if base else None),
        f"{row.losses[-1]:.4f}" if row.losses else "–",
    ]


def _gpus(words: str | None, base: Setup) -> list[int]:
    if words is None:
        return []
    if base.device != "cuda":
        raise DeviceError(f"train: --gpus needs GPUs, got --device {base.device}")
    there = torch.cuda.device_count()
    numbers = [int(word) if word.strip().isdecimal() else -1 for word in words.split(",")]
    if not all(0 <= number < there for number in numbers) or len(set(numbers)) < len(numbers):
        raise OptionError(f"train: --gpus must be distinct GPUs from 0 to {there - 1}, for instance 0,1, got {words!r}")
    return numbers
