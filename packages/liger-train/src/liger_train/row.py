# SPDX-License-Identifier: Apache-2.0
"""The result row of a training run."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from liger_bench.printing import ratio
from liger_bench.row import ResultRow, row_from
from liger_train.setup import Setup

# Steps that are not timed: kernels are compiled, and the optimizer state is allocated.
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Row(ResultRow, Setup):
    """A setup and the results of its run.

    *tokens_per_second   summed over ranks; median, 20th and 80th percentile of the steps after the first two
    peak_bytes           peak memory of a rank over the whole run; on the CPU, of the second step
    peak_reserved_bytes  the peak including what the GPU's allocator has reserved
    static_bytes         allocated between steps: weights, remaining gradients, optimizer state
    losses               one per step
    validation_loss      the last of validation_losses, computed after the steps validation_steps
    parameters_in_4_bits, parameters_in_16_bits  how many of the parameters, frozen and trained
    compile_seconds      seconds spent compiling and recording CUDA graphs, which step times exclude; None without
                         --compile
    checkpointed_layers  number of layers that were recomputed
    replaced             the ops that Liger inserted, with their counts
    notes                decisions made for the user, one sentence each
    interrupted          the user ended the run; the results cover the steps until then
    """

    tokens_per_second: float | None
    low_tokens_per_second: float | None
    high_tokens_per_second: float | None
    step_seconds: float | None
    peak_bytes: int | None
    peak_reserved_bytes: int | None
    static_bytes: int | None
    losses: list[float] | None
    validation_loss: float | None
    validation_losses: list[float] | None
    validation_steps: list[int] | None
    parameters: int | None
    trainable_parameters: int | None
    parameters_in_4_bits: int | None
    parameters_in_16_bits: int | None
    compile_seconds: float | None
    checkpointed_layers: int | None
    replaced: str | None
    notes: list[str] | None
    interrupted: bool = False


COLUMNS = Row.header()
SETUP = tuple(field.name for field in fields(Setup))
DEFAULTS = {field.name: field.default for field in fields(Setup)}
# These change neither the time nor the memory of a step.
FREE = ("steps", "learning_rate", "seed", "nvme_folder", "trust_remote_code", "random_weights")
# The options that reports show elsewhere, or not at all.
UNNAMED = ("model", "batch", "sequence", "liger", "data", "device", "memory_limit", *FREE)
# The start of the reason why a sweep skipped a run.
NOT_RUN = "not run"
# The mark of a speedup within the spread of the steps.
WITHIN_SPREAD = "≈ "
# The number of cells of figures_of.
FIGURES = 6


def setup_from(row: Mapping[str, Any]) -> Setup:
    """Return the setup of a row; what an older row lacks has its default."""
    return Setup(**{name: row[name] for name in SETUP if name in row})


def chosen_options(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that are not the defaults, except UNNAMED."""
    return {name: run[name] for name in SETUP if name not in UNNAMED and run[name] != DEFAULTS[name]}


def overlapping(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two runs differ in speed by less than their steps do: their 20th to 80th percentiles overlap."""
    low, high = (f"{end}_tokens_per_second" for end in ("low", "high"))
    if any(each.get(end) is None for each in (run, other) for end in (low, high)):
        return False
    return bool(run[low] <= other[high] and other[low] <= run[high])


def figures_of(run: Mapping[str, Any], baseline: Mapping[str, Any] | None, scale: int) -> list[str]:
    """Return the cells of a table: throughput and its spread, speedup, peak memory and its ratio, and last loss."""
    if run["tokens_per_second"] is None:
        status = NOT_RUN if run["reason"].startswith(NOT_RUN) else "failed" if run.get("failed") else "–"
        return ["out of memory" if run["out_of_memory"] else status, *["–"] * (FIGURES - 1)]
    low, high, losses = run.get("low_tokens_per_second"), run.get("high_tokens_per_second"), run.get("losses")
    base = {} if baseline is None or baseline["out_of_memory"] else baseline
    mark = WITHIN_SPREAD if base not in ({}, run) and overlapping(run, base) else ""
    speedup = ratio(run["tokens_per_second"], base.get("tokens_per_second"))
    return [
        f"{run['tokens_per_second']:,.0f}",
        "–" if low is None or high is None else f"{low:,.0f} – {high:,.0f}",
        speedup if speedup == "–" else mark + speedup,
        "–" if run["peak_bytes"] is None else f"{run['peak_bytes'] / scale:.2f}",
        ratio(run["peak_bytes"], base.get("peak_bytes")),
        f"{losses[-1]:.4f}" if losses else "–",
    ]


def where_of(row: Row) -> str:
    """Return the machine, the main versions and the commit; the row has all versions."""
    main = [words for words in row.versions.split(", ") if words.split(" ")[0] in ("torch", "triton", "transformers")]
    return f"{row.machine}; {', '.join([*main, f'commit {row.commit}'])}"


def row_of(setup: Setup, where: dict[str, str], results: dict[str, Any]) -> Row:
    """Return a row with these results; all other columns are empty."""
    return row_from(Row, setup, where, results)
