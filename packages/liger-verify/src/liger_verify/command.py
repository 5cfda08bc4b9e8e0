# SPDX-License-Identifier: Apache-2.0
"""`liger verify`."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from liger_core.errors import OptionError
from liger_core.tables import Column, output, print_table
from liger_verify.comparison import compare
from liger_verify.report import Report
from liger_verify.training import SHARDS, Training
from liger_verify.world import Step, World

COLUMNS = (
    Column("gradient of"),
    Column("error", "relative to one process in float64, on the worst rank", number=True),
    Column("factor", "the multiple of the right gradient that is closest", number=True),
)
# Rows of the table that are shown unless all are asked for.
SHOWN = 10


@dataclass(frozen=True)
class Script:
    """A step in a file of one's own."""

    path: str
    name: str

    def __call__(self, world: World) -> Any:
        return loaded(self.path, self.name)(world)


def loaded(path: str, name: str) -> Step:
    """The function `name` of a Python file."""
    spec = importlib.util.spec_from_file_location("liger_verify_script", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise OptionError(f"verify: --step must be FILE.py:FUNCTION, there is no Python file {path!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(step := getattr(module, name, None)):
        raise OptionError(f"verify: --step must name a function of {path}, which has no function {name!r}")
    return step


def verify(
    model: Annotated[str, typer.Option(help="Model type of Transformers, made tiny, or a folder with a checkpoint.")] = "llama",
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share each layer, by Transformers' tp_plan='auto'.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Ranks that share each sequence.")] = 1,
    shard: Annotated[str, typer.Option(help=f"How the remaining ranks share the model: {', '.join(SHARDS)}.")] = "fsdp2",
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    ranks: Annotated[int | None, typer.Option(min=2, help="Processes; tp × cp by default, at least 2.")] = None,
    liger: Annotated[bool, typer.Option("--liger/--plain", help="Patch the model with Liger, or leave it as it is.")] = True,
    step: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION, a step of your own instead of a model.")] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens per sequence.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and tokens.")] = 0,
    tolerance: Annotated[float, typer.Option(help="Relative error that passes.")] = 1e-4,
    patience: Annotated[float, typer.Option(min=1, help="Seconds that a process waits for the others.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="Show every gradient.")] = False,
) -> None:
    """Compare a parallel training step on CPU processes with one process in float64: loss, gradient norm, every gradient.

    The number of tokens in the loss differs between ranks, some ranks have none, and sequences are packed and padded. Exit code 1 if anything differs.
    """
    start = time.perf_counter()
    count = ranks or max(2, tp * cp)
    console = output()
    if step is not None:
        path, _, name = step.rpartition(":")
        loaded(path, name)
        work: Step = Script(path, name)
        sizes = {"tp": tp, "cp": cp, "accumulation": accumulation}
        title = f"{step} on {count} ranks"
    else:
        training = Training(model, tp, cp, shard, accumulation, count, liger, length=length, seed=seed)
        training.check()
        work, sizes = training, training.sizes
        title = f"{model}{' with Liger' if liger else ''} on {count} ranks: tp {tp}, cp {cp}, dp {training.dp}, {shard}, {accumulation} micro-batches"
    if as_json:
        report = compare(work, ranks=count, sizes=sizes, tolerance=tolerance, patience=patience)
        print(json.dumps(_finite({"setup": title, **report.as_dict()}), indent=2))
    else:
        console.print(f"[bold]{escape(title)}[/bold]")
        with console.status("one process in float64, then the ranks …"):
            report = compare(work, ranks=count, sizes=sizes, tolerance=tolerance, patience=patience)
        _print(console, report, all_rows)
        console.print(f"{time.perf_counter() - start:.0f} s")
    if not report.right:
        raise typer.Exit(1)


def _print(console: Any, report: Report, all_rows: bool) -> None:
    worst = sorted(report.differences, key=lambda d: -d.error)
    chosen = report.differences if all_rows else worst[:SHOWN]
    rows = [[d.name, f"{d.error:.1e}", "–" if math.isnan(d.factor) else f"{d.factor:.4f}"] for d in chosen]
    title = "" if all_rows or len(worst) <= SHOWN else f"the {SHOWN} of {len(worst)} gradients with the largest error"
    print_table(console, COLUMNS, rows, title=title)
    console.print(f"loss {report.losses[0]:.6f}, one process {report.loss:.6f}; gradient norm of one process {report.norm:.6f}")
    color = "green" if report.right else "red"
    console.print(f"[{color}]{escape(str(report))}[/{color}]")


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
