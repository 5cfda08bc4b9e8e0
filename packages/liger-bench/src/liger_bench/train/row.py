# SPDX-License-Identifier: Apache-2.0
"""The row that comes of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from liger_bench.train.setup import Setup

# The kernels are compiled in the first steps, and the optimizer makes its state.
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Row(Setup):
    """A setup, and what its training did.

    *tokens_per_second   of all ranks; median, 0.2 and 0.8 quantile of the steps after the first two
    peak_bytes           the most memory that a rank held at once, over the whole training; on the CPU in its second step
    peak_reserved_bytes  with what the allocator of a GPU keeps
    static_bytes         held between two steps: weights, gradients that stay, optimizer
    losses               of every step that was taken
    checkpointed_layers  how many layers were computed twice
    replaced             the ops that Liger put in, and how often
    notes                what was decided for the user, one sentence each
    out_of_memory        memory ran out, which is a result; failed: anything else went wrong; reason says what
    interrupted          ended by the user; the figures are those up to then
    """

    tokens_per_second: float | None
    low_tokens_per_second: float | None
    high_tokens_per_second: float | None
    step_seconds: float | None
    peak_bytes: int | None
    peak_reserved_bytes: int | None
    static_bytes: int | None
    losses: list[float] | None
    parameters: int | None
    trainable_parameters: int | None
    checkpointed_layers: int | None
    replaced: str | None
    notes: list[str] | None
    out_of_memory: bool
    failed: bool
    interrupted: bool
    reason: str
    machine: str
    versions: str
    commit: str
    date: str

    def columns(self) -> dict[str, Any]:
        return asdict(self)


COLUMNS = [field.name for field in fields(Row)]
SETUP = tuple(field.name for field in fields(Setup))
# Before a ratio of speeds that the steps of the two trainings do not tell apart.
WITHIN_SPREAD = "≈ "
# What tells a measurement from another one.
IDENTITY = (*SETUP, "machine", "versions", "commit")


def overlapping(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the speeds of two trainings are not told apart by their steps: their 0.2 to 0.8 quantiles overlap."""
    low, high = (f"{end}_tokens_per_second" for end in ("low", "high"))
    if any(each.get(end) is None for each in (one, other) for end in (low, high)):
        return False
    return bool(one[low] <= other[high] and other[low] <= one[high])


def where_of(row: Row) -> str:
    """The machine and the libraries that matter most; the row itself has the rest."""
    named = [words for words in row.versions.split(", ") if words.split(" ")[0] in ("torch", "triton", "transformers")]
    return f"{row.machine}; {', '.join([*named, f'commit {row.commit}'])}"


def row_of(setup: Setup, where: dict[str, str], results: dict[str, Any]) -> Row:
    """A row of what is known; the rest is empty."""
    empty: dict[str, Any] = dict.fromkeys(COLUMNS) | {"out_of_memory": False, "failed": False, "interrupted": False, "reason": ""}
    return Row(**(empty | asdict(setup) | where | results))
