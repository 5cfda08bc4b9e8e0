# SPDX-License-Identifier: Apache-2.0
"""The report's page on ops as Markdown: one table of all ops, and heads whose vocabulary is sharded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
ABOUT = """
Each op at its largest shape, or at the largest that plain PyTorch can run if it ran in this measurement.

* *full* is forward and backward, *evaluation* a forward pass without gradients.
* *Limit* is the least time of the work on this machine ÷ the median time: of the bytes at copy bandwidth, of the
  operations at the rate of a large matmul, or of exactly the matmuls that the op needs. The same run measures these.
* The times of the others are multiples of Liger's: above 1, Liger is faster. *Plain PyTorch* is the computation of
  Transformers.
* *MiB* is the peak memory beyond inputs and gradients, Liger's and plain PyTorch's.
* *Error* is the largest relative error (Frobenius norm) against float64, of an output or, after a backward pass, of a
  gradient: Liger's and plain PyTorch's.

Implementations are interleaved. A `–` was not measured, or has no meaning there.
""".strip()
HEAD = (
    "op", "pass", "ms", "limit", *(NAMES.get(name, name) for name in COLUMNS), "fastest other", "MiB", "error",
)  # fmt: skip


def page(records: Records, pictures: dict[str, Path], command: str) -> list[str]:
    """Return the sections of the page; `pictures` maps `<op> scaling` and "share" to the path in the page's link."""
    parts = [
        markdown.where(records.all)[0] + " [Versions and commits](#how-it-was-measured) are below.",
        _ops(records.ops, pictures),
        _sharded(records.sharded),
        "\n\n".join(_picture(key, f"{key}: time against each size", pictures) for key in sorted({*pictures} - {SHARE})),
        _where(records),
        _repeat(records, command),
    ]
    return [text for text in parts if text]


def _ops(rows: Sequence[Record], pictures: dict[str, Path]) -> str:
    """Return the table of all ops, and why figures are missing from it."""
    table, shown = [], []
    for op in distinct(rows, "op"):
        at_shape = largest([row for row in rows if row["op"] == op])
        passes = comparable({row["pass"] for row in at_shape})
        lines = [line for name in passes if (line := _line([row for row in at_shape if row["pass"] == name]))]
        if lines:
            title = f"{op}<br>{at_shape[0]['workload']}"
            table += [[title if line is lines[0] else "", *line] for line in lines]
        shown += [row for row in at_shape if row["reason"]]
    if not table and not shown:
        return ""
    missing = markdown.reasons(
        (f"{row['op']}, {NAMES.get(row['implementation'], row['implementation'])} {row['pass']}".strip(), row["reason"])
        for row in shown
    )
    parts = ("## Ops", ABOUT, _picture(SHARE, "all ops: fraction of the limit", pictures))
    return "\n\n".join(
        text
        for text in (*parts, markdown.table(HEAD, table, right=range(2, len(HEAD))) if table else "", missing)
        if text
    )


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


def _line(rows: Sequence[Record]) -> list[str]:
    """Return the cells of one pass; none without a time of Liger's."""
    timed = {row["implementation"]: row for row in rows if row["median_ms"] is not None}
    ours = next((timed[name] for name in OURS if name in timed), None)
    if ours is None:
        return []

    def against(row: Record | None, name: str = "") -> str:
        return "–" if row is None else f"{row['median_ms'] / ours['median_ms']:.2f} ×{name}"

    others = [row for name, row in timed.items() if row is not ours and name not in (*COLUMNS, *OURS)]
    fastest = min(others, key=lambda row: row["median_ms"], default=None)
    eager = timed.get("eager")
    error = "error_gradients" if ours["pass"] in ("backward", "full") else "error_outputs"
    return [
        ours["pass"], f"**{_ms(ours['median_ms'])}**", _form(ours, "share", ".2f"),
        *(against(timed.get(name)) for name in COLUMNS),
        against(fastest, "" if fastest is None else f" ({fastest['implementation']})"),
        _pair(ours, eager, "peak_beyond_gradients_bytes", ",.0f", 1 / MIB), _pair(ours, eager, error, ".1e"),
    ]  # fmt: skip


def _pair(ours: Record, eager: Record | None, column: str, form: str, factor: float = 1.0) -> str:
    return f"**{_form(ours, column, form, factor)}**, {_form(eager, column, form, factor)}"


def _where(records: Records) -> str:
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
