# SPDX-License-Identifier: Apache-2.0
"""The report's page on ops as Markdown: one table of all ops, and heads whose vocabulary is sharded."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from liger_bench import markdown
from liger_bench.records import Record, Records, distinct

MIB = 1 << 20
PASSES = ("forward", "backward", "full", "evaluation")
# The key of the picture of all ops.
SHARE = "share"
# Implementation → its name on the page.
NAMES = {
    "triton": "Liger (Triton)",
    "reference": "Liger (reference)",
    "eager": "plain PyTorch",
    "compile": "torch.compile",
}
OURS, COLUMNS = ("triton", "reference"), ("eager", "compile", "liger-kernel")
# Shorter calls take as long as their launches, and their ratios vary from run to run.
SLOWER, SHORTEST_MS = 0.97, 0.025
ABOUT = """
Each op at its largest shape, or at the largest that plain PyTorch can run if it ran in this measurement.

* *full* is forward and backward, *evaluation* a forward pass without gradients. An op with it may compute gradients in
  its forward pass, so its forward and backward passes alone do not compare.
* *Limit* is the least time of the work on this machine ÷ the median time: of the bytes at copy bandwidth, of the
  operations at the rate of a large matmul, or of exactly the matmuls that the op needs. The same run measures these.
* *MiB* is the peak memory beyond inputs and gradients: of Liger, plain PyTorch, torch.compile and liger-kernel.
* *Error* is the largest relative error (Frobenius norm) against float64, of an output or, after a backward pass, of a
  gradient: of the same four.
* The times of the others are multiples of Liger's: above 1, Liger is faster. *Plain PyTorch* is the computation of
  Transformers.

Implementations are interleaved. A `–` was not measured, or has no meaning there.
""".strip()
SLOWER_ABOUT = f"""
Where Liger is slower by more than {100 * (1 - SLOWER):.0f} %, beyond the 20th to 80th percentiles of both times, in
calls of at least {1000 * SHORTEST_MS:.0f} µs:
""".strip()
HEAD = ("op", "pass", "ms", "limit", "MiB", "error", *(NAMES.get(name, name) for name in COLUMNS), "others")


def page(records: Records, pictures: dict[str, Path], command: str) -> list[str]:
    """Return the sections of the page; `pictures` maps `<op> scaling` and "share" to the path in the page's link."""
    parts = [
        markdown.where(records.all)[0] + " [Versions and commits](#how-it-was-measured) are below.",
        ops_section(records.ops, pictures),
        _sharded(records.sharded),
        "\n\n".join(_picture(key, f"{key}: time against each size", pictures) for key in sorted({*pictures} - {SHARE})),
        how_measured(records),
        _repeat(records, command),
    ]
    return [text for text in parts if text]


def ops_section(rows: Sequence[Record], pictures: dict[str, Path]) -> str:
    """Return the table of all ops, why figures are missing from it, and where Liger is slower."""
    table = [[f"{ours['op']}<br>{ours['workload']}", *_line(ours, others)] for ours, others in compared(rows)]
    missing = markdown.reasons(
        (f"{row['op']}, {label(row)} {row['pass']}".strip(), row["reason"])
        for op in distinct(rows, "op")
        for row in largest([row for row in rows if row["op"] == op])
    )
    if not table:
        return f"## Ops\n\n{missing}" if missing else ""
    slow = [f"* {call(ours)}: {speed(ours, other):.2f} × the speed of {label(other)}" for ours, other in slower(rows)]
    parts = ["## Ops", ABOUT, _picture(SHARE, "all ops: fraction of the limit", pictures)]
    parts += [markdown.table(HEAD, markdown.sparse(table), right=range(2, len(HEAD))), missing]
    parts += [SLOWER_ABOUT if slow else f"{SLOWER_ABOUT} nowhere.", "\n".join(slow)]
    return "\n\n".join(text for text in parts if text)


def compared(rows: Sequence[Record]) -> Iterator[tuple[Record, dict[str, Record]]]:
    """Yield Liger's row and the others' by implementation, for each comparable pass of each op at its largest shape."""
    for op in distinct(rows, "op"):
        at_shape = largest([row for row in rows if row["op"] == op])
        for name in comparable({row["pass"] for row in at_shape}):
            timed = {
                row["implementation"]: row for row in at_shape if row["pass"] == name and row["median_ms"] is not None
            }
            ours = next((timed[each] for each in OURS if each in timed), None)
            if ours is not None:
                yield ours, {each: row for each, row in timed.items() if each not in OURS}


