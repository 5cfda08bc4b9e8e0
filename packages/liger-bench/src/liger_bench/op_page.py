# SPDX-License-Identifier: Apache-2.0
"""The report's page on ops as Markdown: a comparison first, then every figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from liger_bench import markdown
from liger_bench.records import Record, Records, distinct, find, sizes_of

MIB = 1 << 20
PASSES = ("forward", "full", "evaluation")
OURS = ("triton",)
ABOUT = """
| column | meaning |
| --- | --- |
| `triton`, `eager` | Liger's backend; plain PyTorch as in Transformers |
| `full` | forward and backward |
| `forward`, `evaluation` | a forward pass with inputs that require gradients; one without gradients |
| `ms` | the median with the L2 cache flushed, and the 20th and 80th percentiles in brackets |
| `roofline` | the least time of the work on this machine ÷ the median time |
| `graph` | the fraction of the roofline when a CUDA graph replays the call |
| `enqueue` | the host's time to enqueue the call |
| `extra`, `beyond gradients` | the peak memory beyond the inputs; the same without the returned gradients |
| `error` | the largest relative error (Frobenius norm) of outputs and of gradients against float64 |
| `÷ eager` | the largest ratio of a gradient's error to that of eager PyTorch in the same dtype |

The same run measures the roofline: copy bandwidth and the rate of a large matmul. If an op needs matmuls, the roofline
is the time of exactly these matmuls. The first line of a shape is a plain copy of as many bytes as the op must move. A
short copy does not reach the bandwidth of a long one, and neither can a kernel that moves as few bytes. Implementations
are interleaved. A `–` was not measured, or has no meaning there.
""".strip()
# Implementation → its name in pictures.
NAMES = {"triton": "Liger (Triton)", "reference": "Liger (reference)"}


def page(records: Records, pictures: dict[str, Path], command: str) -> list[str]:
    """Return the sections of the page; `pictures` maps an op, or `<op> scaling`, to the path in the page's link."""
    parts = [
        markdown.where(records.all)[0] + " [Versions and commits](#how-it-was-measured) are below.",
        _ops_compared(records.ops),
        _sharded(records.sharded),
        "## Ops in detail\n\n" + ABOUT if records.ops or records.scaling else "",
        *(_op(name, records, pictures) for name in distinct([*records.ops, *records.scaling], "op")),
        _where(records),
        _repeat(records, command),
    ]
    return [text for text in parts if text]


def _ops_compared(rows: Sequence[Record]) -> str:
    """Return a table of each op at its largest shape: eager PyTorch, the fastest other library, and Liger."""
    table = []
    for op in distinct(rows, "op"):
        full = [
            row for row in rows if row["op"] == op and row["pass"] == "full" and row["median_ms"] and row["limit_ms"]
        ]
        timed = [row for row in full if sizes_of(row["workload"]) == row["workload"]]
        eager_rows = {row["workload"]: row for row in timed if row["implementation"] == "eager"}
        shared = [row for row in timed if row["implementation"] in OURS and row["workload"] in eager_rows]
        if not shared:
            continue
        ours = max(shared, key=lambda row: row["limit_ms"])
        eager = eager_rows[ours["workload"]]
        others = [row for row in timed if row["workload"] == ours["workload"] and row["kind"] == "peer"]
        best = min((row for row in others if row is not eager), key=lambda row: row["median_ms"], default=None)
        our_ms = ours["median_ms"]
        extra = [_form(row, "peak_beyond_gradients_bytes", ",.0f", 1 / MIB) for row in (eager, ours)]
        table.append(
            [
                f"[{op}](#{op})",
                ours["workload"],
                _ms(eager["median_ms"]),
                "–" if best is None else f"{_ms(best['median_ms'])} ({best['implementation']})",
                f"**{_ms(our_ms)}**",
                f"**{eager['median_ms'] / our_ms:.2f} ×**",
                "–" if best is None else f"{best['median_ms'] / our_ms:.2f} ×",
                f"{extra[0]} → **{extra[1]}**",
            ]
        )
    if not table:
        return ""
    head = (
        "op",
        "shape",
        "eager ms",
        "fastest other ms",
        "Liger ms",
        "speedup over eager",
        "over the other",
        "extra MiB, eager → Liger",
    )
    about = (
        "Each op at the largest shape that eager PyTorch can run, forward and backward. *Eager* is plain PyTorch as in "
        "Transformers. *Extra* is the peak memory beyond inputs and gradients."
    )
    return f"## Ops\n\n{about}\n\n{markdown.table(head, table, right=range(2, len(head)))}"


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


