# SPDX-License-Identifier: Apache-2.0
"""`liger plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from liger_bench.memory import bytes_of
from liger_bench.plan.advice import Alternative, Item, alternatives, checklist, largest_batch
from liger_bench.plan.comparison import ALLOWED, Compared, compared, rows_in
from liger_bench.plan.formulas import Formula, formulas
from liger_bench.plan.step import Prediction, predict
from liger_bench.progress import progress_bar
from liger_bench.train.setup import DEFAULTS, Setup
from liger_bench.train.shapes import SHAPES
from liger_bench.train.techniques import TECHNIQUES, chosen
from liger_core.errors import OptionError

GiB = 1 << 30


def _values(option: str) -> str:
    return ", ".join(TECHNIQUES[option])


def plan(
    model: Annotated[str | None, typer.Option(help=f"{', '.join(SHAPES)}, a folder with a config.json, or a name on the hub.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a rank and micro-batch.")] = 1,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 1024,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs.")] = 1,
    liger: Annotated[str, typer.Option(help=f"{_values('liger')}, several with commas between.")] = "all",
    precision: Annotated[str | None, typer.Option(help=f"{_values('precision')}; as `liger train` by default.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help=f"{_values('checkpoint')} of layers; as `liger train` by default.")] = None,
    optimizer: Annotated[str, typer.Option(help=f"{_values('optimizer')}.")] = "adamw",
    shard: Annotated[str, typer.Option(help=f"{_values('shard')}.")] = "none",
    offload: Annotated[str, typer.Option(help=f"{_values('offload')}.")] = "none",
    adapter: Annotated[str, typer.Option(help=f"{_values('adapter')}.")] = "none",
    device: Annotated[str, typer.Option(help="cuda or cpu; it need not be there.")] = "cuda",
    memory_limit: Annotated[
        str | None, typer.Option(help="The memory to fit in, for instance 24GiB; that of the GPU, if one is here.")
    ] = None,
    techniques: Annotated[bool, typer.Option(help="Also what each technique would save.")] = True,
    compare: Annotated[Path | None, typer.Option(help="Rows of `liger train` (train.json or its folder), to predict each of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json and plan.png, or plan-compared.md with --compare.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Predict the memory of a training before anything of it is allocated: by category, and what would make it fit.

    The model is made of fake tensors and takes a step; options are those of `liger train`. Exit code 1 if it does not fit, or if a comparison
    finds a prediction that is more than 10 % off or wrong about fitting.
    """
    if (model is None) == (compare is None):
        raise OptionError("plan: --model or --compare must be given, one of the two")
    if device not in ("cuda", "cpu"):
        raise OptionError(f"plan: --device must be cuda or cpu, got {device!r}")
    if compare is not None:
        _compare(compare, out, as_json)
        return
    limit = _limit(memory_limit, device)
    setup = Setup(
        model=model or "",
        batch=batch,
        sequence=sequence,
        liger=liger,
        precision=precision or DEFAULTS[device]["precision"],
        checkpoint=checkpoint or DEFAULTS[device]["checkpoint"],
        optimizer=optimizer,
        shard=shard,
        offload=offload,
        adapter=adapter,
        accumulation=accumulation,
        ranks=ranks,
        device=device,
        memory_limit=limit,
    )
    found = _planned(setup, limit, techniques)
    if out is not None:
        _write(found, out)
    print(json.dumps(found.columns())) if as_json else _print(found)
    if limit is not None and not found.prediction.fits(limit):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Plan:
    """Everything that is said about a setup."""

    prediction: Prediction
    formulas: list[Formula]
    alternatives: list[Alternative]
    checklist: list[Item]
    largest_batch: int | None
    limit: int | None

    @property
    def command(self) -> str | None:
        """The command line of the first item of the checklist that fits."""
        taken = [item.prediction for item in self.checklist if item.prediction is not None]
        return taken[-1].setup.command() if taken and self.limit is not None and taken[-1].fits(self.limit) else None

    def columns(self) -> dict[str, Any]:
        return {
            "prediction": _columns(self.prediction),
            "memory_limit": self.limit,
            "fits": None if self.limit is None else self.prediction.fits(self.limit),
            "largest_batch": self.largest_batch,
            "formulas": [asdict(formula) for formula in self.formulas],
            "techniques": [
                {
                    "option": a.technique.option,
                    "value": a.technique.value,
                    "saves_bytes": a.saves(self.prediction) if a.prediction else None,
                    "peak_bytes": a.prediction.peak_bytes if a.prediction else None,
                    "costs": a.technique.costs,
                    "problem": a.problem,
                }
                for a in self.alternatives
            ],
            "checklist": [
                {"title": item.title, "peak_bytes": item.prediction.peak_bytes if item.prediction else None, "problem": item.problem}
                for item in self.checklist
            ],
            "command": self.command,
        }


def _planned(setup: Setup, limit: int | None, techniques: bool) -> Plan:
    chosen(setup)
    with progress_bar() as bar:
        task = bar.add_task("", total=None)

        def foresee(other: Setup) -> Prediction:
            changed = [f"{n} {v}" for n, v in asdict(other).items() if v != getattr(setup, n)]
            bar.update(task, description=f"predicting {', '.join(changed) or setup.model}")
            return predict(other)

        prediction = foresee(setup)
        rest = list(alternatives(setup, foresee)) if techniques else []
        items = list(checklist(setup, limit, foresee)) if limit is not None else []
        largest = largest_batch(setup, limit, foresee) if limit is not None else None
    return Plan(prediction, formulas(setup, prediction.parameters), rest, items, largest, limit)


def _limit(given: str | None, device: str) -> int | None:
    if given is not None:
        return bytes_of("plan: --memory-limit", given)
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return None


