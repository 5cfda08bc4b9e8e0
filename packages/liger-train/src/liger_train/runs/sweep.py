# SPDX-License-Identifier: Apache-2.0
"""`liger train --sweep`: many training runs, each in a fresh process; running out of memory is a result."""

import json
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
from liger_bench.printing import unit_of
from liger_bench.row import Measurement
from liger_core.errors import DeviceError
from liger_core.tables import Column, output, print_table
from liger_train import ranks, techniques
from liger_train.errors import SetupError
from liger_train.options import RunOptions
from liger_train.row import COLUMNS, WITHIN_SPREAD, Row, figures_of, row_of, where_of
from liger_train.runs.data import check_source
from liger_train.runs.launch import RunProcess, check, threads
from liger_train.setup import Setup
from liger_train.sweep_runs import IMPLEMENTATION, reason_to_skip, setups_of, strategies_of, swept_values

# Two warm-up steps and four timed ones.
STEPS = 6
# Additional steps, not timed, in which --checkpoint auto settles.
SETTLING = 10
# Seconds after which a run counts as hanging.
TIMEOUT = 1800.0
# Seconds between two polls of the processes.
POLL = 0.05


def run_all(
    setups: Sequence[Setup],
    where: dict[str, str],
    *,
    gpus: Sequence[int] = (),
    earlier: Sequence[Row] = (),
    options: RunOptions | None = None,
    timeout: float = TIMEOUT,
    started: Callable[[Setup], object] = lambda setup: None,
) -> Generator[Measurement[Row], None, None]:
    """Yield the row of each run as soon as it ends.

    gpus     each takes one run at a time; runs with several ranks use all GPUs, after the other runs
    earlier  rows of earlier runs, which --skip-larger also considers
    started  gets each setup when its run starts
    """
    rows, options = list(earlier), options or RunOptions()
    waiting = deque(sorted(setups, key=lambda setup: setup.ranks > 1))
    free: list[list[int]] = [[gpu] for gpu in gpus] or [[]]
    running: list[RunProcess] = []
    with tempfile.TemporaryDirectory(prefix="liger-train-") as folder:
        try:
            while waiting or running:
                while waiting and (free if waiting[0].ranks == 1 else not running):
                    setup = waiting.popleft()
                    if options.skip_larger and (reason := reason_to_skip(setup, rows)):
                        yield Measurement(row_of(setup, where, {"reason": reason}))
                        continue
                    started(setup)
                    used, share = (free.pop(0), len(gpus)) if setup.ranks == 1 else (list(gpus), 1)
                    running.append(RunProcess(setup, options, Path(folder), used, share, timeout))
                for run in [run for run in running if run.has_ended]:
                    running.remove(run)
                    free += [run.gpus] if run.setup.ranks == 1 else []
                    result = run.row(where)
                    rows.append(result.row)
                    yield result
                time.sleep(POLL)
        finally:
            for run in running:
                run.kill()


def sweep(base: Setup, options: RunOptions, settle: bool = False) -> list[Row]:
    """Run every setup of a sweep, write each row as soon as its run ends, and print all rows.

    With --resume, skip setups that have a row of this machine, commit and versions in --out. With `settle`, runs with
    --checkpoint auto take more steps, in which it settles.

    Exits with code 1 if any run failed for another reason than memory.
    """
    if ranks.count() > 1:
        raise SetupError("--sweep starts its own ranks, so it cannot run under torchrun; give --sweep ranks=1,2,4")
    if options.resume and options.out is None:
        raise SetupError("--sweep with --resume needs --out, the folder of the sweep to resume")
    check(base, options)
    varied = swept_values(options.sweeps or [])
    setups = setups_of(base, varied, strategies_of(options.strategies, varied))
    if settle:
        setups = [replace(each, steps=each.steps + SETTLING) if each.checkpoint == "auto" else each for each in setups]
    for setup in setups:
        techniques.check(setup)
        check_source(setup.data)
    gpus = _gpus(options.gpus, base)
    gpu_count, most_ranks = len(gpus) or torch.cuda.device_count(), max(setup.ranks for setup in setups)
    if base.device == "cuda" and most_ranks > gpu_count:
        raise SetupError(f"every rank needs a GPU of its own, got {most_ranks} ranks and {gpu_count} GPUs")
    if len(gpus) > 1:
        # The description of the machine has the number of threads of each run.
        torch.set_num_threads(threads(len(gpus)))
    where = machine.describe(machine.measurable_device("train", base.device))
    files = Files("train", COLUMNS, options.out, options.csv)
    files.check()
    earlier = rows_as(Row, files.read()) if options.resume else []
    done = [row for row in earlier if options.skip_larger or row.tokens_per_second is not None or row.out_of_memory]
    complete = [row for row in done if not row.failed and not row.interrupted]
    rows, measurements = completed(
        *(Setup, setups, where, complete, files),
        lambda todo, earlier, show: run_all(
            *(todo, where),
            gpus=gpus,
            earlier=earlier,
            options=options,
            started=lambda setup: show(f"{setup.model} {setup.batch} × {setup.sequence} {_compared(setup, varied)}"),
        ),
    )
    if options.as_json:
        print(json.dumps({"rows": [row.columns() for row in rows]}))
    else:
        print_rows(rows, list(varied))
    print_failures(measurements)
    if any(row.failed for row in rows):
        raise typer.Exit(1)
    return rows


def print_rows(rows: Sequence[Row], varied: Sequence[str]) -> None:
    """Print a table of the rows, with ratios to the first implementation or strategy of the same setup."""
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
            # A run that ran out of memory is not a baseline.
            base = None if row.tokens_per_second is None else row
        values = [str(getattr(row, option)) for option in varied]
        throughput, _, *others = figures_of(vars(row), None if base is None else vars(base), scale)
        lines.append([*(values if name == first else [""] * len(varied)), name, throughput, *others])
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
    """Return what a sweep compares: the name of the implementation, or the value of --liger."""
    return setup.implementation if IMPLEMENTATION in varied else setup.liger


def _gpus(words: str | None, base: Setup) -> list[int]:
    if words is None:
        return []
    if base.device != "cuda":
        raise DeviceError(f"train: --gpus needs GPUs, got --device {base.device}")
    count = torch.cuda.device_count()
    numbers = [int(word) if word.strip().isdecimal() else -1 for word in words.split(",")]
    if not all(0 <= number < count for number in numbers) or len(set(numbers)) < len(numbers):
        raise SetupError(f"--gpus must be distinct GPUs from 0 to {count - 1}, for instance 0,1, got {words!r}")
    return numbers
