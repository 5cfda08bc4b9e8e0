# SPDX-License-Identifier: Apache-2.0
"""The page of a report: where it was measured, which targets are met, and every figure, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from liger_bench import markdown
from liger_bench.model.table import HEAD, cells, title
from liger_bench.records import Record, Records, distinct, find
from liger_bench.targets import Verdict

MIB = 1 << 20
PASSES = {"forward": "forward", "full": "full", "evaluation": "evaluation"}
OURS = ("triton", "liger", "liger-compiled")
ABOUT = """
`share` is the least time that the work can take on this machine over the median time. The limits, copy bandwidth and the rate of matrix products, are
measured in the same run; for ops that cannot avoid matrix products, the least time is that of exactly these products. `full` is forward and backward,
`forward` a forward pass whose inputs require gradients, `evaluation` one without gradients. A plain copy that moves as many bytes as the op must stands first: a short
one does not reach the bandwidth of a long one, and the kernels that move as little do not, either. Times are medians with the L2 cache flushed, the 0.2 and
0.8 quantiles in brackets; implementations take turns. `graph` is the share when the same call is replayed as a CUDA graph, `enqueue` what the
host takes to enqueue it, `extra` the most memory held beyond the inputs, `beyond gradients` that without the gradients which the call returns.
`error` is the largest relative error (Frobenius norm) against the same computation in float64, of outputs and of gradients; `÷ eager` the largest
ratio of a gradient's error to that of plain eager PyTorch in the same dtype. A `–` was not measured, or has no meaning there.
""".strip()


def page(records: Records, verdicts: Sequence[Verdict], pictures: dict[str, Path], command: str) -> str:
    """`pictures`: key → path as the page links to it; keys are ops, `<op> scaling` and `models`."""
    parts = [
        "# Benchmarks",
        markdown.generated(command),
        _where(records),
        _targets(verdicts),
        _models(records.models, pictures),
        "## Ops\n\n" + ABOUT if records.ops or records.scaling else "",
        *(_op(name, records, pictures) for name in distinct([*records.ops, *records.scaling], "op")),
        _repeat(records, command),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _where(records: Records) -> str:
    rows = records.all
    lines = [*markdown.where(rows), f"* dtype: {', '.join(distinct(rows, 'dtype'))}"]
    lines += [f"* {versions}" for versions in distinct(rows, "versions")]
    limited = [*records.ops, *records.scaling]
    if limited:
        copy = _range([row["copy_bytes_per_second"] / 1e12 for row in limited], ".3g")
        product = _range([row["product_flops_per_second"] / 1e12 for row in limited], ".3g")
        lines.append(f"* limits of the runs: copy {copy} TB/s (read and written), matrix product {product} TFLOP/s")
    return lines[0] + "\n\n" + "\n".join(lines[1:])


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}–{high}"


def _targets(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    counts = {word: sum(v.word == word for v in verdicts) for word in ("met", "missed", "not measured")}
    summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    rows = [
        (v.target.id, v.target.bound.replace("<=", "≤").replace(">=", "≥"), "–" if v.value is None else v.target.shown(v.value), _word(v))
        for v in verdicts
    ]
    parts = [
        f"## Targets\n\nOf {len(verdicts)} targets: {summary}.",
        markdown.table(("target", "bound", "reached", ""), rows, right=(1, 2)),
    ]
    reasons = [
        f"* **{v.target.id}** ({v.target.shown(v.value)}): {v.reason}" for v in verdicts if v.value is not None and v.reason and _missed(v)
    ]
    if reasons:
        parts.append("Why a target is missed:\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)


def _missed(verdict: Verdict) -> bool:
    return verdict.word == "missed"


def _word(verdict: Verdict) -> str:
    return f"**{verdict.word}**" if _missed(verdict) else verdict.word


def _models(rows: Sequence[Record], pictures: dict[str, Path]) -> str:
    if not rows:
        return ""
    about = (
        "## Whole models\n\nLlama shapes with random weights, gradient checkpointing, sdpa attention, forward and backward without an optimizer. Each "
        "implementation runs in a process of its own. Peak memory is that of the allocator; loss and gradient norm are those of the first step, from "
        "the same weights and tokens; `compile` is what the first step took beyond a median one."
    )
    table = [(title(row), _ours(row["implementation"]), *cells(row, rows)) for row in rows]
    parts = [about, _picture("models", "Speed and memory of whole models", pictures)]
    parts.append(
        markdown.table(("model, batch × sequence", "implementation", *HEAD), markdown.sparse(table), right=range(2, 2 + len(HEAD)))
    )
    parts.append(markdown.reasons((f"{title(row)} {row['implementation']}", row["reason"]) for row in rows))
    return "\n\n".join(part for part in parts if part)


def _op(name: str, records: Records, pictures: dict[str, Path]) -> str:
    rows = [row for row in records.ops if row["op"] == name]
    parts = [f"### {name}", _picture(name, f"{name}: share of the limit", pictures)]
    own = [row for row in rows if row["pass"] != "dispatch"]
    if own:
        parts += [
            _speeds(own),
            _costs(own),
            markdown.reasons((f"{r['workload']}, {r['implementation']} {r['pass']}".strip(), r["reason"]) for r in own),
        ]
    dispatch = find(rows, {"pass": "dispatch"})
    if dispatch is not None and dispatch["enqueue_ms"] is not None:
        parts.append(f"Choosing the implementation costs a call {dispatch['enqueue_ms'] * 1e3:.2f} µs.")
    parts.append(_picture(f"{name} scaling", f"{name}: time against each size", pictures))
    return "\n\n".join(part for part in parts if part)


def _speeds(rows: Sequence[Record]) -> str:
    """Speed, with accuracy beside it."""
    passes = [name for name in PASSES if any(row["pass"] == name and row["median_ms"] is not None for row in rows)]
    if not passes:
        return ""
    head = ["shape", "implementation"]
    for name in passes:
        head += [f"{name} ms", "share", *(["graph"] if name != "evaluation" else [])]
    head += ["error of outputs", "of gradients", "÷ eager"]
    table = []
    copied = None
    for workload, implementation in _pairs(rows):
        if workload != copied:
            copied = workload
            table += _copies([row for row in rows if row["workload"] == workload], passes, len(head))
        line = [workload, _ours(implementation)]
        found = {name: find(rows, {"workload": workload, "implementation": implementation, "pass": name}) for name in passes}
        if all(row is None or row["median_ms"] is None for row in found.values()):
            continue
        for name, row in found.items():
            line += [_time(row), _form(row, "share", ".2f"), *([_graph(row)] if name != "evaluation" else [])]
        any_row = next(row for row in found.values() if row is not None)
        line += [
            _form(any_row, "error_outputs", ".1e"),
            _form(any_row, "error_gradients", ".1e"),
            _form(any_row, "error_eager_ratio", ".2f"),
        ]
        table.append(line)
    return markdown.table(head, markdown.sparse(table), right=range(2, len(head)))


def _copies(rows: Sequence[Record], passes: Sequence[str], width: int) -> list[list[str]]:
    """A line, if it was measured, for the plain copy of as many bytes as the rows of a workload must move."""
    line = [rows[0]["workload"], "*copy of as many bytes*"]
    for name in passes:
        row = find([r for r in rows if r.get("copy_ms")], {"pass": name})
        share = ["–", "–"] if row is None else [f"{row['copy_ms']:.3f}", f"{row['limit_ms'] / row['copy_ms']:.2f}"]
        line += [*share, *(["–"] if name != "evaluation" else [])]
    return [] if set(line[2:]) == {"–"} else [line + ["–"] * (width - len(line))]


def _costs(rows: Sequence[Record]) -> str:
    """Memory of forward and backward, and what the host takes."""
    full = [row for row in rows if row["pass"] == "full" and row["peak_extra_bytes"] is not None]
    if not full:
        return ""
    head = ("shape", "implementation", "extra MiB", "beyond gradients MiB", "enqueue forward µs", "enqueue full µs")
    table = []
    for row in full:
        forward = find(rows, {"workload": row["workload"], "implementation": row["implementation"], "pass": "forward"})
        line = [row["workload"], _ours(row["implementation"]), _form(row, "peak_extra_bytes", ",.1f", 1 / MIB)]
        line += [_form(row, "peak_beyond_gradients_bytes", ",.1f", 1 / MIB), _form(forward, "enqueue_ms", ",.0f", 1e3)]
        table.append([*line, _form(row, "enqueue_ms", ",.0f", 1e3)])
    return "Memory and host time of forward and backward:\n\n" + markdown.table(head, markdown.sparse(table), right=range(2, len(head)))


def _repeat(records: Records, command: str) -> str:
    lines = ["liger bench --peers --out RESULTS"] if records.ops else []
    lines += ["liger bench scaling --peers --out RESULTS"] if records.scaling else []
    if records.models:
        lines.append("liger bench model --out RESULTS")
        limits = sorted({row["memory_limit_bytes"] for row in records.models if row["memory_limit_bytes"]})
        lines += [f"liger bench model --model llama-3.2-1b --memory-limit {limit / 2**30:g}GiB --out RESULTS" for limit in limits]
    lines.append("liger bench report RESULTS")
    commands = "\n".join(f"    {line}" for line in lines)
    return f"## Repeat\n\n{commands}\n\nRatios within a run can be compared, times of different runs cannot. This page is what `{command}` writes."


def _pairs(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """(workload, implementation) with all implementations of a workload together."""
    order = distinct(rows, "workload")
    return sorted(dict.fromkeys((row["workload"], row["implementation"]) for row in rows), key=lambda pair: order.index(pair[0]))


def _time(row: Record | None) -> str:
    if row is None or row["median_ms"] is None:
        return "–"
    return f"{_ms(row['median_ms'])} ({_ms(row['low_ms'])}–{_ms(row['high_ms'])})"


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _graph(row: Record | None) -> str:
    if row is None or not row["graph_ms"] or not row["limit_ms"]:
        return "–"
    return f"{row['limit_ms'] / row['graph_ms']:.2f}"


def _form(row: Record | None, column: str, form: str, factor: float = 1.0) -> str:
    return "–" if row is None or row[column] is None else format(row[column] * factor, form)


def _ours(implementation: str) -> str:
    return f"**{implementation}**" if implementation in OURS else implementation


def _picture(key: str, words: str, pictures: dict[str, Path]) -> str:
    return f"![{words}]({pictures[key].as_posix()})" if key in pictures else ""
