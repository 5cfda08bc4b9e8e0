# SPDX-License-Identifier: Apache-2.0
"""Every op beside the other libraries, and where Liger is slower: `python docs/generate/benchmarks.py` writes docs/benchmarks.md.

Every ratio is of two implementations in one run, from committed results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from older_runs import headlines, title
from older_runs import rows as older_rows
from peer_results import CARDS, DTYPE, EAGER, OURS, PEER, RESULTS, Row, measured, runs

from liger_bench import markdown
from liger_bench.op_page import comparable
from liger_bench.records import Record
from liger_core.builtin import CATALOGUE
from liger_train.report.sweeps import FUSED, PLAIN, sweeps
from liger_train.report.sweeps import read as read_training
from liger_train.row import overlapping

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
# Shorter calls take as long as their launches, and their ratios vary from run to run.
SLOWER, SHORTEST_MS = 0.97, 0.025
COMPILED = "hf-compiled"
NAMES = {
    "hf": "Transformers",
    COMPILED: "compiled Transformers",
    PEER: PEER,
    "liger": "Liger",
    "liger-compiled": "compiled Liger",
}
ANYTHING_ELSE = "peer"
PAGES = {
    "models": "Llama models, forward and backward: Transformers, liger-kernel and Liger, eager and compiled",
    "ops": "the ops of a Llama in detail: every shape, memory, errors, scaling",
    "peer-operators": "every operator of liger-kernel beside Liger's op",
    "losses": "log-probabilities, and heads whose vocabulary is sharded over GPUs",
    "divergences": "divergences of logits, and of heads",
}


@dataclass(frozen=True)
class Ratio:
    """The time of another implementation ÷ Liger's, for one call in one run."""

    op: str
    workload: str
    name: str
    ours: Row
    theirs: Row

    @property
    def speed(self) -> float:
        return float(self.theirs["median_ms"] / self.ours["median_ms"])

    @property
    def overlaps(self) -> bool:
        """Whether the 20th to 80th percentiles of the two times overlap."""
        return bool(self.ours["low_ms"] <= self.theirs["high_ms"] and self.theirs["low_ms"] <= self.ours["high_ms"])

    @property
    def place(self) -> str:
        return place(self.ours)


def place(row: Row | Record) -> str:
    """Return the card and the date, as a link to the results if the row has their folder."""
    words = f"{row['machine'].partition(';')[0].removeprefix('NVIDIA ').split()[0]}, {row['date'][:10]}"
    return f"[{words}](../benchmarks/results/{row['folder']})" if "folder" in row else words