def _op(name: str, records: Records, pictures: dict[str, Path]) -> str:
    rows = [row for row in records.ops if row["op"] == name]
    parts = [f"### {name}", _picture(name, f"{name}: fraction of the roofline", pictures)]
    pass_rows = [row for row in rows if row["pass"] != "dispatch"]
    if pass_rows:
        parts += [
            _speeds(pass_rows),
            _costs(pass_rows),
            markdown.reasons(
                (f"{r['workload']}, {r['implementation']} {r['pass']}".strip(), r["reason"]) for r in pass_rows
            ),
        ]
    dispatch = find(rows, {"pass": "dispatch"})
    if dispatch is not None and dispatch["enqueue_ms"] is not None:
        parts.append(f"Choosing the implementation costs a call {dispatch['enqueue_ms'] * 1e3:.2f} µs.")
    parts.append(_picture(f"{name} scaling", f"{name}: time against each size", pictures))
    return "\n\n".join(text for text in parts if text)


def _speeds(rows: Sequence[Record]) -> str:
    """Return the table of times and errors."""
    passes = [name for name in PASSES if any(row["pass"] == name and row["median_ms"] is not None for row in rows)]
    if not passes:
        return ""
    head = ["shape", "implementation"]
    for name in passes:
        head += [f"{name} ms", "roofline", *(["graph"] if name != "evaluation" else [])]
    head += ["error of outputs", "of gradients", "÷ eager"]
    table = []
    copied = None
    for workload, implementation in _pairs(rows):
        if workload != copied:
            copied = workload
            table += _copies([row for row in rows if row["workload"] == workload], passes, len(head))
        line = [workload, _ours(implementation)]
        by_pass = {
            name: find(rows, {"workload": workload, "implementation": implementation, "pass": name}) for name in passes
        }
        if all(row is None or row["median_ms"] is None for row in by_pass.values()):
            continue
        for name, row in by_pass.items():
            line += [_time(row), _form(row, "share", ".2f"), *([_graph(row)] if name != "evaluation" else [])]
        any_row = next(row for row in by_pass.values() if row is not None)
        line += [
            _form(any_row, "error_outputs", ".1e"),
            _form(any_row, "error_gradients", ".1e"),
            _form(any_row, "error_eager_ratio", ".2f"),
        ]
        table.append(line)
    return markdown.table(head, markdown.sparse(table), right=range(2, len(head)))


def _copies(rows: Sequence[Record], passes: Sequence[str], width: int) -> list[list[str]]:
    """Return the line of the plain copy that moves as many bytes as a workload must; empty if it was not measured."""
    line = [rows[0]["workload"], "*copy of as many bytes*"]
    for name in passes:
        row = find([r for r in rows if r.get("copy_ms")], {"pass": name})
        share = ["–", "–"] if row is None else [f"{row['copy_ms']:.3f}", f"{row['limit_ms'] / row['copy_ms']:.2f}"]
        line += [*share, *(["–"] if name != "evaluation" else [])]
    return [] if set(line[2:]) == {"–"} else [line + ["–"] * (width - len(line))]


def _costs(rows: Sequence[Record]) -> str:
    """Return the table of the memory and host time of forward and backward."""
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
    return "Memory and host time of forward and backward:\n\n" + markdown.table(
        head, markdown.sparse(table), right=range(2, len(head))
    )


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


def _pairs(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the pairs of workload and implementation, with all implementations of a workload together."""
    order = distinct(rows, "workload")
    return sorted(
        dict.fromkeys((row["workload"], row["implementation"]) for row in rows), key=lambda pair: order.index(pair[0])
    )


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
