# SPDX-License-Identifier: Apache-2.0
"""`liger plan`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

from liger_bench.progress import progress_bar
from liger_bench.writable import check_folder
from liger_core.errors import OptionError
from liger_train import ranks
from liger_train.cells import cells, strategies_of, swept
from liger_train.options import RunOptions, setup_of, takes_options
from liger_train.setup import AUTO, DEFAULTS, Setup
from liger_train.techniques import check

PANEL = "Plan"


@takes_options(optional="model")
def plan(
    words: dict[str, Any],
    options: RunOptions,
    *,
    techniques: Annotated[
        bool, Option(help="Also predict what each other technique would save.", rich_help_panel=PANEL)
    ] = True,
    compare: Annotated[
        list[Path] | None,
        Option(
            help=(
                "Compare predictions with the rows of a train.json (or its folder), or of a model.json of an earlier "
                "version; repeatable."
            ),
            rich_help_panel=PANEL,
        ),
    ] = None,
) -> None:
    """Predict the peak memory of a training run before anything is allocated, and find a setup that fits.

    A model of fake tensors takes one step. The options are those of `liger train`; those that do not affect memory have
    no effect. Exit code 1 if the setup does not fit, even if one that does was found, if no run of a sweep fits, or
    if --compare finds a prediction that is more than 10 % off or wrong about whether a run fits.
    """
    if (words["model"] is None) == (not compare):
        raise OptionError("plan: give either --model or --compare")
    if not ranks.first():
        return
    device = "cuda" if words["device"] == AUTO else words["device"]
    if device not in DEFAULTS:
        raise OptionError(f"plan: --device must be auto, cpu or cuda, got {device!r}")
    if compare:
        _compare(compare, options.out, options.as_json, words["trust_remote_code"])
        return
    setup = setup_of(words, 1, device=device, ranks=max(ranks.count(), words["tp"] * words["cp"]))
    limit = setup.memory_limit or _memory_here(device)
    if words["batch"] == AUTO and limit is None:
        none = "--device cpu has none" if device == "cpu" else "this machine has no GPU"
        raise OptionError(
            f"plan: --batch auto needs a limit to stay within, and {none}; give, for instance, --memory-limit 24GiB"
        )
    if device == "cpu":
        # For `liger train` it would be that of a GPU.
        setup = replace(setup, memory_limit=None)
    if options.sweeping:
        _plan_sweep(setup, limit, options)
        return
    check(setup, here=False)
    if options.out is not None:
        check_folder("plan: --out", options.out)
    _plan(setup, limit, words["batch"] == AUTO, techniques, options.out, options.as_json)


def _plan(setup: Setup, limit: int | None, fill: bool, techniques: bool, out: Path | None, as_json: bool) -> None:
    with progress_bar() as bar:
        task = bar.add_task("loading Transformers", total=None)
        from liger_train.plan.chart import picture
        from liger_train.plan.planning import planned
        from liger_train.plan.tables import print_plan

        plan = planned(setup, limit, techniques, fill, lambda doing: bar.update(task, description=doing))
    if out is not None:
        (out / "plan.json").write_text(json.dumps(plan.columns(), indent=1) + "\n")
        setup = plan.prediction.setup
        picture(plan.bars, limit, out / "plan.png", f"{setup.model}, {setup.batch} × {setup.sequence} tokens")
    print(json.dumps(plan.columns())) if as_json else print_plan(plan)
    if limit is not None and not plan.prediction.fits(limit):
        raise typer.Exit(1)


def _plan_sweep(setup: Setup, limit: int | None, options: RunOptions) -> None:
    """Predict the peak of every run of a sweep."""
    varied = swept(options.sweeps or [])
    setups = cells(setup, varied, strategies_of(options.strategies, varied))
    for each in setups:
        check(each, here=False)
    if options.out is not None:
        check_folder("plan: --out", options.out)
    with progress_bar() as bar:
        task = bar.add_task("predicting", total=len(setups))
        from liger_train.plan.step import predict
        from liger_train.plan.tables import print_sweep

        predictions = []
        for each in setups:
            predictions.append(predict(each))
            bar.advance(task)
    limits = [each.memory_limit or limit for each in setups]
    fits = [None if most is None else each.fits(most) for each, most in zip(predictions, limits, strict=True)]
    text = json.dumps({"predictions": [asdict(each) | {"command": each.setup.command()} for each in predictions]})
    if options.out is not None:
        (options.out / "plan.json").write_text(text + "\n")
    if options.as_json:
        print(text)
    else:
        print_sweep(predictions, list(varied), fits)
    if not any(fit in (True, None) for fit in fits):
        raise typer.Exit(1)


def _memory_here(device: str) -> int | None:
    """Return the memory of the GPU in this machine, if there is one."""
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return None


def _compare(results: list[Path], out: Path | None, as_json: bool, trust_remote_code: bool) -> None:
    from liger_train.plan.comparison import compared, rows_in
    from liger_train.plan.tables import compared_page, print_compared, worst

    rows = [row for path in results for row in rows_in(path)]
    if out is not None:
        check_folder("plan: --out", out)
    with progress_bar() as bar:
        task = bar.add_task("predicting", total=len(rows))
        comparisons = []
        for comparison in compared(rows, trust_remote_code=trust_remote_code):
            comparisons.append(comparison)
            bar.advance(task)
    if out is not None:
        command = shlex.join(
            ["liger", "plan", *(word for path in results for word in ("--compare", str(path))), "--out", str(out)]
        )
        (out / "plan-accuracy.md").write_text(compared_page(comparisons, command))
    if as_json:
        right = sum(comparison.right for comparison in comparisons)
        columns = [comparison.columns() for comparison in comparisons]
        print(json.dumps({"rows": columns, "worst": worst(comparisons), "right": right}))
    else:
        print_compared(comparisons)
    if not all(comparison.good for comparison in comparisons):
        raise typer.Exit(1)