def _columns(prediction: Prediction) -> dict[str, Any]:
    return asdict(replace(prediction, setup=replace(prediction.setup))) | {"command": prediction.setup.command()}


def _bars(found: Plan) -> list[tuple[str, Prediction]]:
    return [("this setup", found.prediction), *((item.title, item.prediction) for item in found.checklist if item.prediction is not None)]


def _write(found: Plan, out: Path) -> None:
    from liger_bench.plan.chart import picture

    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(found.columns(), indent=1) + "\n")
    setup = found.prediction.setup
    picture(_bars(found), found.limit, out / "plan.png", f"{setup.model}, {setup.batch} × {setup.sequence} tokens")


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A file has no width of its own, and 80 columns would break every cell.
        console.width = 150
    return console


def _print(found: Plan) -> None:
    from liger_bench.plan.chart import print_bars

    console, prediction = _console(), found.prediction
    setup = prediction.setup
    console.print(f"{setup.model}: {prediction.parameters:,} parameters, {prediction.trainable_parameters:,} of them trained")
    print_bars(console, _bars(found), found.limit)
    console.print(f"The peak is in the {prediction.doing}; {prediction.static_bytes / GiB:.2f} GiB are held between two steps.\n")
    _print_held(console, found)
    if found.alternatives:
        _print_alternatives(console, found)
    for item in found.checklist:
        if item.problem:
            console.print(f"{item.title}: passed over, {item.problem}", markup=False)
    for note in prediction.notes:
        console.print(note, markup=False)
    if found.limit is None:
        console.print("Whether it fits is told with --memory-limit, for instance --memory-limit 24GiB.")
        return
    size = f"{found.limit / GiB:g} GiB"
    most = (
        f"{found.largest_batch} × {setup.sequence} tokens is the largest batch of this setup"
        if found.largest_batch
        else "no batch of this setup"
    )
    console.print(f"{most} that fits in {size}.")
    if found.command:
        console.print(f"The shortest way down the checklist that fits {setup.batch} × {setup.sequence}:\n  {found.command}", soft_wrap=True)
    else:
        console.print(f"Nothing on the checklist makes {setup.batch} × {setup.sequence} fit in {size}; make the batch smaller.")


def _print_held(console: Console, found: Plan) -> None:
    table = Table("category", "GiB", "", "the report's formula", "", "GiB")
    table.columns[1].justify = table.columns[5].justify = "right"
    held = [(name, size) for name, size in found.prediction.held.items() if size]
    for index in range(max(len(held), len(found.formulas))):
        left = (held[index][0], f"{held[index][1] / GiB:.2f}") if index < len(held) else ("", "")
        formula = found.formulas[index] if index < len(found.formulas) else None
        right = (formula.name, f"{formula.words} = {formula.numbers}", f"{formula.size / GiB:.2f}") if formula else ("", "", "")
        table.add_row(*left, "", right[0], right[1], right[2])
    console.print(table)


def _print_alternatives(console: Console, found: Plan) -> None:
    table = Table("instead", "peak GiB", "saves GiB", "costs")
    table.columns[1].justify = table.columns[2].justify = "right"
    for other in sorted(found.alternatives, key=lambda other: -other.saves(found.prediction)):
        name = f"--{other.technique.option} {other.technique.value}"
        if other.prediction is not None:
            table.add_row(
                name, f"{other.prediction.peak_bytes / GiB:.2f}", f"{other.saves(found.prediction) / GiB:+.2f}", other.technique.costs
            )
    console.print(table)


def _compare(results: Path, out: Path | None, as_json: bool) -> None:
    rows = rows_in(results)
    with progress_bar() as bar:
        task = bar.add_task("predicting", total=len(rows))
        found: list[Compared] = []
        for one in compared(rows):
            found.append(one)
            bar.advance(task)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan-compared.md").write_text(compared_page(found))
    if as_json:
        print(json.dumps({"rows": [one.columns() for one in found], "worst": _worst(found), "right": sum(one.right for one in found)}))
    else:
        _print_compared(found)
    if not all(one.good for one in found):
        raise typer.Exit(1)


HEAD = ("setup", "predicted GiB", "measured GiB", "error", "reserved GiB", "fits: predicted", "measured", "")


def compared_page(found: list[Compared]) -> str:
    """The table in Markdown, and a sentence on the worst of it."""
    lines = [" | ".join(HEAD), " | ".join(["---"] * len(HEAD)), *(" | ".join(_cells(one)) for one in found)]
    return "\n".join(f"| {line} |" for line in lines) + f"\n\n{_summary(found)}\n"


def _print_compared(found: list[Compared]) -> None:
    table = Table(*HEAD)
    for one in found:
        table.add_row(*_cells(one))
    console = _console()
    console.print(table)
    console.print(_summary(found))


def _cells(one: Compared) -> list[str]:
    words = {True: "yes", False: "no", None: "–"}
    return [
        one.setup.command().removeprefix("liger train "),
        f"{one.predicted_bytes / GiB:.2f}",
        "out of memory" if one.measured_bytes is None else f"{one.measured_bytes / GiB:.2f}",
        "–" if one.error is None else f"{one.error:+.1%}",
        "–" if not one.reserved_bytes else f"{one.reserved_bytes / GiB:.2f}",
        words[one.predicted_to_fit],
        words[one.fitted],
        "" if one.good else "wrong",
    ]


def _worst(found: list[Compared]) -> float:
    return max((abs(one.error) for one in found if one.error is not None), default=0.0)


def _summary(found: list[Compared]) -> str:
    measured = sum(one.error is not None for one in found)
    right = sum(one.right for one in found)
    return (
        f"{measured} peaks: off by {_worst(found):.1%} at most ({ALLOWED:.0%} is allowed). "
        f"Whether it fits: right on {right} of {len(found)} setups."
    )
