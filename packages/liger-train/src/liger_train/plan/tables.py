# SPDX-License-Identifier: Apache-2.0
"""Plans and comparisons as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from liger_bench import markdown
from liger_bench.printing import amount, size, unit_of
from liger_core.tables import Column, output, print_table
from liger_train.plan.chart import print_bars
from liger_train.plan.comparison import ALLOWED, Compared
from liger_train.plan.planning import Plan
from liger_train.plan.step import Prediction


def print_plan(found: Plan) -> None:
    console, prediction = output(), found.prediction
    setup = prediction.setup
    trained = (
        f", {amount(prediction.trainable_parameters)} of them trained"
        if prediction.trainable_parameters < prediction.parameters
        else ""
    )
    console.print(f"{setup.model}: {amount(prediction.parameters)} parameters{trained}", markup=False)
    print_bars(console, found.bars, found.limit)
    console.print(
        f"The peak is in the {prediction.doing}; {size(prediction.static_bytes)} stay allocated between steps.\n"
    )
    _print_held(console, found)
    if found.alternatives:
        _print_alternatives(console, found)
    for item in found.checklist:
        if item.problem:
            console.print(f"{item.title}: skipped because {item.problem}", markup=False)
    for note in prediction.notes:
        console.print(note, markup=False)
    if found.limit is None:
        console.print("To see whether it fits, give a limit, for instance --memory-limit 24GiB.")
        return
    limit, batch = size(found.limit), f"{setup.batch} × {setup.sequence} tokens"
    if found.largest_batch:
        console.print(
            f"{found.largest_batch} × {setup.sequence} tokens is the largest batch of this setup that fits in {limit}."
        )
    else:
        console.print(f"No batch of this setup fits in {limit}.")
    if prediction.fits(found.limit):
        console.print(f"{batch} fit:\n  {found.command}", soft_wrap=True, markup=False)
    elif found.command:
        console.print(
            f"{batch} do not fit. The first setup that does, adding one technique at a time:\n  {found.command}",
            soft_wrap=True,
            markup=False,
        )
    else:
        console.print(f"{batch} do not fit with any of these techniques; use a smaller batch.")


def print_sweep(predictions: Sequence[Prediction], varied: Sequence[str], fits: Sequence[bool | None]) -> None:
    scale, unit = unit_of(max(each.peak_bytes for each in predictions))
    words = {True: "yes", False: "no", None: "–"}
    names = (*varied, "liger")
    lines = [
        [*(str(getattr(each.setup, name)) for name in names), f"{each.peak_bytes / scale:.2f}", each.doing, words[fit]]
        for each, fit in zip(predictions, fits, strict=True)
    ]
    columns = [*map(Column, names), Column(f"peak {unit}", number=True), Column("in the"), Column("fits")]
    print_table(output(), columns, lines)


def _print_held(console: Console, found: Plan) -> None:
    held = {name: count for name, count in found.prediction.held.items() if count}
    scale, unit = unit_of(max(held.values()))
    print_table(
        console,
        [Column("category"), Column(unit, number=True)],
        [[name, f"{count / scale:.2f}"] for name, count in held.items()],
    )


def _print_alternatives(console: Console, found: Plan) -> None:
    shown = sorted(
        (other for other in found.alternatives if other.prediction), key=lambda other: -other.saves(found.prediction)
    )
    scale, unit = unit_of(found.prediction.peak_bytes)
    lines = [
        [
            f"--{other.technique.option} {other.technique.value}",
            f"{other.prediction.peak_bytes / scale:.2f}" if other.prediction else "",
            f"{other.saves(found.prediction) / scale:+.2f}",
            other.technique.costs,
        ]
        for other in shown
    ]
    columns = [
        Column("instead"),
        Column(f"peak {unit}", number=True),
        Column(f"saves {unit}", number=True),
        Column("costs", prose=True),
    ]
    print_table(console, columns, lines)


GiB = 1 << 30
HEAD = ("setup", "predicted GiB", "measured GiB", "error", "reserved GiB", "fits: predicted", "measured", "")


def compared_page(found: Sequence[Compared], command: str) -> str:
    """The comparison in Markdown: a summary and a table."""
    parts = [
        "# Predicted and measured peak memory",
        markdown.generated(command),
        _summary(found),
        markdown.table(HEAD, [cells_of(one) for one in found]),
    ]
    return "\n\n".join(parts) + "\n"


def print_compared(found: Sequence[Compared]) -> None:
    console = output()
    columns = [
        Column("setup", prose=True),
        *(Column(name, number=True) for name in ("predicted GiB", "measured GiB", "error")),
        Column(""),
    ]
    lines = [[cells[0], *cells[1:4], cells[-1]] for cells in map(cells_of, found)]
    print_table(console, columns, lines)
    console.print(_summary(found))


def cells_of(one: Compared) -> list[str]:
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


def worst(found: Sequence[Compared]) -> float:
    return max((abs(one.error) for one in found if one.error is not None), default=0.0)


def _summary(found: Sequence[Compared]) -> str:
    measured = sum(one.error is not None for one in found)
    limited = [one for one in found if one.predicted_to_fit is not None]
    fits = (
        f" Whether it fits: correct for {sum(one.right for one in limited)} of {len(limited)} setups."
        if limited
        else ""
    )
    return (
        f"{measured} peak{'' if measured == 1 else 's'}, with a largest error of {worst(found):.1%} ({ALLOWED:.0%} is "
        f"allowed).{fits}"
    )
