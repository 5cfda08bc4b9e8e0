# SPDX-License-Identifier: Apache-2.0
"""The page of a report: pictures, the seed's statements beside the figures, and every figure; as Markdown and as one HTML file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from markdown_it import MarkdownIt

from liger_bench.charts.statements import statements
from liger_bench.charts.sweeps import PLAIN, STRATEGY, Sweep, where
from liger_bench.charts.timelines import title
from liger_bench.printing import unit_of
from liger_bench.report import markdown
from liger_bench.report.records import Record, distinct
from liger_bench.train.cells import NOT_RUN
from liger_bench.train.row import SETUP, WITHIN_SPREAD, overlapping
from liger_bench.train.setup import Setup

GIB = 1 << 30
FIGURES = 6
ABOUT = """
Every training runs in a process of its own. Tokens per second are those of the median step after the first two, of all ranks; peak memory is the
most that the allocator gave out at once over the whole training, on the CPU in the second step. A cross in a picture is a training that ran out of
memory. `÷ plain` compares with Transformers alone at the same size; `≈` marks a ratio of speeds that the steps do not tell apart, since their 0.2 to
0.8 quantiles overlap.
""".strip()
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #d0d0d0; --soft: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e3e3; --paper: #121212; --line: #3c3c3c; --soft: #1e1e1e; }
  /* White becomes the paper, and colours keep their hue. */
  img { filter: invert(0.93) hue-rotate(180deg); }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.75rem; white-space: nowrap; text-align: left; }
pre, code { background: var(--soft); font-size: 0.9rem; }
pre { overflow-x: auto; padding: 0.75rem; }
""".strip()

# How notes begin that name the options which were chosen for the user, in rows of this version and of older ones.
CHOSEN = re.compile(r"--[a-z-]+ \S+ was chosen|Chosen for ")


@dataclass
class Pictures:
    """Where each picture was written, with its caption: of sweeps by the sweep's place, and of timelines."""

    sweeps: list[list[tuple[str, Path]]] = field(default_factory=list)
    timelines: list[tuple[str, Path]] = field(default_factory=list)