def slower(rows: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return Liger's row and the other's where another implementation is faster, beyond the spread of both."""
    pairs = [(ours, other) for ours, others in compared(rows) for other in others.values()]
    return [
        (ours, other)
        for ours, other in sorted(pairs, key=lambda pair: speed(*pair))
        if speed(ours, other) < SLOWER and ours["median_ms"] > SHORTEST_MS and other["high_ms"] < ours["low_ms"]
    ]


def speed(ours: Record, other: Record) -> float:
    """Return the time of another implementation ÷ Liger's."""
    return float(other["median_ms"] / ours["median_ms"])


def call(row: Record) -> str:
    """Return the op, the workload and the pass of a row."""
    return f"{row['op']} {row['workload']}, {row['pass']}"


def label(row: Record) -> str:
    """Return an implementation's name on the page."""
    return str(NAMES.get(row["implementation"], row["implementation"]))


def comparable(measured: Collection[str]) -> list[str]:
    """Return the measured passes that compare implementations. An op with an evaluation pass may compute gradients in
    its forward pass, so its forward and backward passes alone do not.
    """
    apart = ("forward", "backward") if "evaluation" in measured else ()
    return [name for name in PASSES if name in measured and name not in apart]


def largest(rows: Sequence[Record]) -> list[Record]:
    """Return the rows of an op at its largest shape, or at the largest that plain PyTorch ran if it ran any."""
    timed = [row for row in rows if row["limit_ms"] and row["median_ms"]]
    ours = [row for row in timed if row["implementation"] in OURS]
    plain = {row["workload"] for row in timed if row["implementation"] == "eager"}
    shapes = [row for row in ours if row["workload"] in plain] or ours or timed or list(rows)
    chosen = max(shapes, key=lambda row: row["limit_ms"] or 0)["workload"]
    return [row for row in rows if row["workload"] == chosen]


def _line(ours: Record, others: dict[str, Record]) -> list[str]:
    """Return the cells of one pass."""
    error = "error_gradients" if ours["pass"] in ("backward", "full") else "error_outputs"
    more = sorted((row for name, row in others.items() if name not in COLUMNS), key=lambda row: row["median_ms"])
    return [
        ours["pass"], f"**{_ms(ours['median_ms'])}**", _form(ours, "share", ".2f"),
        _all(ours, others, "peak_beyond_gradients_bytes", ",.0f", 1 / MIB), _all(ours, others, error, ".1e"),
        *(f"{speed(ours, others[name]):.2f} ×" if name in others else "–" for name in COLUMNS),
        ", ".join(f"{speed(ours, row):.2f} × ({row['implementation']})" for row in more) or "–",
    ]  # fmt: skip


def _all(ours: Record, others: dict[str, Record], column: str, form: str, factor: float = 1.0) -> str:
    """Return a figure of Liger, and of the implementations that have columns."""
    figures = [_form(others.get(name), column, form, factor) for name in COLUMNS]
    return f"**{_form(ours, column, form, factor)}**, {', '.join(figures)}"


def how_measured(records: Records) -> str:
    """Return the section on the machine, the versions and the peaks."""
    rows = records.all
    lines = [*markdown.where(rows), f"* dtype: {', '.join(distinct(rows, 'dtype'))}"]
    lines += [f"* {versions}" for versions in distinct(rows, "versions")]
    limited = [*records.ops, *records.scaling]
    if limited:
        copy = _range([row["copy_bytes_per_second"] / 1e12 for row in limited], ".3g")
        product = _range([row["product_flops_per_second"] / 1e12 for row in limited], ".3g")
        lines.append(f"* measured peaks: copy {copy} TB/s (read and written), matmul {product} TFLOP/s")
    return f"## How it was measured\n\n{lines[0]}\n\n" + "\n".join(lines[1:])


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}–{high}"


SHARDED_ABOUT = """
The ranks share the classes of the head, one GPU each. Times are forward and backward on the slowest rank. *Efficiency*
is the time of one rank ÷ (ranks × time). *Peak* is the largest memory of a rank beyond hidden states and weight,
including gradients. *Gathered* collects all logits on every rank, as `tp_plan="auto"` does. *Loss-parallel* is
PyTorch's loss parallelism on all logits.
""".strip()


def _sharded(rows: Sequence[Record]) -> str:
    """Return the table of heads whose vocabulary is sharded over ranks."""
    if not rows:
        return ""
    names = {"liger": "**Liger**", "gathered": "gathered", "loss-parallel": "loss-parallel"}
    table = []
    for row in rows:
        shape, done = f"{row['rows']} × {row['width']} × {row['classes']}", row["seconds"] is not None
        figures = (
            [f"{1e3 * row['seconds']:.2f}", f"{row['efficiency']:.3f}", f"{row['peak_bytes'] / MIB:,.0f}"]
            if done
            else [row["reason"], "–", "–"]
        )
        table.append(
            [row["op"], shape, str(row["ranks"]), names.get(row["implementation"], row["implementation"]), *figures]
        )
    head = ("op", "rows × width × classes", "ranks", "implementation", "ms", "efficiency", "peak MiB")
    return "\n\n".join(("## Sharded vocabulary", SHARDED_ABOUT, markdown.table(head, table, right=(2, 4, 5, 6))))


def _repeat(records: Records, command: str) -> str:
    lines = ["liger bench --peers --out RESULTS"] if records.ops else []
    lines += ["liger bench scaling --peers --out RESULTS"] if records.scaling else []
    lines += ["liger bench sharded --out RESULTS"] if records.sharded else []
    lines.append("liger report RESULTS")
    commands = "\n".join(f"    {line}" for line in lines)
    return (
        f"### Repeat it\n\n{commands}\n\nRatios within a run can be compared, times of different runs cannot. This "
        f"page is what `{command}` writes."
    )


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _form(row: Record | None, column: str, form: str, factor: float = 1.0) -> str:
    return "–" if row is None or row[column] is None else format(row[column] * factor, form)


def _picture(key: str, words: str, pictures: dict[str, Path]) -> str:
    return f"![{words}]({pictures[key].as_posix()})" if key in pictures else ""
