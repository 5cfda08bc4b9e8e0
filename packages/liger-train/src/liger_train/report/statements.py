# SPDX-License-Identifier: Apache-2.0
"""Statements derived from a sweep: the first size that runs out of memory, growth, speedups, shares."""

from collections.abc import Iterator

from liger_bench.records import Record
from liger_train.report.sweeps import FUSED, PARTLY, PLAIN, Strategy, Sweep
from liger_train.row import WITHIN_SPREAD, overlapping

SPEED, PEAK = "tokens_per_second", "peak_bytes"
# (label, figure) of a line in the table.
Statement = tuple[str, str]


def statements(sweep: Sweep) -> Iterator[Statement]:
    """Yield every statement that the rows support."""
    plain, partly, fused = (sweep.strategy(name) for name in (PLAIN, PARTLY, FUSED))
    present = [strategy for strategy in (plain, partly, fused) if strategy is not None]
    for strategy in present:
        yield f"{strategy.label}: first OOM", _first_failure(sweep, strategy)
    for strategy in present:
        yield from _growth(sweep, strategy)
    if plain and fused:
        yield from _ratios(sweep, plain, fused)
    yield from _checkpoints(sweep)
    if plain and partly and fused:
        yield from _shares(sweep, [plain, partly, fused])


def _ratios(sweep: Sweep, plain: Strategy, fused: Strategy) -> Iterator[Statement]:
    if both := _largest(sweep, [plain, fused], PEAK):
        value, (base, row) = both
        yield f"peak memory, Liger ÷ baseline, at {value}", f"{row[PEAK] / base[PEAK]:.2f}"
    if both := _largest(sweep, [plain, fused], SPEED):
        value, (base, row) = both
        yield f"tokens/s, Liger ÷ baseline, at {value}", _speed_ratio(row, base)
    if (highest := _highest(sweep, plain)) and (best := _highest(sweep, fused)):
        words = f"{_speed_ratio(best, highest)} (at {best[sweep.axis]} ÷ at {highest[sweep.axis]})"
        yield "highest tokens/s, Liger ÷ baseline", words


def _shares(sweep: Sweep, strategies: list[Strategy]) -> Iterator[Statement]:
    for column, words in ((PEAK, "memory saved"), (SPEED, "throughput gained")):
        if all_three := _largest(sweep, strategies, column):
            value, rows = all_three
            none, some, every = (float(row[column]) for row in rows)
            # A share of a tiny difference means nothing, nor does one within the spread of the steps.
            if abs(every / none - 1) > 0.02 and (column == PEAK or not overlapping(rows[0], rows[2])):
                share = (every - some) / (every - none)
                yield f"share of the {words} at {value} due to the fused loss", f"{share:.1%}"


def _checkpoints(sweep: Sweep) -> Iterator[Statement]:
    """Yield the speedup of each value of --checkpoint over full."""
    for full in (strategy for strategy in sweep.strategies if strategy.checkpoint == "full"):
        alike = (s for s in sweep.strategies if (s.liger, s.compile) == (full.liger, full.compile))
        for other in (s for s in alike if s.checkpoint != "full"):
            base = {row[sweep.axis]: row[SPEED] for row in _rows(sweep, full, SPEED)}
            rows = [row for row in _rows(sweep, other, SPEED) if row[sweep.axis] in base]
            if ratios := [row[SPEED] / base[row[sweep.axis]] for row in rows]:
                figure = f"{min(ratios):.2f} to {max(ratios):.2f} at {len(ratios)} sizes"
                yield f"tokens/s, {other.label} ÷ checkpoint full", figure


def _first_failure(sweep: Sweep, strategy: Strategy) -> str:
    rows = [(value, row) for value in sweep.values if (row := sweep.row(strategy, value)) is not None]
    failed = [value for value, row in rows if row["out_of_memory"]]
    if failed:
        return f"at {failed[0]}"
    fits = [value for value, row in rows if _has(row, SPEED)]
    return f"no OOM up to {fits[-1]}" if fits else "–"


def _growth(sweep: Sweep, strategy: Strategy) -> Iterator[Statement]:
    """Yield the growth of peak memory from the smallest to the largest run, per thousand tokens of a step.

    For ranks, yield the growth of speed instead: each rank has the same batch (weak scaling).
    """
    rows = _rows(sweep, strategy, SPEED if sweep.axis == "ranks" else PEAK)
    if len(rows) < 2:
        return
    first, last = rows[0], rows[-1]
    if sweep.axis == "ranks":
        figure = f"{last[SPEED] / first[SPEED]:.2f} × from {first['ranks']} to {last['ranks']}"
        yield f"{strategy.label}: scaling of tokens/s", figure
    else:
        tokens = last["batch"] * last["sequence"] - first["batch"] * first["sequence"]
        figure = f"{(last[PEAK] - first[PEAK]) / tokens * 1000 / 2**20:,.1f} MiB per 1000 tokens"
        yield f"{strategy.label}: growth of peak memory", figure


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
    return row[SPEED] is not None and row[column] is not None and not row["out_of_memory"]
