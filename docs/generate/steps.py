# SPDX-License-Identifier: Apache-2.0
"""Whole steps of each implementation, and the longest sequence in 24 GB: `python docs/generate/steps.py` writes docs/benchmarks/steps.md.

The rows are those of the newest folder *-steps of benchmarks/results, or of an argument; `nox -s steps` measures them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from all_ops import ROOT, newest

from liger_bench import markdown
from liger_bench.printing import change
from liger_bench.records import Record, distinct
from liger_train.model import weights_dtype
from liger_train.plan.cost import RATES
from liger_train.plan.estimate import UPDATE_PASSES, work
from liger_train.plan.fit import EXAMPLES
from liger_train.report.sweeps import read
from liger_train.row import chosen_options, overlapping, setup_from
from liger_train.runs.profile import FOLDER as PROFILES
from liger_train.runs.profile import KINDS
from liger_train.setup import Setup

PAGE = ROOT / "docs" / "benchmarks" / "steps.md"
NAMES = {
    "hf": "Transformers",
    "hf-compiled": "Transformers, compiled",
    "liger-kernel": "liger-kernel",
    "liger": "Liger",
    "liger-compiled": "Liger, compiled",
}
PLAIN, OURS = "hf", ("liger", "liger-compiled")
GIB = 1 << 30
# The dense matmuls of a card in bfloat16 per second, by its data sheet.
SHEET = dict(EXAMPLES.values())
work = cache(work)
ABOUT = """
Whole training steps with AdamW, random weights, every layer recomputed. Throughput is the median step after the first two. *MFU* is the operations of
the matmuls and of attention, without those that checkpointing repeats, as a share of the card's data sheet. Frozen weights have no gradient, so LoRA
counts two passes. *Of the bound* is the speed as a share of a step that only multiplies and updates: matmuls, repeated ones too, and attention at the
rates that `liger bench` measured, and AdamW at the card's bandwidth. Attention counts in full, also in layers with a window.
""".strip()
TRACED = """
Milliseconds of the kernels of a step by kind, of runs with `--profile`, and the rate of the matmuls, without those of adapters. *Fused ops* are Triton
kernels that Inductor did not write; *4 bits* dequantizes weights.
""".strip()
LONGEST = """
The longest sequence that one step of one sequence fits, in multiples of 1024 tokens, with every layer recomputed. The allocator is limited; the card
is larger.
""".strip()


def page(folder: Path) -> str:
    rows = read([folder])
    steps = measured(rows)
    name = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    where = markdown.where(rows) + [f"* {versions}" for versions in distinct(rows, "versions")]
    parts = [
        "# Training steps",
        markdown.generated("python docs/generate/steps.py"),
        where[0],
        "\n".join(where[1:]),
        ABOUT,
        markdown.table(
            ("run", "implementation", "tokens/s", "÷ Transformers", "MFU", "of the bound", "peak GiB"),
            markdown.sparse([line(row, steps) for row in steps]),
            right=range(2, 7),
        ),
        markdown.reasons((f"{run(row)}, {NAMES[setup_from(row).implementation]}", row["reason"]) for row in steps),
        *traced(folder / "traces"),
        *longest([row for row in rows if row["memory_limit"] is not None]),
        f"## How to repeat\n\n    nox -s steps -- {name}\n    python docs/generate/steps.py {name}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def measured(rows: Sequence[Record]) -> list[Record]:
    """Return the rows of whole steps by run, without those of the search for the longest sequence."""
    rows = [row for row in rows if row["memory_limit"] is None]
    # Several GPUs may have measured side by side.
    runs = list(dict.fromkeys(map(run, rows)))
    return sorted(rows, key=lambda row: (runs.index(run(row)), list(NAMES).index(setup_from(row).implementation)))


def headlines(rows: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence for each run of Liger beside Transformers."""
    for name, plain, ours in _pairs(rows):
        speed, peaks = ours["tokens_per_second"] / plain["tokens_per_second"], (ours["peak_bytes"], plain["peak_bytes"])
        yield (
            f"**{name}: {speed:.2f} × the speed of Transformers, {change(*peaks)} peak memory** "
            f"({peaks[0] / GIB:.1f} GiB instead of {peaks[1] / GIB:.1f} GiB)"
        )


def readme(rows: Sequence[Record]) -> Iterator[str]:
    """Yield a row of README's table for each run of Liger beside Transformers."""
    for name, plain, ours in _pairs(rows):
        cells = (
            f"{row['peak_bytes'] / GIB:.1f} GiB, {row['tokens_per_second']:,.0f} tokens/s" for row in (plain, ours)
        )
        memory, speed = (change(ours[column], plain[column]) for column in ("peak_bytes", "tokens_per_second"))
        yield f"| {name} | {' | '.join(cells)} | **{memory} memory, {speed} speed** |"


def _pairs(rows: Sequence[Record]) -> Iterator[tuple[str, Record, Record]]:
    """Yield each run with the rows of Transformers and Liger."""
    timed = {(run(row), setup_from(row).implementation): row for row in rows if row["tokens_per_second"]}
    for name in dict.fromkeys(map(run, rows)):
        plain, ours = timed.get((name, PLAIN)), timed.get((name, "liger"))
        if plain and ours:
            yield name, plain, ours


