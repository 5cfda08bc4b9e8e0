# SPDX-License-Identifier: Apache-2.0
"""Plans and comparisons as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from liger_bench.plan.chart import GiB, print_bars
from liger_bench.plan.comparison import ALLOWED, Compared
from liger_bench.plan.planning import Plan
from liger_bench.printing import wide_console
from liger_bench.report import markdown


def print_plan(found: Plan) -> None:
    console, prediction = wide_console(), found.prediction
    setup = prediction.setup
    console.print(f"{setup.model}: {prediction.parameters:,} parameters, {prediction.trainable_parameters:,} of them trained")
    print_bars(console, found.bars, found.limit)
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


HEAD = ("setup", "predicted GiB", "measured GiB", "error", "reserved GiB", "fits: predicted", "measured", "")


def compared_page(found: Sequence[Compared], command: str) -> str:
    """The table in Markdown, and a sentence on the worst of it."""
    parts = ["# Planned and measured", markdown.generated(command), _summary(found), markdown.table(HEAD, [cells_of(one) for one in found])]
    return "\n\n".join(parts) + "\n"


def print_compared(found: Sequence[Compared]) -> None:
    table = Table(*HEAD)
    for one in found:
        table.add_row(*cells_of(one))
    console = wide_console()
    console.print(table)
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
    fits = f" Whether it fits: right on {sum(one.right for one in limited)} of {len(limited)} setups." if limited else ""
    return f"{measured} peaks: off by {worst(found):.1%} at most ({ALLOWED:.0%} is allowed).{fits}"
