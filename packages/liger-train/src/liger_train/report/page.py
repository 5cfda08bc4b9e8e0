# SPDX-License-Identifier: Apache-2.0
"""The page of a report with pictures, statements and all figures, as Markdown and as one HTML file."""

import base64
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from markdown_it import MarkdownIt

from liger_bench import markdown
from liger_bench.printing import unit_of
from liger_bench.records import Record, distinct
from liger_train.report.statements import statements
from liger_train.report.sweeps import PLAIN, Sweep, where
from liger_train.report.timelines import title
from liger_train.row import FIGURES, SETUP, chosen_options, figures_of, setup_from
from liger_train.setup import Setup

GIB = 1 << 30
ABOUT = """
Every run has its own process. Throughput is the median step after the first two, summed over ranks. Peak memory is the
allocator's maximum over the whole run; on the CPU, in the second step. The baseline is Transformers without Liger at
the same size. `≈` marks a speedup within the spread of the steps: the 20th to 80th percentiles of the two runs overlap.
A cross in a picture marks a run that was out of memory.
""".strip()
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #d0d0d0; --soft: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e3e3; --paper: #121212; --line: #3c3c3c; --soft: #1e1e1e; }
  /* White becomes the paper, and colors keep their hue. */
  img { filter: invert(0.93) hue-rotate(180deg); }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.75rem; white-space: nowrap; text-align: left; }
