# SPDX-License-Identifier: Apache-2.0
"""The command `liger verify`."""

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch.multiprocessing.spawn import ProcessException

from liger_core.errors import OptionError
from liger_core.tables import Column, output, print_table
from liger_verify.comparison import compare
from liger_verify.forms import Packing, packings
from liger_verify.matrix import MODELS, SETUPS, Outcome, outcomes, packing_outcomes, reason_of, setups_in, steps_of
from liger_verify.report import Report
from liger_verify.sampler import SamplerReport, compare_sampler, drawn, loaded_model, read_samples
from liger_verify.training import SHARDS, Training
from liger_verify.world import Step, World

COLUMNS = (
    Column("gradient of"),
    Column("error", "relative to one process in float64, on the worst rank", number=True),
    Column("factor", "the multiple of the right gradient that is closest", number=True),
)
MATRIX = (
    Column("model"),
    Column("ranks", number=True),
    Column("tp", number=True),
    Column("cp", number=True),
    Column("dp", number=True),
    Column("shard"),
    Column("micro", "micro-batches per step", number=True),
    Column("Liger"),
    Column("error", "the largest of a gradient, relative to one process in float64", number=True),
    Column("s", "seconds, with those of the one process where it was not yet known", number=True),
    Column("result"),
)
SAMPLER = (
    Column("model in"),
    Column("head in"),
    *(Column(name, "of the gap in nats", number=True) for name in ("mean", "rms", "p99", "largest")),
    Column("training", "whether the training forward pass is batch-invariant"),
    Column("sampler", "whether prefill and decode are batch-invariant"),
)
# The dtypes of the model and of the head that are compared with a sampler; bugs show in float64.
PRECISIONS = ((torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32))
# The root mean square in nats that passes for the log-probabilities of another program.
OTHER_PROGRAM = 0.05
PACKING = (
    Column("model"),
    Column("packed by", "the argument that separates documents"),
    Column("Liger"),
    Column("error", "the largest of a hidden state or gradient, relative to documents alone in float64", number=True),
    Column("s", "seconds", number=True),
    Column("result"),
)
# The rows of the table that are shown without --all.
SHOWN = 10


def run_script(path: str, name: str, world: World) -> Any:
    """Run the step `name` of a user's file."""
    return loaded(path, name)(world)


def loaded_from(step: str) -> Step:
    """Return the step FILE.py:FUNCTION, after checking that the function exists."""
    path, colon, name = step.rpartition(":")
    if not colon or not name:
        raise OptionError(f"verify: --step must be FILE.py:FUNCTION, got {step!r}, which names no function")
    loaded(path, name)
    return partial(run_script, path, name)


