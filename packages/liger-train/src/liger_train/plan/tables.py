# SPDX-License-Identifier: Apache-2.0
"""Plans and comparisons as tables and sentences."""

from collections.abc import Sequence

from rich.console import Console

from liger_bench import markdown
from liger_bench.printing import amount, size, unit_of
from liger_core.tables import Column, output, print_table
from liger_train.plan.chart import print_bars
from liger_train.plan.comparison import ALLOWED, Compared
from liger_train.plan.planning import Plan, Traffic
from liger_train.plan.search import Answer
from liger_train.plan.step import Prediction
from liger_train.setup import Setup


def print_plan(plan: Plan) -> None:
    console, prediction = output(), plan.prediction
    setup = prediction.setup
    count = prediction.trainable_parameters
    trained = f", {amount(count)} of them trained" if count < prediction.parameters else ""
    console.print(f"{setup.model}: {amount(prediction.parameters)} parameters{trained}", markup=False)
    print_bars(console, plan.bars, plan.limit)
    console.print(
        f"The peak is in the {prediction.doing}; {size(prediction.static_bytes)} stay allocated between steps.\n"
    )
    _print_held(console, plan)
    if plan.traffic is not None:
        _print_traffic(console, plan.traffic)
    if plan.alternatives:
        _print_alternatives(console, plan)
    _print_costs(console, plan)
    for item in plan.checklist:
        if item.problem:
            console.print(f"{item.title}: skipped because {item.problem}", markup=False)
    for note in prediction.notes:
        console.print(note, markup=False)
    if plan.limit is None:
        console.print("To see whether it fits, give a limit, for instance --memory-limit 24GiB.")
        return
    limit, batch = size(plan.limit), f"{setup.batch} × {setup.sequence} tokens"
    if plan.what_fits:
        _print_what_fits(console, plan.what_fits)
    for answer in plan.answers:
        console.print(_sentence(answer, setup, limit))
    if prediction.fits(plan.limit):
        console.print(f"{batch} fit:\n  {plan.command}", soft_wrap=True, markup=False)
    elif plan.command:
        console.print(
            f"{batch} do not fit. The first setup that does, adding one technique at a time:\n  {plan.command}",
            soft_wrap=True,
            markup=False,
        )
    else:
        console.print(f"{batch} do not fit with any of these techniques; use a smaller batch.")


def _sentence(answer: Answer, setup: Setup, limit: str) -> str:
    """Return what fits, or what the value that needs the least memory needs."""
    if answer.smallest is None:
        supported = "that the model supports, and fits" if answer.capped else "that fits"
        batch = f"{answer.value} × {setup.sequence} tokens is the largest batch of this setup that fits in {limit}."
        return {
            "batch": batch,
            "sequence": f"{answer.value:,} tokens is the longest sequence of this setup {supported} in {limit}.",
            "ranks": f"{answer.value} is the smallest number of GPUs on which this setup fits in {limit}.",
        }[answer.field]
    smallest = answer.smallest.setup
    needs = f"{smallest.batch} × {smallest.sequence} tokens need {size(answer.smallest.peak_bytes)}"
    if answer.field != "ranks":
        return f"No {answer.field} of this setup fits in {limit}. {needs}."
    more = "; --shard fsdp2 would split the weights" if setup.shard == "none" else ""
    return f"No number of GPUs is enough for {limit} each. {needs} on each of {smallest.ranks:,}{more}."


def _print_what_fits(console: Console, rows: Sequence[dict[str, int]]) -> None:
    """Print the last value of each row, by the value before it and by the number of ranks."""
    _, other, field = rows[0]
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    cells: dict[int, list[str]] = {}
    for row in rows:
        cells.setdefault(row[other], []).append(f"{row[field]:,}" if row[field] else "–")
    what = {"batch": "largest batch", "sequence": "longest sequence"}[field]
    console.print(f"The {what} that fits, by {other} and number of GPUs:")
    columns = [other, *(f"{count} GPU{'s' if count > 1 else ''}" for count in ranks)]
    lines = [[f"{value:,}", *line] for value, line in cells.items()]
    print_table(console, [Column(name, number=True) for name in columns], lines)


FITS = {True: "yes", False: "no", None: "–"}


def print_sweep(predictions: Sequence[Prediction], varied: Sequence[str], fits: Sequence[bool | None]) -> None:
    scale, unit = unit_of(max(each.peak_bytes for each in predictions))
    names = (*varied, "liger")
    lines = [
        [*(str(getattr(each.setup, name)) for name in names), f"{each.peak_bytes / scale:.2f}", each.doing, FITS[fit]]
        for each, fit in zip(predictions, fits, strict=True)
    ]
    columns = [*map(Column, names), Column(f"peak {unit}", number=True), Column("in the"), Column("fits")]
    print_table(output(), columns, lines)


