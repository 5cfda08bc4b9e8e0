# SPDX-License-Identifier: Apache-2.0
"""The figures of all benchmark pages in short, and where Liger is slower: `python docs/generate/benchmarks.py` writes docs/benchmarks.md."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import steps
import trainers
from all_ops import OPS, ROOT, newest, records

from liger_bench import markdown
from liger_bench.op_page import COLUMNS, NAMES, SHORTEST_MS, SLOWER, call, compared, label, slower, speed
from liger_bench.records import Record
from liger_train.report.sweeps import read
from liger_train.row import setup_from

DOCS = ROOT / "docs"
PAGE = DOCS / "benchmarks.md"
PAGES = {
    "benchmarks/ops.md": ("ops", "every op beside plain PyTorch, torch.compile, liger-kernel and others"),
    "benchmarks/steps.md": ("steps", "whole training steps, and the longest sequence that fits"),
    "benchmarks/sharded-heads.md": ("sharded heads", "heads whose vocabulary is sharded over GPUs"),
    "training-results.md": ("training results", "whole training runs"),
    "start/trl.md": ("TRL", "its trainers with and without Liger"),
}


def page(ops: Sequence[str] = OPS) -> str:
    folder, of_steps, of_runs = map(newest, ("all-ops", "steps", "training-runs"))
    whole_steps = steps.measured(read([of_steps]))
    rows = [row for row in records(folder).ops if row["op"] in ops]
    lines = [*slower_ops(folder, rows), *slower_runs(of_steps, whole_steps), *slower_runs(of_runs, read([of_runs]))]
    parts = [
        "# Benchmarks",
        markdown.generated("python docs/generate/benchmarks.py"),
        "\n".join(f"* {line}" for line in steps.headlines(whole_steps)),
        OPS_ABOUT.format(
            count=len({ours["op"] for ours, _ in compared(rows)}), all=len(ops), where=place(folder, rows[0])
        ),
        markdown.table(("beside", "ops", "lowest", "median", "highest"), list(summary(rows)), right=range(1, 5)),
        f"{trainers.headline()} ([table](start/trl.md)).",
        "\n".join(f"* [{name}]({page}): {about}" for page, (name, about) in PAGES.items() if (DOCS / page).exists()),
        "## Where Liger is not faster",
        NOT_FASTER.format(percent=f"{100 * (1 - SLOWER):.0f}", shortest=f"{1000 * SHORTEST_MS:.0f}"),
        markdown.table(("what", "Liger's speed", "beside", "card, date"), lines, right=(1,)),
        REPEAT,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(rows: Sequence[Record]) -> Iterator[list[str]]:
    """Yield, for each other implementation of a column, the number of ops and its times ÷ Liger's in forward and backward."""
    full = [(ours, others) for ours, others in compared(rows) if ours["pass"] == "full"]
    for column in COLUMNS:
        speeds = sorted(speed(ours, others[column]) for ours, others in full if column in others)
        if speeds:
            figures = (speeds[0], statistics.median(speeds), speeds[-1])
            yield [NAMES.get(column, column), str(len(speeds)), *(f"{value:.2f} ×" for value in figures)]


def slower_ops(folder: Path, rows: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each call of an op that another implementation runs faster."""
    for ours, other in slower(rows):
        yield call(ours), f"{speed(ours, other):.2f} ×", label(other), place(folder, ours)


def slower_runs(folder: Path, rows: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each training run that another implementation runs faster."""
    for ours, other in steps.slower(rows, SLOWER):
        ratio = ours["tokens_per_second"] / other["tokens_per_second"]
        compiled = ", compiled" * (ours["compile"] != "none")
        beside = steps.NAMES[setup_from(other).implementation]
        yield f"training {steps.run(ours)}{compiled}", f"{ratio:.2f} ×", beside, place(folder, ours)


def place(folder: Path, row: Record) -> str:
    """Return the card and the date, as a link to the results."""
    words = f"{row['machine'].partition(';')[0].removeprefix('NVIDIA ').split()[0]}, {row['date'][:10]}"
    return f"[{words}](../{folder.relative_to(ROOT).as_posix()})"


OPS_ABOUT = """
The time of another implementation ÷ Liger's for one op, forward and backward in bfloat16, at a shape that users have: more than 1 is faster. {count} of
{all} ops are measured ({where}); *ops* is the number of ops that the other has.
""".strip()
NOT_FASTER = """
All calls of ops and all training runs of these pages in which Liger is slower by more than {percent} %, beyond the spread of calls or steps. Calls
shorter than {shortest} µs are left out. With few tokens per step, eager models are host-bound: [compile](how-to/compile.md) them. With offloaded weights, copies
to and from the host bound a small step.
""".strip()
REPEAT = """
## How to repeat

    nox -s benchmarks -- results/all-ops            # every op, on one CUDA GPU
    nox -s steps -- results/steps                   # whole steps, on one CUDA GPU of 80 GB
    nox -s training-results -- results/training     # whole training runs
    liger bench sharded --out results/sharded       # sharded heads, on several GPUs
    python benchmarks/trainers.py --out results/trl # TRL's trainers
""".strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