def loaded(path: str, name: str) -> Step:
    """Load the function `name` of a Python file."""
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
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Model type of Transformers, made tiny, or a folder with a checkpoint; by default llama. Repeat it for "
                "several models."
            )
        ),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Several models in every kind of setup, with and without Liger.")
    ] = False,
    sampler: Annotated[
        bool, typer.Option("--sampler", help="Log-probabilities of training, compared with those of generation.")
    ] = False,
    log_probs: Annotated[
        str | None,
        typer.Option(help="FILE with JSON lines of tokens and log_probs from vLLM or SGLang, instead of --sampler."),
    ] = None,
    packing: Annotated[
        bool, typer.Option("--packing", help="Documents packed into one row, compared with the same documents alone.")
    ] = False,
    setups: Annotated[
        str | None, typer.Option(help="FILE.toml with a table for each setup: a matrix of your own.")
    ] = None,
    tp: Annotated[
        int,
        typer.Option(min=1, help="Tensor parallelism: ranks that share each layer, by Transformers' tp_plan='auto'."),
    ] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context parallelism: ranks that share each sequence.")] = 1,
    shard: Annotated[
        str, typer.Option(help=f"How the remaining ranks share the model: {', '.join(SHARDS)}.")
    ] = "fsdp2",
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches per optimizer step.")] = 1,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Number of processes. Default: as many as --tp × --cp needs, at least 2.")
    ] = None,
    liger: Annotated[
        bool | None,
        typer.Option(
            "--liger/--plain",
            help="Patch the model with Liger, or leave it as it is; by default patched, in a matrix both.",
        ),
    ] = None,
    step: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION, a step of your own instead of a model.")] = None,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens per sequence.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and tokens.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help=(
                "Relative error that passes: by default 1e-4, with --packing 1e-7. With --sampler it is a gap in nats, "
                "with --log-probs the root mean square (default: 0.05)."
            )
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Of the ranks: cpu, or cuda with a GPU for each.")] = "cpu",
    patience: Annotated[float, typer.Option(min=1, help="Seconds that a process waits for the others.")] = 600.0,
    limit: Annotated[
        float,
        typer.Option(min=1, help="Seconds after which one of several comparisons is ended; the next ones still run."),
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="Show every gradient.")] = False,
) -> None:
    """Compare the loss and gradients of a parallel training step with one process in float64 on the CPU.

    The number of tokens in the loss differs between ranks, some ranks have none, and sequences are packed and padded.
    Exit code 1 if anything differs. With several models or setups, all are compared, even if one differs, crashes or
    hangs.

    With --packing, one process runs documents packed into one row and the same documents alone, and names the layer in
    which they mix.
    """
    start = time.perf_counter()
    single = {"tp": tp > 1, "cp": cp > 1, "shard": shard != "fsdp2", "accumulation": accumulation > 1}
    single |= {"ranks": ranks is not None, "step": step is not None}
    on_one = {**single, "device": device != "cpu"}
    in_matrix = {"matrix": matrix, "setups": setups is not None}
    count = ranks or max(2, tp * cp)
    setup: dict[str, Any] = {"tp": tp, "cp": cp, "shard": shard, "accumulation": accumulation, "ranks": count}
    options: dict[str, Any] = {"tolerance": 1e-4 if tolerance is None else tolerance, "patience": patience}
    options |= {"device": device}
    if sampler or log_probs is not None:
        _leave_out("--sampler compares one model on one process", {**in_matrix, "packing": packing, **on_one})
        if model is not None and len(model) > 1:
            raise OptionError(f"verify: --sampler compares one model, got {', '.join(model)}; run it for each")
        right = _sampler((model or MODELS)[0], log_probs, liger is not False, seed, tolerance, as_json)
    elif packing:
        _leave_out("--packing compares documents on one process", {**on_one, **in_matrix})
        cases = packings(model or MODELS[:1], liger, sequence, seed)
        right = _several(packing_outcomes(cases, tolerance or 1e-7), len(cases), as_json, start, PACKING)
    elif any(in_matrix.values()) or (step is None and len(model or []) > 1):
        if all(in_matrix.values()):
            raise OptionError("verify: --matrix has its setups, --setups those of a file; leave one of them out")
        for name in (name for name, is_set in in_matrix.items() if is_set):
            _leave_out(f"--{name} has several setups", single, ", which is of one")
        listed = setups_in(setups) if setups is not None else SETUPS if matrix else [setup]
        ways = [liger] if liger is not None else [False, True] if any(in_matrix.values()) else [True]
        chosen = steps_of(model or (MODELS if matrix else MODELS[:1]), listed, ways, sequence=sequence, seed=seed)
        right = _several(outcomes(chosen, limit=limit, **options), len(chosen), as_json, start)
    elif step is not None:
        of_a_model = {"model": model is not None, "shard": single["shard"], "liger": liger is True}
        of_a_model["plain"] = liger is False
        _leave_out("--step is a step of your own", of_a_model, ", which is for models")
        sizes = {"tp": tp, "cp": cp, "accumulation": accumulation}
        run = partial(compare, loaded_from(step), ranks=count, sizes=sizes, **options)
        right = _single(run, f"{step} on {count} ranks", as_json, all_rows, start)
    else:
        training = Training((model or MODELS)[0], **setup, liger=liger is not False, sequence=sequence, seed=seed)
        training.check()
        run = partial(compare, training, ranks=count, sizes=training.sizes, **options)
        try:
            right = _single(run, training.title, as_json, all_rows, start)
        except ProcessException as error:
            raise OptionError(f"verify: {training.title} failed: {reason_of(error)}") from error
    if not right:
        raise typer.Exit(1)


