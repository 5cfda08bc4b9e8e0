# SPDX-License-Identifier: Apache-2.0
"""Runs of whole models measured before `liger train` could: `python docs/generate/older_runs.py` writes docs/benchmarks/models.md.

Their files are model.json and step.json; here they become rows of `liger train`, so that one report draws all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_bench import markdown
from liger_bench.printing import change
from liger_bench.records import Record
from liger_bench.results import read_json
from liger_hf.presets import preset_name
from liger_train.implementations import IMPLEMENTATIONS
from liger_train.report.command import PageOutput, runs_sections
from liger_train.report.sweeps import DEFAULTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks" / "models.md"
IMAGES = ROOT / "docs" / "images" / "bench" / "models"
COMMAND = "python docs/generate/older_runs.py"
# The one case of step.json that was measured: LoRA of rank 16 on all linear layers.
LORA: dict[str, Any] = {"model": "llama-3-8b", "adapter": "lora"}
GIB = 1 << 30
ABOUT = """
Random weights and tokens, bfloat16 weights, every layer recomputed, forward and backward **without an optimizer**. The commands at the end measure the
same runs with AdamW.
""".strip()


def rows() -> list[Record]:
    """Return every row of model.json and step.json as one of `liger train`, with the folder that it is from."""
    found: list[Record] = []
    for path in sorted(RESULTS.glob("*/model.json")):
        found += [_row(row, path.parent.name, model=preset_name(row["model"])) for row in read_json(path)]
    for path in sorted(RESULTS.glob("*/step.json")):
        found += [_row(_with_speeds(row), path.parent.name, **LORA) for row in read_json(path)]
    return found


def _row(row: Record, folder: str, **setup: Any) -> Record:
    return (
        DEFAULTS
        | row
        | {"precision": "bf16-pure", "checkpoint": "full", "memory_limit": row.get("memory_limit_bytes")}
        | {"steps": DEFAULTS["steps"], "losses": None if row["loss"] is None else [row["loss"]], "folder": folder}
        | IMPLEMENTATIONS[row["implementation"]]
        | setup
    )


def _with_speeds(row: Record) -> Record:
    tokens = row["batch"] * row["sequence"]
    return row | {
        "low_tokens_per_second": tokens / row["high_seconds"],
        "high_tokens_per_second": tokens / row["low_seconds"],
    }


def title(row: Record) -> str:
    """Return the model and its shape, and the memory that it was allowed."""
    limit = f" in {row['memory_limit'] / GIB:g} GiB" if row["memory_limit"] else ""
    return f"{row['model']} {row['batch']} × {row['sequence']}{limit}{', LoRA' if row['adapter'] == 'lora' else ''}"


def headlines(found: list[Record]) -> Iterator[str]:
    """Yield a sentence for each model: Liger beside Transformers at the last shape that both ran."""
    base = {title(row): row for row in found if row["implementation"] == "hf" and row["tokens_per_second"]}
    last = {
        (row["model"], row["adapter"]): row
        for row in found
        if row["implementation"] == "liger" and row["tokens_per_second"] and title(row) in base
    }
    for row in last.values():
        plain = base[title(row)]
        speed, peaks = row["tokens_per_second"] / plain["tokens_per_second"], (row["peak_bytes"], plain["peak_bytes"])
        yield (
            f"**{title(row)}: {speed:.2f} × the speed of Transformers, {change(*peaks)} peak memory** "
            f"({peaks[0] / GIB:.1f} GiB instead of {peaks[1] / GIB:.1f} GiB)"
        )


def page(images: Path = IMAGES) -> str:
    """Return the page, and draw its pictures."""
    found = rows()
    # Links are those of the committed page, also where a test draws elsewhere.
    output = PageOutput(images.parents[2] / "benchmarks", images, lambda name: None)
    parts = [
        "# Whole models",
        markdown.generated(COMMAND),
        "\n".join(f"* {words}" for words in headlines(found)),
        ABOUT,
    ]
    return "\n\n".join([*parts, *runs_sections(found, [], output, COMMAND)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