def slower(rows: Sequence[Record], least: float) -> Iterator[tuple[Record, Record]]:
    """Yield Liger's row and that of an implementation that is faster in the same run, beyond the spread of the steps."""
    timed = [row for row in rows if row["tokens_per_second"]]
    others = [row for row in timed if setup_from(row).implementation not in OURS]
    for ours in (row for row in timed if row["liger"] == "all"):
        for other in others:
            same = (run(other), other["checkpoint"]) == (run(ours), ours["checkpoint"])
            if same and ours["tokens_per_second"] < least * other["tokens_per_second"] and not overlapping(ours, other):
                yield ours, other


def counted(row: Record) -> Setup:
    """Return the setup whose operations are counted: all implementations have as many."""
    return replace(setup_from(row), liger="none", compile="none", steps=Setup.steps)


def run(row: Record) -> str:
    """Return the model, the shape, and the options that the implementations share."""
    options = chosen_options(row | {"compile": Setup.compile})
    words = [str(value) for name, value in options.items() if name != "checkpoint"]
    return ", ".join([f"{row['model']} {row['batch']} × {row['sequence']}", *words])


def line(row: Record, rows: Sequence[Record]) -> list[str]:
    """Return the cells of a run."""
    speed = row["tokens_per_second"]
    cells = [run(row), NAMES[setup_from(row).implementation]]
    if speed is None:
        return [*cells, "out of memory" if row["out_of_memory"] else "failed", *"–––", "–"]
    plain = next((each for each in rows if run(each) == run(row) and setup_from(each).implementation == PLAIN), row)
    base = plain["tokens_per_second"]
    useful, bound = shares(row)
    figures = [f"{speed:,.0f}", f"{speed / base:.2f}" if base else "–", useful, bound]
    return [*cells, *figures, f"{row['peak_bytes'] / GIB:.1f}" if row["peak_bytes"] else "–"]


def shares(row: Record) -> tuple[str, str]:
    """Return the MFU of a run, and its speed as a share of the bound, where the rates of its card are known."""
    same = counted(row)
    per_token, per_square = work(replace(same, checkpoint="none"))
    cards = [name for name in SHEET if name in row["machine"]]
    operations = per_token + per_square * row["sequence"]
    useful = f"{row['tokens_per_second'] * operations / SHEET[cards[0]]:.2f}" if cards else "–"
    rates = next((rates for name, rates in RATES.items() if name in row["machine"]), None)
    if rates is None:
        return useful, "–"
    per_token, per_square = work(same)
    seconds = per_token / rates.matmul + per_square * row["sequence"] / rates.attention
    update = UPDATE_PASSES * weights_dtype(same).itemsize * row["trainable_parameters"] / rates.memory
    seconds += update / (row["batch"] * row["sequence"] * row["accumulation"])
    return useful, f"{row['tokens_per_second'] * seconds:.2f}"


def traced(folder: Path) -> list[str]:
    """Return the section on the kernels of a step, from a folder of runs with --profile."""
    records = [json.loads(path.read_text()) for path in sorted((folder / PROFILES).glob("*.json"))]
    if not records:
        return []
    times = {setup_from(record["setup"]): record["milliseconds"] for record in records}
    kinds = [kind for kind in KINDS if any(kind in kernels for kernels in times.values())]
    lines = []
    for row in measured([record["setup"] for record in records]):
        kernels = times[setup_from(row)]
        rate = work(counted(row))[0] * row["batch"] * row["sequence"] / kernels["matmuls"] / 1e9
        cells = [f"{kernels[kind]:.1f}" if kind in kernels else "–" for kind in kinds]
        lines.append(
            [run(row), NAMES[setup_from(row).implementation], *cells, f"{sum(kernels.values()):.1f}", f"{rate:.0f}"]
        )
    head = ("run", "implementation", *kinds, "all", "TFLOP/s")
    return ["## Where the time goes", TRACED, markdown.table(head, markdown.sparse(lines), right=range(2, len(head)))]


def longest(rows: Sequence[Record]) -> list[str]:
    """Return the section on the longest sequence within a limit, from the rows of a search."""
    if not rows:
        return []
    lines = []
    for name in dict.fromkeys(map(method, rows)):
        cells = [name]
        for implementation in (PLAIN, "liger-kernel", "liger"):
            tried = [row for row in rows if (method(row), setup_from(row).implementation) == (name, implementation)]
            fits = [row["sequence"] for row in tried if not (row["out_of_memory"] or row["failed"])]
            cells.append(f"{max(fits):,}" if fits else "0" if any(row["out_of_memory"] for row in tried) else "–")
        lines.append(cells)
    limits = " and ".join(f"{limit / GIB:g} GiB" for limit in distinct(rows, "memory_limit"))
    failed = markdown.reasons((method(row), row["reason"]) for row in rows if row["failed"])
    head = ("run", "Transformers and PEFT", "liger-kernel", "Liger")
    return [f"## The longest sequence in {limits}", LONGEST, markdown.table(head, lines, right=(1, 2, 3)), failed]


def method(row: Record) -> str:
    return f"{row['model']}, {'all weights' if row['adapter'] == 'none' else row['adapter']}"


if __name__ == "__main__":
    chosen = Path(sys.argv[1]).resolve() if sys.argv[1:] else newest("steps")
    PAGE.write_text(page(chosen), encoding="utf-8")
