# SPDX-License-Identifier: Apache-2.0
"""Derive statements from the rows of a sweep: the first size that runs out of memory, growth, speedups, shares."""

from __future__ import annotations

from dataclasses import dataclass

from liger_bench.records import Record
from liger_train.report.sweeps import FUSED, PARTLY, PLAIN, Strategy, Sweep
from liger_train.row import WITHIN_SPREAD, overlapping

SPEED, PEAK = "tokens_per_second", "peak_bytes"


@dataclass(frozen=True)
class Statement:
    """One line of the table: what it is about, and the figure."""

    words: str
    figure: str


def statements(sweep: Sweep) -> list[Statement]:
    """Return every statement that the rows can support."""
    plain, partly, fused = (sweep.strategy(name) for name in (PLAIN, PARTLY, FUSED))
    lines = [
        Statement(f"{strategy.label}: first OOM", _first_failure(sweep, strategy))
        for strategy in (plain, partly, fused)
        if strategy is not None
    ]
    lines += [
        Statement(f"{strategy.label}: growth of peak memory", growth)
        for strategy in (plain, partly, fused)
        if strategy is not None and (growth := _growth(sweep, strategy))
    ]
    lines += [
        Statement(f"{strategy.label}: scaling of tokens/s", growth)
        for strategy in (plain, partly, fused)
        if strategy is not None and (growth := _speed_up(sweep, strategy))
    ]
    if plain and fused and (both := _largest(sweep, [plain, fused], PEAK)):
        value, (base, row) = both
        lines.append(Statement(f"peak memory, Liger ÷ baseline, at {value}", f"{row[PEAK] / base[PEAK]:.2f}"))
    if plain and fused and (both := _largest(sweep, [plain, fused], SPEED)):
        value, (base, row) = both
        lines.append(Statement(f"tokens/s, Liger ÷ baseline, at {value}", _speed_ratio(row, base)))
    if plain and fused and (highest := _highest(sweep, plain)) and (ours := _highest(sweep, fused)):
        words = f"{_speed_ratio(ours, highest)} (at {ours[sweep.axis]} ÷ at {highest[sweep.axis]})"
        lines.append(Statement("highest tokens/s, Liger ÷ baseline", words))
    lines += _checkpoints(sweep)
    for column, words in ((PEAK, "memory saved"), (SPEED, "throughput gained")):
        if plain and partly and fused and (all_three := _largest(sweep, [plain, partly, fused], column)):
            value, rows = all_three
            none, some, every = (float(row[column]) for row in rows)
            # A share of almost nothing means nothing, and neither does one of a difference within the spread of the
            # steps.
            if abs(every / none - 1) > 0.02 and (column == PEAK or not overlapping(rows[0], rows[2])):
                lines.append(
                    Statement(
                        f"share of the {words} at {value} due to the fused loss",
                        f"{(every - some) / (every - none):.1%}",
                    )
                )
    return lines


def _checkpoints(sweep: Sweep) -> list[Statement]:
    """Return the speedup of each other value of --checkpoint over recomputing every layer."""
    lines: list[Statement] = []
    for full in (strategy for strategy in sweep.strategies if strategy.checkpoint == "full"):
        alike = (s for s in sweep.strategies if (s.liger, s.compile) == (full.liger, full.compile))
        for other in (s for s in alike if s.checkpoint != "full"):
            pairs = [(sweep.row(other, value), sweep.row(full, value)) for value in sweep.values]
            ratios = [
                row[SPEED] / base[SPEED]
                for row, base in pairs
                if row and base and _has(row, SPEED) and _has(base, SPEED)
            ]
            if ratios:
                words = f"tokens/s, {other.label} ÷ checkpoint full"
                lines.append(Statement(words, f"{min(ratios):.2f} to {max(ratios):.2f} at {len(ratios)} sizes"))
    return lines


def _first_failure(sweep: Sweep, strategy: Strategy) -> str:
    rows = [(value, row) for value in sweep.values if (row := sweep.row(strategy, value)) is not None]
    failed = [value for value, row in rows if row["out_of_memory"]]
    if failed:
        return f"at {failed[0]}"
    fits = [value for value, row in rows if _has(row, SPEED)]
    return f"no OOM up to {fits[-1]}" if fits else "–"


def _growth(sweep: Sweep, strategy: Strategy) -> str:
    """Return the growth of peak memory from the smallest to the largest run, per thousand tokens of a step."""
    rows = _rows(sweep, strategy, PEAK)
    if len(rows) < 2 or sweep.axis == "ranks":
        return ""
    tokens = [row["batch"] * row["sequence"] for row in (rows[0], rows[-1])]
    return f"{(rows[-1][PEAK] - rows[0][PEAK]) / (tokens[1] - tokens[0]) * 1000 / 2**20:,.1f} MiB per 1000 tokens"


def _speed_up(sweep: Sweep, strategy: Strategy) -> str:
    """Return the speedup from the fewest to the most ranks, where each rank has the same batch (weak scaling)."""
    rows = _rows(sweep, strategy, SPEED)
    if len(rows) < 2 or sweep.axis != "ranks":
        return ""
    return f"{rows[-1][SPEED] / rows[0][SPEED]:.2f} × from {rows[0]['ranks']} to {rows[-1]['ranks']}"


def _largest(sweep: Sweep, strategies: list[Strategy], column: str) -> tuple[int, list[Record]] | None:
    """Return the largest size at which all strategies have a value in this column, with their rows."""
    for value in reversed(sweep.values):
        rows = [row for strategy in strategies if (row := sweep.row(strategy, value)) is not None and _has(row, column)]
        if len(rows) == len(strategies):
            return value, rows
    return None


def _highest(sweep: Sweep, strategy: Strategy) -> Record | None:
    return max(_rows(sweep, strategy, SPEED), key=lambda row: float(row[SPEED]), default=None)


def _speed_ratio(row: Record, base: Record) -> str:
    return f"{WITHIN_SPREAD if overlapping(row, base) else ''}{row[SPEED] / base[SPEED]:.2f}"


def _rows(sweep: Sweep, strategy: Strategy, column: str) -> list[Record]:
    return [row for value in sweep.values if (row := sweep.row(strategy, value)) is not None and _has(row, column)]


def _has(row: Record, column: str) -> bool:
    """Whether a run has a value in this column."""
    return row[SPEED] is not None and row[column] is not None and not row["out_of_memory"]
