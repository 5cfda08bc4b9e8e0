# SPDX-License-Identifier: Apache-2.0
"""The table of TRL's trainers at the top of docs/start/trl.md: `python docs/generate/trainers.py` writes it from the newest trl.json.

benchmarks/trainers.py measures the rows. tests/docs/test_site.py says when the table is stale.
"""

from __future__ import annotations

from pathlib import Path

from liger_bench import markdown
from liger_bench.records import Record, distinct
from liger_bench.results import read_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "start" / "trl.md"
BEGIN, END = "<!-- trainers: begin -->", "<!-- trainers: end -->"
COMMAND = "`python benchmarks/trainers.py`"
GIB = 1 << 30


def filled(text: str, results: Path = RESULTS) -> str:
    """Return a page with the table between the markers."""
    before, _, rest = text.partition(BEGIN)
    files = sorted(results.glob("*/trl.json"))
    made = table(read_json(files[-1]), files[-1].parent.name) if files else f"{COMMAND} compares the trainers on a GPU."
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


def table(rows: list[Record], folder: str) -> str:
    """Return the table, each trainer with TRL's head and with Liger, and where it was measured."""
    found = {(row["trainer"], row["head"]): row for row in rows}
    lengths = " and ".join(f"{length:,}" for length in distinct(rows, "length"))
    lines = []
    for trainer in distinct(rows, "trainer"):
        pair = [found.get((trainer, head)) for head in ("trl", "liger")]
        lines.append([f"`{trainer.upper()}Trainer`", *(cell for name in FIGURES for cell in _cells(pair, name))])
    head = [
        "",
        *(f"{words.format(lengths=lengths)}{end}" for words, _ in FIGURES.values() for end in ("", ", with Liger")),
    ]
    (about, *_), (model, *_) = markdown.where(rows), distinct(rows, "model")
    limit = distinct(rows, "memory_limit")[0]
    where = (
        f"{about} The model is a {model} with full attention and random weights in bfloat16; its layers are checkpointed, "
        f"and the allocator may take {limit:g} GiB. {COMMAND} measures it "
        f"([results](../../benchmarks/results/{folder}): {', '.join(distinct(rows, 'commit'))}; {rows[-1]['versions']})."
    )
    return markdown.table(head, lines, right=range(1, len(head))) + f"\n\n{where}"


# Column → its words, and a figure of it.
FIGURES = {
    "tokens_per_second": ("tokens/s at {lengths} tokens", lambda value: f"{value:,.0f}"),
    "peak_bytes": ("GiB there", lambda value: f"{value / GIB:.1f}"),
    "longest": ("longest sequence", lambda value: f"{value:,}"),
}


def _cells(pair: list[Record | None], name: str) -> list[str]:
    return [FIGURES[name][1](row[name]) if row and row.get(name) is not None else "–" for row in pair]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