def _print_held(console: Console, plan: Plan) -> None:
    held = {name: count for name, count in plan.prediction.held.items() if count}
    scale, unit = unit_of(max(held.values()))
    lines = [[name, f"{count / scale:.2f}"] for name, count in held.items()]
    print_table(console, [Column("category"), Column(unit, number=True)], lines)


def _print_traffic(console: Console, traffic: Traffic) -> None:
    rates, estimate = traffic.rates, traffic.estimate
    lines = [
        [
            f"{each['kind']} of {each['what']}, {each['ranks']} ranks",
            *(f"{each[name] / 1e9:.2f}" for name in ("machine_bytes", "network_bytes")),
            f"{each['seconds']:.3f}",
        ]
        for each in traffic.exchanges
    ]
    copy = traffic.checkpoint_bytes
    written = f", and up to {size(copy)} for a checkpoint of --output while it is written" if copy else ""
    head = ("received by a rank per step, by a formula", "within a machine, GB", "over the network, GB", "seconds")
    print_table(console, [Column(head[0]), *(Column(name, number=True) for name in head[1:])], lines)
    console.print(
        f"By a formula, without waiting: operations take {estimate.operations:.3f} s per step on an H200, exchanges of "
        f"activations {estimate.tensor:.3f} s, and those of weights and gradients {estimate.sharding:.3f} s, which "
        f"overlap with the others ({rates.per_host} GPUs per machine, {rates.links / 1e9:.0f} GB/s within it, "
        f"{rates.hosts / 1e9:.0f} GB/s between machines). Host memory per machine: {size(traffic.host_bytes)} for "
        f"offloaded state{written}, besides Python and the text.",
        markup=False,
    )


def _print_alternatives(console: Console, plan: Plan) -> None:
    shown = sorted(
        (other for other in plan.alternatives if other.prediction), key=lambda other: -other.saves(plan.start)
    )
    scale, unit = unit_of(plan.prediction.peak_bytes)
    lines = [
        [
            f"--{other.technique.option} {other.technique.value}",
            f"{other.prediction.peak_bytes / scale:.2f}" if other.prediction else "",
            f"{other.saves(plan.start) / scale:+.2f}",
            other.technique.costs,
        ]
        for other in shown
    ]
    numbers = (Column(f"{name} {unit}", number=True) for name in ("peak", "saves"))
    print_table(console, [Column("instead"), *numbers, Column("costs", prose=True)], lines)


def _print_costs(console: Console, plan: Plan) -> None:
    lines = [[item.title, item.speed or "–", item.costs] for item in plan.checklist[1:] if item.prediction]
    columns = [Column("adding"), Column("speed, measured on H200s", prose=True), Column("costs", prose=True)]
    if lines:
        print_table(console, columns, lines)


GiB = 1 << 30
HEAD = ("setup", "predicted GiB", "measured GiB", "error", "reserved GiB", "fits: predicted", "measured", "")


def compared_page(comparisons: Sequence[Compared], command: str) -> str:
    """The comparison in Markdown: a summary and a table."""
    parts = [
        "# Predicted and measured peak memory",
        markdown.generated(command),
        _summary(comparisons),
        markdown.table(HEAD, [cells_of(comparison) for comparison in comparisons]),
    ]
    return "\n\n".join(parts) + "\n"


def print_compared(comparisons: Sequence[Compared]) -> None:
    console = output()
    columns = [Column("setup", prose=True), *(Column(name, number=True) for name in HEAD[1:4]), Column("")]
    print_table(console, columns, [[*cells[:4], cells[-1]] for cells in map(cells_of, comparisons)])
    console.print(_summary(comparisons))


def cells_of(comparison: Compared) -> list[str]:
    return [
        comparison.setup.command().removeprefix("liger train "),
        f"{comparison.predicted_bytes / GiB:.2f}",
        "out of memory" if comparison.measured_bytes is None else f"{comparison.measured_bytes / GiB:.2f}",
        "–" if comparison.error is None else f"{comparison.error:+.1%}",
        "–" if not comparison.reserved_bytes else f"{comparison.reserved_bytes / GiB:.2f}",
        FITS[comparison.predicted_to_fit],
        FITS[comparison.fitted],
        "" if comparison.good else "wrong",
    ]


def worst(comparisons: Sequence[Compared]) -> float:
    return max((abs(comparison.error) for comparison in comparisons if comparison.error is not None), default=0.0)


def _summary(comparisons: Sequence[Compared]) -> str:
    measured = sum(comparison.error is not None for comparison in comparisons)
    limited = [comparison for comparison in comparisons if comparison.predicted_to_fit is not None]
    right = sum(comparison.right for comparison in limited)
    fits = f" Whether it fits: correct for {right} of {len(limited)} setups." if limited else ""
    return (
        f"{measured} peak{'' if measured == 1 else 's'}, with a largest error of {worst(comparisons):.1%} "
        f"({ALLOWED:.0%} is allowed).{fits}"
    )