def page(
    rows: Sequence[Record], found: Sequence[Sweep], rest: Sequence[Record], timelines: Sequence[Record], pictures: Pictures, command: str
) -> str:
    """In Markdown. Pictures are named by the paths that they have."""
    parts = ["# Trainings", markdown.generated(command), _where(rows), ABOUT]
    for sweep, drawn in zip(found, pictures.sweeps, strict=True):
        parts += [f"## {sweep.title}", f"{sweep.setting}.", *_images(drawn), _statements(sweep), _figures(sweep)]
    parts += _timelines(timelines, pictures)
    parts += _others(rest, heading=bool(found))
    parts.append(_repeat(found, rest, command))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_html(text: str, folder: Path) -> str:
    """One file: the same page with its pictures, whose paths start at `folder`, within it."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'(<img src=")([^"]+)"', lambda found: f'{found[1]}{_inlined(folder / html.unescape(found[2]))}"', body)
    title = next(iter(re.findall(r"<h1>(.*?)</h1>", body)), "Trainings")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>\n{STYLE}\n</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}</body>\n</html>\n'


def _inlined(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _where(rows: Sequence[Record]) -> str:
    lines = markdown.where(rows) + [f"* {versions}" for versions in distinct(rows, "versions")]
    return lines[0] + "\n\n" + "\n".join(lines[1:])


def _images(drawn: Sequence[tuple[str, Path]]) -> list[str]:
    return [f"![{caption}](<{path.as_posix()}>)" for caption, path in drawn]


def _statements(sweep: Sweep) -> str:
    found = statements(sweep)
    if not found:
        return ""
    if any(each.seed for each in found):
        return markdown.table(("", "the seed", "here"), [(each.words, each.seed or "–", each.here) for each in found])
    return markdown.table(("", "here"), [(each.words, each.here) for each in found])


def _figures(sweep: Sweep) -> str:
    plain = sweep.strategy(PLAIN)
    scale, unit = _unit(sweep.rows)
    lines: list[list[str]] = []
    for value in sweep.values:
        base = sweep.row(plain, value)
        for strategy in sweep.strategies:
            row = sweep.row(strategy, value)
            if row is not None:
                lines.append([str(value), strategy.label, *_cells(row, base, scale)])
    parts = [markdown.table((sweep.axis, "strategy", *_head(unit)), markdown.sparse(lines), right=(0, *range(2, 2 + FIGURES)))]
    if not any(row.get("peak_bytes") for row in sweep.rows):
        parts.append("Peak memory was not measured.")
    parts.append(_told(sweep, lambda row: [row["reason"]]))
    parts.append(_told(sweep, _notes))
    return "\n\n".join(part for part in parts if part)


def _told(sweep: Sweep, sentences: Callable[[Record], Sequence[str]]) -> str:
    """What is said of its trainings; of each strategy the values together of which the same is said, if it is not said of all."""
    found: list[tuple[str, str]] = []
    for strategy in sweep.strategies:
        rows = [row for row in sweep.rows if strategy.has(row)]
        values: dict[str, list[str]] = {}
        for row in rows:
            for sentence in sentences(row):
                values.setdefault(sentence, []).append(str(row[sweep.axis]))
        found += [
            (strategy.label if len(places) == len(rows) > 1 else f"{strategy.label} at {', '.join(places)}", sentence)
            for sentence, places in values.items()
        ]
    return markdown.reasons(found)


def _notes(row: Record) -> list[str]:
    """What was decided, but for the options that were chosen, which stand above."""
    return [note for note in row.get("notes") or [] if not CHOSEN.match(note)]


def _head(unit: str) -> tuple[str, ...]:
    return ("tokens/s", "0.2 – 0.8 quantile", "÷ plain", f"peak {unit}", "÷ plain", "last loss")


def _unit(rows: Sequence[Record]) -> tuple[int, str]:
    return unit_of(max((row.get("peak_bytes") or 0 for row in rows), default=0) or GIB)


def _cells(row: Record, plain: Record | None, scale: int) -> list[str]:
    if row["tokens_per_second"] is None:
        word = (
            "out of memory"
            if row["out_of_memory"]
            else NOT_RUN
            if row["reason"].startswith(NOT_RUN)
            else "failed"
            if row.get("failed")
            else "–"
        )
        return [word, *["–"] * (FIGURES - 1)]
    low, high, losses = row.get("low_tokens_per_second"), row.get("high_tokens_per_second"), row.get("losses")
    return [
        f"{row['tokens_per_second']:,.0f}",
        "–" if low is None or high is None else f"{low:,.0f} – {high:,.0f}",
        _ratio(row, plain, "tokens_per_second"),
        "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / scale:.2f}",
        _ratio(row, plain, "peak_bytes"),
        f"{losses[-1]:.4f}" if losses else "–",
    ]


def _ratio(row: Record, plain: Record | None, column: str) -> str:
    base = None if plain is None or plain["out_of_memory"] else plain[column]
    if plain is None or not base or row[column] is None:
        return "–"
    about = WITHIN_SPREAD if column == "tokens_per_second" and row is not plain and overlapping(row, plain) else ""
    return f"{about}{row[column] / base:.2f}"


def _timelines(timelines: Sequence[Record], pictures: Pictures) -> list[str]:
    if not timelines:
        return []
    names = list(timelines[0]["bytes"])
    scale, unit = unit_of(max(sum(record["peak"].values()) for record in timelines) or GIB)
    lines = []
    for record in timelines:
        peak = record["peak"]
        lines.append([title(record["setup"]), f"{sum(peak.values()) / scale:.2f}", *(f"{peak[name] / scale:.2f}" for name in names)])
    about = (
        "## Memory over time\n\nFrom the events of the allocator: the second and third step, or all up to where memory ran out. Weights, gradients and optimizer "
        f"are told by their addresses, checkpoints are the inputs of checkpointed layers, logits are told by their size. At the peak, in {unit}:"
    )
    return [about, markdown.table(("training", "peak", *names), lines, right=range(1, 2 + len(names))), *_images(pictures.timelines)]


def _others(rest: Sequence[Record], heading: bool) -> list[str]:
    """Trainings that vary no size, each beside the plain one of the same techniques if there is one."""
    if not rest:
        return []
    scale, unit = _unit(rest)
    lines = []
    for row in rest:
        same = [name for name in (*SETUP, "machine") if name != "liger"]
        plain = next((r for r in rest if r["liger"] == PLAIN and all(r[n] == row[n] for n in same)), None)
        lines.append([_named(row), row["liger"], *_cells(row, plain, scale)])
    table = markdown.table(("training", "liger", *_head(unit)), markdown.sparse(lines), right=range(2, 2 + FIGURES))
    return [
        f"## {'Other trainings' if heading else 'Trainings'}",
        table,
        markdown.reasons((f"{_named(r)} {r['liger']}", r["reason"]) for r in rest),
    ]


def _named(row: Record) -> str:
    """Everything about it that is not the default."""
    default = Setup(row["model"])
    shown = [
        n
        for n in SETUP
        if n not in ("model", "batch", "sequence", "liger", "steps", "seed", "learning_rate", "device", "memory_limit", "data")
    ]
    words = [str(row[n]) if n == "precision" else f"{n} {row[n]}" for n in shown if row[n] != getattr(default, n)]
    return f"{row['model']} {row['batch']} × {row['sequence']}{''.join(', ' + word for word in words)}; {where(row)}"


def _repeat(found: Sequence[Sweep], rest: Sequence[Record], command: str) -> str:
    lines = [sweep_command(sweep) for sweep in found]
    lines += [f"{_setup(row).command()} --out RESULTS" for row in rest]
    return "## Repeat\n\n" + "\n".join(f"    {line}" for line in [*lines, command])


def sweep_command(sweep: Sweep) -> str:
    """What measures it again."""
    parts, more = [], ""
    # One command per checkpointing, since the strategies of a sweep are selections of ops.
    for checkpoint in distinct(sweep.rows, STRATEGY[1]):
        rows = [row for row in sweep.rows if row[STRATEGY[1]] == checkpoint]
        setup = _setup(rows[0] | {"liger": "all", sweep.axis: getattr(Setup, sweep.axis, 1)})
        if setup.ranks > 1:
            # A sweep starts its ranks itself.
            setup, more = replace(setup, ranks=1), f" --sweep ranks={setup.ranks}"
        chosen = [strategy.liger for strategy in sweep.strategies if strategy.checkpoint == checkpoint]
        values = ",".join(map(str, distinct(rows, sweep.axis)))
        strategies = ",".join(name.replace(",", "+") for name in chosen)
        parts.append(f"{setup.command()} --sweep {sweep.axis}={values}{more} --strategies {strategies} --out RESULTS")
    return "\n    ".join(parts)


def _setup(row: Record) -> Setup:
    return Setup(**{name: row[name] for name in SETUP})
