# SPDX-License-Identifier: Apache-2.0
"""The table of TRL's trainers at the top of docs/start/trl.md: `python docs/generate/trainers.py` writes it from the newest trl.json.

README.md has one sentence of it.

benchmarks/trainers.py measures the rows. tests/docs/test_site.py says when the table is stale.
"""

import math
from pathlib import Path

import docstrings

from liger_bench import markdown
from liger_bench.records import Record, distinct
from liger_bench.results import read_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "start" / "trl.md"
COMMAND = "python benchmarks/trainers.py"
GIB = 1 << 30
# The versions that the page names; the results have all.
NAMED = ("torch", "triton", "transformers", "trl")


def filled(text: str, results: Path = RESULTS) -> str:
    """Return the page with the table."""
    made = f"`{COMMAND}` compares the trainers on a GPU."
    for newest in sorted(results.glob("*/trl.json"))[-1:]:
        made = table(read_json(newest), newest.parent.name)
    return docstrings.filled(text, trainers=made)


def headline(results: Path = RESULTS) -> str:
    """Return the sentence of README.md."""
    pairs = [pair for pair in _pairs(read_json(sorted(results.glob("*/trl.json"))[-1])).values() if all(pair)]
    faster, longer = (
        min(after[name] / before[name] for before, after in pairs) for name in ("tokens_per_second", "longest")
    )
    return (
        f"With Liger, TRL's trainers have at least {_floored(faster)} × the speed that they have with TRL's own fused "
        f"head, and sequences can be at least {_floored(longer)} × as long"
    )


def _floored(ratio: float) -> str:
    return f"{math.floor(100 * ratio) / 100:.2f}"


def table(rows: list[Record], folder: str) -> str:
    """Return the table, each trainer with TRL's head and with Liger, and where it was measured."""
    lengths = " and ".join(f"{length:,}" for length in distinct(rows, "length"))
    lines = [
        [f"`{trainer.upper()}Trainer`", *(_cell(pair, name) for name in FIGURES)]
        for trainer, pair in _pairs(rows).items()
    ]
    limit = distinct(rows, "memory_limit")[0]
    head = ["", *(words.format(lengths=lengths, limit=f"{limit:g}") for words, _ in FIGURES.values())]
    (about, *_), (model, *_) = markdown.where(rows), distinct(rows, "model")
    versions = [each for each in rows[-1]["versions"].split(", ") if each.split()[0] in NAMED]
    where = (
        f"From TRL's own fused head to `LigerCallback` with `use_in_trl`. {about} The model is a {model} "
        "with full attention and random weights in bfloat16. Its layers are checkpointed. Each batch has one sequence, or "
        f"the two of a preference. `{COMMAND} --memory-limit {limit:g}` repeats it "
        f"([results](../../benchmarks/results/{folder}); commit {', '.join(distinct(rows, 'commit'))}; "
        f"{', '.join(versions)}; {rows[-1]['date'][:10]})."
    )
    return markdown.table(head, lines, right=range(1, len(head))) + f"\n\n{where}"


# Column → its words, and a figure of it.
FIGURES = {
    "tokens_per_second": ("tokens/s at {lengths} tokens", lambda value: f"{value:,.0f}"),
    "peak_bytes": ("GiB there", lambda value: f"{value / GIB:.1f}"),
    "longest": ("longest sequence in {limit} GiB", lambda value: f"{value:,}"),
}


def _pairs(rows: list[Record]) -> dict[str, list[Record]]:
    """Return the rows of each trainer, with TRL's head and with Liger; a row that is missing is empty."""
    found = {(row["trainer"], row["head"]): row for row in rows}
    return {name: [found.get((name, head), {}) for head in ("trl", "liger")] for name in distinct(rows, "trainer")}


def _cell(pair: list[Record], name: str) -> str:
    before, after = (FIGURES[name][1](row[name]) if row.get(name) is not None else "–" for row in pair)
    return f"{before} → **{after}**"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
