# SPDX-License-Identifier: Apache-2.0
"""What the seed says about its sweeps, beside what the rows say."""

from __future__ import annotations

from dataclasses import dataclass

from liger_bench.charts.sweeps import FUSED, PARTLY, PLAIN, Strategy, Sweep
from liger_bench.report.records import Record

GIB = 1 << 30
# The seed's card, a GeForce RTX 4090, and its two sweeps: axis, the other size → values of its statements, by their key.
SEED_MODEL, SEED_MEMORY = "llama-3.2-1b", 24 * GIB
SEED = {
    ("batch", 1024): {"plain": "at 16", "liger": "never up to 112", "memory": "nearly 100 %", "speed": "nearly 100 %"},
    ("sequence", 4): {"plain": "at 2048", "liger": "never up to 24576", "memory": "nearly 100 %", "speed": "nearly 100 %"},
}


@dataclass(frozen=True)
class Statement:
    """One line of the table; `seed` is empty where the seed says nothing about it, or measured something else."""

    words: str
    seed: str
    here: str


def statements(sweep: Sweep) -> list[Statement]:
    """Every one that the rows can answer."""
    plain, partly, fused = (sweep.strategy(name) for name in (PLAIN, PARTLY, FUSED))
    said = _said(sweep)
    found = [
        Statement(f"{strategy.label} runs out of memory", said.get(key, ""), _first_failure(sweep, strategy))
        for key, strategy in (("plain", plain), ("partly", partly), ("liger", fused))
        if strategy is not None
    ]
    found += [
        Statement(f"{strategy.label}: peak memory grows by", "", growth)
        for strategy in (plain, partly, fused)
        if strategy is not None and (growth := _growth(sweep, strategy))
    ]
    found += [
        Statement(f"{strategy.label}: tokens/s grow", "", growth)
        for strategy in (plain, partly, fused)
        if strategy is not None and (growth := _speed_up(sweep, strategy))
    ]
    if plain and fused and (both := _largest(sweep, [plain, fused])):
        value, (one, other) = both
        found.append(Statement(f"peak memory of Liger ÷ plain at {value}", "", f"{other['peak_bytes'] / one['peak_bytes']:.2f}"))
        found.append(Statement(f"tokens/s of Liger ÷ plain at {value}", "", f"{other['tokens_per_second'] / one['tokens_per_second']:.2f}"))
    if plain and fused and (highest := _highest(sweep, plain)) and (ours := _highest(sweep, fused)):
        words = f"{ours[1] / highest[1]:.2f} (at {ours[0]} ÷ at {highest[0]})"
        found.append(Statement("highest tokens/s of Liger ÷ highest of plain", "", words))
    found += _checkpoints(sweep)
    if plain and partly and fused and (all_three := _largest(sweep, [plain, partly, fused])):
        value, rows = all_three
        for column, words, key in (("peak_bytes", "memory saved", "memory"), ("tokens_per_second", "throughput gained", "speed")):
            none, some, every = (float(row[column]) for row in rows)
            # A share of next to nothing says nothing, nor one of what steps differ by among themselves.
            if abs(every / none - 1) > 0.02 and (column == "peak_bytes" or _apart(rows[0], rows[2])):
                found.append(
                    Statement(
                        f"share of the {words} at {value} that is the fused loss",
                        said.get(key, ""),
                        f"{(every - some) / (every - none):.1%}",
                    )
                )
    return found


def _checkpoints(sweep: Sweep) -> list[Statement]:
    """What other ways to checkpoint gain over computing every layer again."""
    found: list[Statement] = []
    for full in (strategy for strategy in sweep.strategies if strategy.checkpoint == "full"):
        for other in (s for s in sweep.strategies if s.liger == full.liger and s.checkpoint != "full"):
            pairs = [(sweep.row(other, value), sweep.row(full, value)) for value in sweep.values]
            ratios = [
                one["tokens_per_second"] / base["tokens_per_second"]
                for one, base in pairs
                if one and base and _measured(one) and _measured(base)
            ]
            if ratios:
                words = f"tokens/s of {other.label} ÷ checkpoint full"
                found.append(Statement(words, "", f"{min(ratios):.2f} to {max(ratios):.2f} at {len(ratios)} sizes"))
    return found


def _said(sweep: Sweep) -> dict[str, str]:
    """The seed's own values, if this is its model on a card like its own."""
    first = sweep.first
    if first["model"] != SEED_MODEL or first["memory_limit"] != SEED_MEMORY:
        return {}
    other = first["sequence" if sweep.axis == "batch" else "batch"]
    return SEED.get((sweep.axis, other), {})


def _first_failure(sweep: Sweep, strategy: Strategy) -> str:
    rows = [(value, row) for value in sweep.values if (row := sweep.row(strategy, value)) is not None]
    failed = [value for value, row in rows if row["out_of_memory"]]
    if failed:
        return f"at {failed[0]}"
    fits = [value for value, row in rows if _measured(row)]
    return f"never up to {fits[-1]}" if fits else "–"


def _growth(sweep: Sweep, strategy: Strategy) -> str:
    """From its smallest to its largest training, per thousand tokens of a step."""
    rows = [row for value in sweep.values if (row := sweep.row(strategy, value)) is not None and _measured(row)]
    if len(rows) < 2 or sweep.axis == "ranks":
        return ""
    tokens = [row["batch"] * row["sequence"] for row in (rows[0], rows[-1])]
    return f"{(rows[-1]['peak_bytes'] - rows[0]['peak_bytes']) / (tokens[1] - tokens[0]) * 1000 / 2**20:,.1f} MiB per 1000 tokens"


def _speed_up(sweep: Sweep, strategy: Strategy) -> str:
    """From fewest to most ranks, of which each has as much to do."""
    rows = [row for value in sweep.values if (row := sweep.row(strategy, value)) is not None and _measured(row)]
    if len(rows) < 2 or sweep.axis != "ranks":
        return ""
    return f"{rows[-1]['tokens_per_second'] / rows[0]['tokens_per_second']:.2f} × from {rows[0]['ranks']} to {rows[-1]['ranks']}"


def _largest(sweep: Sweep, strategies: list[Strategy]) -> tuple[int, list[Record]] | None:
    """The largest value at which all of them have figures, and these rows."""
    for value in reversed(sweep.values):
        rows = [row for strategy in strategies if (row := sweep.row(strategy, value)) is not None and _measured(row)]
        if len(rows) == len(strategies):
            return value, rows
    return None


def _highest(sweep: Sweep, strategy: Strategy) -> tuple[int, float] | None:
    rows = [row for row in sweep.rows if strategy.has(row) and _measured(row)]
    best = max(rows, key=lambda row: float(row["tokens_per_second"]), default=None)
    return None if best is None else (best[sweep.axis], best["tokens_per_second"])


def _apart(one: Record, other: Record) -> bool:
    """Whether four of five steps of one are faster than four of five of the other."""
    slow, fast = sorted((one, other), key=lambda row: float(row["tokens_per_second"]))
    return bool(slow["high_tokens_per_second"] < fast["low_tokens_per_second"])


def _measured(row: Record) -> bool:
    return row["tokens_per_second"] is not None and row["peak_bytes"] is not None and not row["out_of_memory"]
