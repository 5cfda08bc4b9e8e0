# SPDX-License-Identifier: Apache-2.0
"""`liger plan`."""

import json
import shlex
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

from liger_bench.progress import progress_bar
from liger_bench.writable import check_folder
from liger_core.errors import OptionError
from liger_core.tables import output
from liger_train import ranks
from liger_train.options import RunOptions, setup_of, takes_options
from liger_train.setup import AUTO, AUTO_OPTIONS, DEFAULTS, Setup
from liger_train.sweep_runs import setups_of, strategies_of, swept_values
from liger_train.techniques import check


@takes_options(optional="model")
def plan(
    values: dict[str, Any],
    options: RunOptions,
    *,
    techniques: Annotated[bool, Option(help="Also predict what other techniques save.")] = True,
    compare: Annotated[
        list[Path] | None,
        Option(
            help="Compare predictions with the rows of a train.json (or its folder), or of a model.json of an earlier "
            "version; repeatable."
        ),
    ] = None,
    nodes: Annotated[int | None, Option(min=1, help="Machines of --ranks. Default: one for each 8 ranks.")] = None,
    links: Annotated[float, Option(min=1, help="GB/s that a GPU receives from GPUs of its machine.")] = 450.0,
    network: Annotated[float, Option(min=1, help="GB/s that a GPU receives from other machines.")] = 50.0,
    serve: Annotated[bool, Option("--serve", help="Show a page that answers for any method and batch.")] = False,
) -> None:
    """Predict the peak memory of a training run before anything is allocated, and find a setup that fits.

    A model of fake tensors takes one step. The options are those of `liger train`; options that do not affect memory
    have no effect. Exit code 1 if the setup does not fit, even if another one does; if no run of a sweep fits; or if
    --compare finds a prediction that is more than 10 % off, or wrong about whether a run fits.
    """
    if (values["model"] is None) == (not compare):
        raise OptionError("plan: give either --model or --compare")
    if not ranks.first():
        return
    device = "cuda" if values["device"] == AUTO else values["device"]
    if device not in DEFAULTS:
        raise OptionError(f"plan: --device must be auto, cpu or cuda, got {device!r}")
    if compare:
        _compare(compare, options.out, options.as_json, values["trust_remote_code"])
        return
    auto = [name for name in AUTO_OPTIONS if values[name] == AUTO]
    shared = values["tp"] * values["cp"]
    smallest = {"ranks": shared, "sequence": Setup.sequence, "batch": 1}
    setup = setup_of(values, smallest, device=device, ranks=max(ranks.count(), shared))
    limit = setup.memory_limit
    if limit is None and device == "cuda" and torch.cuda.is_available():
        limit = int(torch.cuda.get_device_properties(0).total_memory)
    if auto and limit is None:
        reason = "--device cpu has none" if device == "cpu" else "this machine has no GPU"
        raise OptionError(
            f"plan: --{auto[-1]} auto needs a limit, and {reason}; give, for instance, --memory-limit 24GiB"
        )
    if device == "cpu":
        # On the CPU, the limit is only for this plan: `liger train` supports it on GPUs only.
        setup = replace(setup, memory_limit=None)
    if options.sweeping:
        _plan_sweep(setup, limit, auto, options)
        return
    check(setup, here=False)
    if serve:
        _serve(setup)
        return
    if options.out is not None:
        check_folder("plan: --out", options.out)
    if nodes and ("ranks" in auto or setup.ranks % nodes):
        count = AUTO if "ranks" in auto else setup.ranks
        raise OptionError(f"plan: --nodes must divide the number of ranks, got {nodes} and {count} ranks")
    rates = {"links": links * 1e9, "hosts": network * 1e9} | ({"per_host": setup.ranks // nodes} if nodes else {})
    _plan(setup, limit, auto, techniques, options, rates)


def _plan(
    setup: Setup, limit: int | None, auto: list[str], techniques: bool, options: RunOptions, rates: dict[str, Any]
) -> None:
    out, as_json = options.out, options.as_json
    with progress_bar() as bar:
        task = bar.add_task("loading Transformers", total=None)
        from liger_train.plan.chart import picture
        from liger_train.plan.cost import RATES
        from liger_train.plan.planning import make_plan
        from liger_train.plan.tables import print_plan

        all_rates = replace(RATES["H200"], **rates)
        plan = make_plan(setup, limit, techniques, auto, all_rates, lambda doing: bar.update(task, description=doing))
    if out is not None:
        (out / "plan.json").write_text(json.dumps(plan.columns(), indent=1) + "\n")
        setup = plan.prediction.setup
        picture(plan.bars, limit, out / "plan.png", f"{setup.model}, {setup.batch} × {setup.sequence} tokens")
    print(json.dumps(plan.columns())) if as_json else print_plan(plan)
    if limit is not None and not plan.prediction.fits(limit):
        raise typer.Exit(1)


def _serve(setup: Setup) -> None:
    """Serve the page until the command is interrupted; it asks for each combination that it shows."""
    with progress_bar() as bar:
        bar.add_task("loading Transformers", total=None)
        from liger_train.plan.fit import curve_of_config, page, server

    whole = page({setup.model: {}}, served=True)
    with server(whole, partial(curve_of_config, setup)) as served, suppress(KeyboardInterrupt):
        output().print(f"http://127.0.0.1:{served.server_port} shows the page until you press Ctrl+C.")
        served.serve_forever()


def _plan_sweep(setup: Setup, limit: int | None, auto: list[str], options: RunOptions) -> None:
    varied = swept_values(options.sweeps or [])
    setups = setups_of(setup, varied, strategies_of(options.strategies, varied))
    for each in setups:
        check(each, here=False)
    if options.out is not None:
        check_folder("plan: --out", options.out)
    with progress_bar() as bar:
        from liger_train.plan.auto_checkpoint import predict_end
        from liger_train.plan.search import answered
        from liger_train.plan.step import predict
        from liger_train.plan.tables import print_sweep

        predictions = []
        for each in bar.track(setups, description="predicting"):
            within = each.memory_limit or limit
            if within is not None:
                each, _ = answered(each, within, {*auto} - {*varied}, predict)
            predictions.append(predict_end(predict(each), within))
    limits = [each.memory_limit or limit for each in setups]
    fits = [None if limit is None else each.fits(limit) for each, limit in zip(predictions, limits, strict=True)]
    text = json.dumps({"predictions": [asdict(each) | {"command": each.setup.command()} for each in predictions]})
    if options.out is not None:
        (options.out / "plan.json").write_text(text + "\n")
    if options.as_json:
        print(text)
    else:
        print_sweep(predictions, list(dict.fromkeys([*varied, *auto])), fits)
    if not any(fit in (True, None) for fit in fits):
        raise typer.Exit(1)


def _compare(results: list[Path], out: Path | None, as_json: bool, trust_remote_code: bool) -> None:
    from liger_train.plan.comparison import compare_rows, rows_in
    from liger_train.plan.tables import compared_page, print_compared, worst

    rows = [row for path in results for row in rows_in(path)]
    if out is not None:
        check_folder("plan: --out", out)
    with progress_bar() as bar:
        compared = compare_rows(rows, trust_remote_code=trust_remote_code)
        comparisons = list(bar.track(compared, total=len(rows), description="predicting"))
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