pre, code { background: var(--soft); font-size: 0.9rem; }
pre { overflow-x: auto; padding: 0.75rem; }
""".strip()

# The start of notes on defaults, in rows of this version and of older ones.
NOTES_ON_DEFAULTS = re.compile(r"--[a-z-]+ \S+ was chosen|(Chosen|Defaults) for ")


# (caption, path) of pictures.
Pictures = Sequence[tuple[str, Path]]


def page(
    rows: Sequence[Record],
    pictured: Sequence[tuple[Sweep, Pictures]],
    timelines: Sequence[Record],
    timeline_pictures: Pictures,
    command: str,
) -> list[str]:
    """Return the sections of the page in Markdown, which link to the paths of the pictures of sweeps and timelines."""
    all_sweeps = [sweep for sweep, _ in pictured]
    in_sweeps = {id(row) for sweep in all_sweeps for row in sweep.rows}
    rest = [row for row in rows if id(row) not in in_sweeps]
    heading, *lines = markdown.where(rows) + [f"* {versions}" for versions in distinct(rows, "versions")]
    sections = [heading + "\n\n" + "\n".join(lines), ABOUT]
    for sweep, images in pictured:
        figures = list(statements(sweep))
        sections += [f"## {sweep.title}", f"{sweep.setting}.", *_images(images)]
        sections += [markdown.table(("", "figure"), figures) if figures else "", _figures(sweep)]
    sections += _timelines(timelines, timeline_pictures)
    sections += _others(rest, heading=bool(all_sweeps))
    sections.append(_repeat(all_sweeps, rest, command))
    return [section for section in sections if section]


def as_html(text: str, folder: Path) -> str:
    """Convert the page to one HTML file with inline images, whose paths are relative to `folder`."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    for link in set(re.findall(r'<img src="([^"]+)"', body)):
        picture = base64.b64encode((folder / html.unescape(link)).read_bytes()).decode()
        body = body.replace(f'<img src="{link}"', f'<img src="data:image/png;base64,{picture}"')
    title = next(iter(re.findall(r"<h1>(.*?)</h1>", body)), "Results")
    head = (
        '<meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>\n{STYLE}\n</style>'
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}</body>\n</html>\n'


def _images(pictures: Pictures) -> list[str]:
    return [f"![{caption}](<{path.as_posix()}>)" for caption, path in pictures]


def _figures(sweep: Sweep) -> str:
    plain = sweep.strategy(PLAIN)
    scale, unit = _unit(sweep.rows)
    lines: list[list[str]] = []
    for value in sweep.values:
        base = sweep.row(plain, value)
        for strategy in sweep.strategies:
            row = sweep.row(strategy, value)
            if row is not None:
                lines.append([str(value), strategy.label, *figures_of(row, base, scale)])
    head = (sweep.axis, "strategy", *_figure_names(unit))
    table = markdown.table(head, markdown.sparse(lines), right=(0, *range(2, 2 + FIGURES)))
    unmeasured = "" if any(row.get("peak_bytes") for row in sweep.rows) else "Peak memory was not measured."
    parts = (table, unmeasured, _sentences(sweep, lambda row: [row["reason"]]), _sentences(sweep, _notes))
    return "\n\n".join(filter(None, parts))


def _sentences(sweep: Sweep, sentences: Callable[[Record], Sequence[str]]) -> str:
    """Return the reasons or notes of a sweep's runs, each once per strategy, with sizes if only some runs have it."""
    pairs: list[tuple[str, str]] = []
    for strategy in sweep.strategies:
        rows = [row for row in sweep.rows if strategy.has(row)]
        values: dict[str, list[str]] = {}
        for row in rows:
            for sentence in sentences(row):
                values.setdefault(sentence, []).append(str(row[sweep.axis]))
        pairs += [
            (strategy.label if len(sizes) == len(rows) > 1 else f"{strategy.label} at {', '.join(sizes)}", sentence)
            for sentence, sizes in values.items()
        ]
    return markdown.reasons(pairs)


def _notes(row: Record) -> list[str]:
    """Return the notes of a row, without those on defaults, which the section's heading shows."""
    return [note for note in row.get("notes") or [] if not NOTES_ON_DEFAULTS.match(note)]


def _figure_names(unit: str) -> tuple[str, ...]:
    return ("tokens/s", "20th – 80th percentile", "speedup", f"peak {unit}", "÷ baseline", "last loss")


def _unit(rows: Sequence[Record]) -> tuple[int, str]:
    return unit_of(max((row.get("peak_bytes") or 0 for row in rows), default=0) or GIB)


def _timelines(timelines: Sequence[Record], pictures: Pictures) -> list[str]:
    if not timelines:
        return []
    names = list(timelines[0]["bytes"])
    scale, unit = unit_of(max(sum(record["peak"].values()) for record in timelines) or GIB)
    lines = []
    for record in timelines:
        sizes = [sum(record["peak"].values()), *(record["peak"][name] for name in names)]
        lines.append([title(record["setup"]), *(f"{size / scale:.2f}" for size in sizes)])
    about = (
        "## Memory over time\n\nFrom the allocator's events: the last recorded step, up to the failed request if it "
        "ran out of memory. Weights, gradients and optimizer state are recognized by their addresses, logits by their "
        f"size; checkpoints are the inputs of checkpointed layers. At the peak, in {unit}:"
    )
    return [
        about,
        markdown.table(("run", "peak", *names), lines, right=range(1, 2 + len(names))),
        *_images(pictures),
    ]


def _others(rest: Sequence[Record], heading: bool) -> list[str]:
    """Return the section on runs outside sweeps, each with ratios to the run without Liger if there is one."""
    if not rest:
        return []
    scale, unit = _unit(rest)
    lines = []
    for row in rest:
        same = [name for name in (*SETUP, "machine") if name != "liger"]
        plain = next((r for r in rest if r["liger"] == PLAIN and all(r[n] == row[n] for n in same)), None)
        lines.append([_run_name(row), row["liger"], *figures_of(row, plain, scale)])
    table = markdown.table(("run", "liger", *_figure_names(unit)), markdown.sparse(lines), right=range(2, 2 + FIGURES))
    return [
        f"## {'Other runs' if heading else 'Runs'}",
        table,
        markdown.reasons((f"{_run_name(r)} {r['liger']}", _ending(r)) for r in rest),
    ]


def _ending(row: Record) -> str:
    """Return why a run did not complete all its steps, or an empty string."""
    if row.get("interrupted"):
        return f"interrupted after {len(row.get('losses') or [])} of {row['steps']} steps"
    return str(row["reason"])


def _run_name(row: Record) -> str:
    """Return the model, the size, the options that are not the defaults, and the machine of a run."""
    words = [str(value) if name == "precision" else f"{name} {value}" for name, value in chosen_options(row).items()]
    size = f"{row['model']} {row['batch']} × {row['sequence']}"
    return f"{', '.join([size, *words])}; {where(row)}"


def _repeat(all_sweeps: Sequence[Sweep], rest: Sequence[Record], command: str) -> str:
    lines = [sweep_command(sweep) for sweep in all_sweeps]
    lines += [f"{setup_from(row).command()} --out RESULTS" for row in rest]
    return "## How to repeat\n\n" + "\n".join(f"    {line}" for line in [*lines, command])


def sweep_command(sweep: Sweep) -> str:
    """Return the command that repeats a sweep."""
    lines, ranks = [], ""
    # One command for each value of --compile and --checkpoint, because --strategies varies --liger only.
    for options in dict.fromkeys((strategy.compile, strategy.checkpoint) for strategy in sweep.strategies):
        alike = [each for each in sweep.strategies if (each.compile, each.checkpoint) == options]
        rows = [row for row in sweep.rows if any(strategy.has(row) for strategy in alike)]
        setup = setup_from(rows[0] | {"liger": "all", sweep.axis: getattr(Setup, sweep.axis, 1)})
        if setup.ranks > 1:
            # A sweep starts its own ranks.
            setup, ranks = replace(setup, ranks=1), f" --sweep ranks={setup.ranks}"
        values = ",".join(map(str, distinct(rows, sweep.axis)))
        strategies = ",".join(strategy.liger.replace(",", "+") for strategy in alike)
        lines.append(f"{setup.command()} --sweep {sweep.axis}={values}{ranks} --strategies {strategies} --out RESULTS")
    return "\n    ".join(lines)