def page(ops: Sequence[str] = tuple(op.name for op in CATALOGUE)) -> str:
    rows = [row for card in CARDS for row in measured(card)]
    ratios = list(newest(rows))
    models = older_rows()
    folders = [
        path.parent for path in sorted(RESULTS.glob("*/train.json")) if not path.parent.name.endswith("-recorded")
    ]
    # A run may belong to two sweeps.
    slower = list(
        dict.fromkeys([*slower_models(models), *slower_training(read_training(folders)), *slower_ops(ratios)])
    )
    known = {ratio.op for ratio in ratios if ratio.ours["pass"] == "full"}
    head = ("op", "over plain PyTorch", "shape", "card, date", "over the fastest other", "shape", "card, date")
    parts = [
        "# Benchmarks",
        markdown.generated("python docs/generate/benchmarks.py"),
        "\n".join(f"* {line}" for line in headlines(models)),
        FIGURES,
        "\n".join(f"* [{name}](benchmarks/{name}.md): {text}" for name, text in PAGES.items())
        + "\n* [training results](training-results.md): whole training runs",
        "## Every op",
        OPS.format(dtype=DTYPE),
        markdown.table(head, [line(op, ratios) for op in ops if op in known], right=(1, 4)),
        f"No committed run has a figure of {', '.join(map(link, (op for op in ops if op not in known)))} on a GPU.",
        "## Where Liger is not faster",
        NOT_FASTER.format(percent=f"{1 - SLOWER:.0%}".replace("%", " %"), shortest=f"{1000 * SHORTEST_MS:.0f} µs"),
        markdown.table(("what", "Liger's speed", "beside", "card, date"), slower, right=(1,)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def newest(rows: Sequence[Row]) -> Iterator[Ratio]:
    """Yield each op, workload, implementation and pass of a card in the newest run that has it beside Liger."""
    latest: dict[tuple[str, ...], Ratio] = {}
    for (op, workload, *_), implementations in sorted(runs(rows).items(), key=lambda item: item[0][-1]):
        ours = implementations.get(OURS, {})
        for name, passes in implementations.items():
            for pass_, theirs in passes.items():
                if name != OURS and theirs["kind"] == ANYTHING_ELSE and pass_ in comparable(ours):
                    card = ours[pass_]["machine"].partition(";")[0]
                    latest[op, workload, name, pass_, card] = Ratio(op, workload, name, ours[pass_], theirs)
    return iter(latest.values())


def line(op: str, ratios: Sequence[Ratio]) -> list[str]:
    """Return the row of an op: forward and backward at its largest shape in the newest run, beside plain PyTorch and the fastest other."""
    full = [ratio for ratio in ratios if ratio.op == op and ratio.ours["pass"] == "full"]
    cells = [link(op)]
    for group in ([r for r in full if r.name == EAGER], [r for r in full if r.name != EAGER]):
        if not group:
            cells += ["–"] * 3
            continue
        day = max(ratio.ours["date"][:10] for ratio in group)
        largest = max(
            (r for r in group if r.ours["date"][:10] == day),
            key=lambda r: (r.ours["limit_ms"] or 0, r.ours["median_ms"]),
        )
        fastest = min((r for r in group if r.ours is largest.ours), key=lambda r: r.speed)
        name = "" if fastest.name == EAGER else f" ({'torch.compile' if fastest.name == 'compile' else fastest.name})"
        cells += [f"{fastest.speed:.2f} ×{name}", fastest.workload, fastest.place]
    return cells


def link(op: str) -> str:
    return f"[{op}](../packages/liger-core/src/liger_core/ops/{op}.py)"


def slower_ops(ratios: Sequence[Ratio]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each call that another implementation runs faster."""
    for ratio in sorted(ratios, key=lambda ratio: ratio.speed):
        if ratio.speed < SLOWER and ratio.ours["median_ms"] > SHORTEST_MS and not ratio.overlaps:
            name = "torch.compile" if ratio.name == "compile" else ratio.name
            yield f"{ratio.op} {ratio.workload}, {ratio.ours['pass']}", f"{ratio.speed:.2f} ×", name, ratio.place


def slower_models(models: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each model that another implementation runs faster than Liger of the same kind, compiled or not."""
    known = {(title(row), row["implementation"]): row for row in models if row["tokens_per_second"]}
    for (shape, name), row in known.items():
        for other in ("hf", COMPILED, PEER) if name.startswith("liger") and name != PEER else ():
            theirs = known.get((shape, other))
            ratio = row["tokens_per_second"] / theirs["tokens_per_second"] if theirs else 1.0
            if ratio < SLOWER:
                yield f"{shape}, {NAMES[name]}", f"{ratio:.2f} ×", NAMES[other], place(row)


def slower_training(rows: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each training run of a sweep that is slower with Liger, beyond the spread of its steps."""
    for sweep in sweeps(rows):
        for value in sweep.values:
            ours, plain = (sweep.row(sweep.strategy(name), value) for name in (FUSED, PLAIN))
            if (
                ours
                and plain
                and ours["tokens_per_second"]
                and plain["tokens_per_second"]
                and not overlapping(ours, plain)
            ):
                ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
                if ratio < SLOWER:
                    shape = f"{ours['model']} {ours['batch']} × {ours['sequence']}"
                    yield (
                        f"training {shape}, {sweep.setting.partition(';')[0]}",
                        f"{ratio:.2f} ×",
                        NAMES["hf"],
                        place(ours),
                    )


FIGURES = """
Forward and backward with bfloat16 weights and activation checkpointing, without an optimizer; [training results](training-results.md) include it. The
figures are in:
""".strip()
OPS = """
The time of another implementation ÷ Liger's: more than 1 is faster. The times are forward and backward in {dtype}, at the largest shape of the newest
run. *Plain PyTorch* is the computation of Transformers. The fastest other is the fastest other library or compiler of the same run. A `–` was not
measured, mostly because no other library has the op.
""".strip()
NOT_FASTER = """
The table lists all committed measurements in which Liger is slower by more than {percent}, beyond the spread of steps or calls. It omits calls shorter
than {shortest}. With few tokens per step, eager models are host-bound: [compile](how-to/compile.md) them. With offloaded weights, copies to and from
the host bound a small step. Workloads named `lean` keep logits in a budget of 300 MiB.
""".strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
