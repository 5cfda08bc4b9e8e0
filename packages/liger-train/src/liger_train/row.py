# SPDX-License-Identifier: Apache-2.0
"""The row of results of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from liger_bench.row import ResultRow, row_from
from liger_train.setup import Setup

# In the first steps kernels are compiled and the optimizer state is allocated.
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Row(ResultRow, Setup):
    """A setup and the results of its run.

    *tokens_per_second   summed over ranks; median, 20th and 80th percentile of the steps after the first two
    peak_bytes           peak memory of a rank over the whole run; on the CPU, of the second step
    peak_reserved_bytes  the peak including what the GPU's allocator has reserved
    static_bytes         held between steps: weights, remaining gradients, optimizer state
    losses               of every step
    validation_loss      the last of validation_losses, which were computed after the steps validation_steps
    compile_seconds      seconds of compiling and of recording CUDA graphs, not counted as part of the steps; None
                         without --compile
    checkpointed_layers  the number of layers that were recomputed
    replaced             the ops that Liger inserted, and how often
    notes                decisions made for the user, one sentence each
    interrupted          ended by the user; the figures cover the steps up to then
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
# The options that have a place of their own beside the name of a run.
UNNAMED = ("model", "batch", "sequence", "liger", "data", "device", "memory_limit", *FREE)
# What `--checkpoint auto` notes: the number of layers that recompute everything, everything but their matmuls, and
# nothing.
AUTO_NOTE = "layers with full recompute: {}, with selective recompute: {}, without recompute: {}"
# A reason begins with this if a sweep skipped the run.
NOT_RUN = "not run"
# Marks a speedup within the spread of the steps.
WITHIN_SPREAD = "≈ "


def chosen_options(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other options of a run that are not the defaults."""
    return {name: run[name] for name in SETUP if name not in UNNAMED and run[name] != DEFAULTS[name]}


def overlapping(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the difference in speed is within the spread of the steps: the 20th to 80th percentiles of the two runs
    overlap."""
    low, high = (f"{end}_tokens_per_second" for end in ("low", "high"))
    if any(each.get(end) is None for each in (run, other) for end in (low, high)):
        return False
    return bool(run[low] <= other[high] and other[low] <= run[high])


def where_of(row: Row) -> str:
    """The machine and the most important versions; the row has all of them."""
    named = [words for words in row.versions.split(", ") if words.split(" ")[0] in ("torch", "triton", "transformers")]
    return f"{row.machine}; {', '.join([*named, f'commit {row.commit}'])}"


def row_of(setup: Setup, where: dict[str, str], results: dict[str, Any]) -> Row:
    """A row of these results; all other columns are empty."""
    return row_from(Row, setup, where, results)