def _sampler(model: str, path: str | None, liger: bool, seed: int, tolerance: float | None, as_json: bool) -> bool:
    """Compare the training forward pass with a sampler in several precisions, and print a table."""
    samples = None if path is None else read_samples(path)
    if tolerance is None:
        tolerance = 1e-4 if path is None else OTHER_PROGRAM
    loaded_here = loaded_model(model, liger, seed)
    samples = samples or drawn(loaded_here, seed)
    reports: list[tuple[str, str, SamplerReport]] = []
    for dtype, head in PRECISIONS if path is None else PRECISIONS[1:]:
        passes = tolerance if path is not None or dtype == torch.float64 else OTHER_PROGRAM
        report = compare_sampler(
            loaded_here.to(dtype), samples, tolerance=passes, head_dtype=head, sampler_head_dtype=head
        )
        reports.append((str(dtype)[6:], str(head or dtype)[6:], report))
    # In 16 bits the gap is a measurement; what is right shows in float64, or with the most precise head.
    verdict = reports[0 if path is None else -1][-1]
    if as_json:
        rows = [{"model_dtype": m, "head_dtype": h, **r.as_dict()} for m, h, r in reports]
        print(json.dumps(_finite({"right": verdict.right, "comparisons": rows}), indent=2))
        return verdict.right
    words = {True: "yes", False: "no", None: "–"}
    print_table(
        console := output(),
        SAMPLER,
        [
            [m, h, *(f"{v:.1e}" for v in r.gap.values()), words[r.training_invariant], words[r.sampler_invariant]]
            for m, h, r in reports
        ],
    )
    console.print(f"[{'green' if verdict.right else 'red'}]{escape(str(verdict))}[/]")
    return verdict.right


def _leave_out(why: str, options: Mapping[str, bool], what: str = "") -> None:
    """Raise OptionError for the first option that is set."""
    for name in (name for name, is_set in options.items() if is_set):
        raise OptionError(f"verify: {why}; leave out --{name}{what}")


def _single(run: Callable[[], Report], title: str, as_json: bool, all_rows: bool, start: float) -> bool:
    """Run one comparison and print it with its gradients; return whether it passed."""
    if as_json:
        report = run()
        print(json.dumps(_finite({"setup": title, **report.as_dict()}), indent=2))
    else:
        console = output()
        console.print(f"[bold]{escape(title)}[/bold]")
        with console.status("one process in float64, then the ranks …"):
            report = run()
        _print(console, report, all_rows)
        console.print(f"{time.perf_counter() - start:.0f} s")
    return report.right


def _several(
    results: Iterable[Outcome], count: int, as_json: bool, start: float, columns: Sequence[Column] = MATRIX
) -> bool:
    """Print comparisons as they end, then a table of all and the problems of each; return whether all passed."""
    ended: list[Outcome] = []
    for outcome in results:
        ended.append(outcome)
        print(f"{len(ended)} of {count}: {outcome.training.title}: {outcome.result}", file=sys.stderr, flush=True)
    seconds, wrong = time.perf_counter() - start, [outcome for outcome in ended if not outcome.right]
    # A comparison without a result has NaN.
    largest = max((o.error for o in ended if o.report is not None), default=math.nan)
    if as_json:
        whole = {"right": not wrong, "seconds": seconds, "largest_error": largest}
        print(json.dumps(_finite({**whole, "comparisons": [o.as_dict() for o in ended]}), indent=2))
        return not wrong
    console = output()
    print_table(console, columns, [_row(outcome) for outcome in ended])
    for outcome in wrong:
        console.print(f"[red]{escape(outcome.training.title)}: {escape(str(outcome))}[/red]")
    color = "red" if wrong else "green"
    counts = (
        f"{count - len(wrong)} of {count} comparisons are right, largest relative error {largest:.1e}, {seconds:.0f} s"
    )
    console.print(f"[{color}]{counts}[/{color}]")
    return not wrong


def _row(outcome: Outcome) -> list[str]:
    t = outcome.training
    error = "–" if math.isnan(outcome.error) else f"{outcome.error:.1e}"
    ending = ["yes" if t.liger else "no", error, f"{outcome.seconds:.1f}", outcome.result]
    if isinstance(t, Packing):
        return [t.model, t.form, *ending]
    sizes = [str(size) for size in (t.ranks, t.tp, t.cp, t.dp)]
    return [t.model, *sizes, t.shard, str(t.accumulation), *ending]


def _print(console: Any, report: Report, all_rows: bool) -> None:
    worst = sorted(report.differences, key=lambda d: -d.error)
    chosen = report.differences if all_rows else worst[:SHOWN]
    rows = [[d.name, f"{d.error:.1e}", "–" if math.isnan(d.factor) else f"{d.factor:.4f}"] for d in chosen]
    title = "" if all_rows or len(worst) <= SHOWN else f"the {SHOWN} of {len(worst)} gradients with the largest error"
    print_table(console, COLUMNS, rows, title=title)
    console.print(
        f"loss {report.losses[0]:.6f}, one process {report.loss:.6f}; gradient norm of one process {report.norm:.6f}"
    )
    color = "green" if report.right else "red"
    console.print(f"[{color}]{escape(str(report))}[/{color}]")


def _finite(value: Any) -> Any:
    """Replace infinity and NaN by None, since JSON has neither."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
