# SPDX-License-Identifier: Apache-2.0
"""Search the largest batch, the longest sequence and the fewest ranks that fit, and what fits at other values."""

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from liger_core.errors import OptionError
from liger_train.configs import config_of
from liger_train.plan.advice import Predict
from liger_train.plan.peaks import peaks
from liger_train.plan.step import Prediction
from liger_train.setup import AUTO_OPTIONS, LIMITS, Setup

Peak = Callable[[Setup], float]

# What a size beyond the limit is taken for, as a share of it.
UNMEASURED = 1.05

LARGEST_BATCH = 1 << 20
MOST_RANKS = 1 << 12
# The lengths of sequences are multiples of this.
TOKENS = 64
# Option → the values with which plans of a few layers give the peak for every batch, sequence and number of ranks.
LINEAR: dict[str, tuple[Any, ...]] = {
    "device": ("cuda",),
    "liger": ("none", "all-but-loss", "all"),
    "precision": ("bf16", "bf16-pure"),
    "checkpoint": ("none", "full", "auto"),
    "compile": ("none",),
    "optimizer": ("adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit"),
    "shard": ("none", "fsdp2"),
    "offload": ("none",),
    "mlp": ("whole",),
    "packing": (False,),
    "set": ("",),
    **dict.fromkeys(("accumulation", "tp", "cp"), (1,)),
}


@dataclass(frozen=True)
class Answer:
    """The largest batch, the longest sequence, or the fewest ranks that fit.

    field     the field of Setup
    value     its value; 0 if none fits
    smallest  if none fits, the prediction with the value that needs the least memory
    capped    whether no larger value is supported
    """

    field: str
    value: int
    smallest: Prediction | None = None
    capped: bool = False


def fast_peak(setup: Setup) -> Peak | None:
    """Return a function that gives peaks in no time; None if only a plan of the whole model does."""
    if any(getattr(setup, name) not in values for name, values in LINEAR.items()):
        return None
    if setup.shard == "none" and setup.ranks > 1:
        return None
    with suppress(OptionError):
        lines = peaks(setup, [setup.optimizer])
        return lambda each: sum(lines.held(each.batch, each.sequence, each.ranks, each.optimizer).values())
    return None


def answered(
    setup: Setup, limit: int, fields: Collection[str], predict: Predict, peak: Peak | None = None
) -> tuple[Setup, list[Answer]]:
    """Return the setup with values of these fields that fit, and the answers; a field keeps its value if none fits.

    The fewest ranks come first, then the longest sequence on them, then the largest batch. Each search starts at what
    `peak` predicts.
    """
    answers = []
    for field in (field for field in AUTO_OPTIONS if field in fields):
        answers.append(_answer(setup, limit, field, predict, peak))
        change: dict[str, Any] = {field: answers[-1].value or getattr(setup, field)}
        setup = replace(setup, **change)
    return setup, answers


def what_fits(setup: Setup, limit: int, auto: Collection[str], peak: Peak) -> list[dict[str, int]]:
    """Return the largest batch at sequences around that of the setup, and at numbers of ranks if they are searched.

    If only the sequence is searched, return the longest one at batches around that of the setup. Return nothing if
    nothing fits.
    """
    field, other = ("sequence", "batch") if "sequence" in auto and "batch" not in auto else ("batch", "sequence")
    unit, most = _units(setup, field)
    rows = []
    for ranks in _around(setup, "ranks") if "ranks" in auto else [setup.ranks]:
        for value in _around(setup, other):
            change: dict[str, Any] = {"ranks": ranks, other: value}

            def size(units: int, change: dict[str, Any] = change) -> float:
                return peak(replace(setup, **change | {field: units * unit}))

            rows.append(change | {field: unit * largest(size, limit, most)})
    return rows if any(row[field] for row in rows) else []


def largest(size: Callable[[int], float], limit: float, most: int, first: int = 1) -> int:
    """Return the largest number, up to `most`, with a size within the limit; 0 if there is none.

    Sizes never fall. The search takes few steps if they are piecewise linear. A size that cannot be measured, since it
    is beyond the limit, is infinite.
    """
    low, high, number, step = 0, most + 1, min(first, most), 1
    sizes: dict[int, float] = {}
    # Between low and high, after each step.
    widths: list[int] = []
    while high - low > 1:
        sizes[number] = size(number)
        if sizes[number] == math.inf:
            # The search needs a number, to continue along a line.
            sizes[number] = UNMEASURED * limit
        if sizes[number] <= limit:
            # On along the line through the last two that fit, the size passes the limit here, or before.
            slope = (sizes[number] - sizes[low]) / (number - low) if low else 0
            guess = number + (int((limit - sizes[number]) / slope) + 1 if slope else step)
            low = number
        else:
            # Below the line between the two, a number still fits here.
            high = number
            guess = low + int((limit - sizes[low]) * (high - low) / (sizes[high] - sizes[low])) if low else high - step
        step *= 2
        widths.append(high - low)
        if high in sizes and len(widths) > 2 and widths[-1] > widths[-3] // 2:
            # The lines meet far from where the size bends.
            guess = (low + high) // 2
        number = min(max(guess, low + 1), high - 1)
    return low


def _answer(setup: Setup, limit: int, field: str, predict: Predict, peak: Peak | None) -> Answer:
    unit, most = _units(setup, field)

    def at(units: int) -> Setup:
        change: dict[str, Any] = {field: units * unit}
        return replace(setup, **change)

    def search(size: Peak, first: int) -> int:
        if field == "ranks":
            # Memory falls with the number of ranks: the largest number that does not fit.
            return largest(lambda units: -size(at(units)), -limit - 1, most, first)
        return largest(lambda units: size(at(units)), limit, most, first)

    units = search(lambda each: predict(each).peak_bytes, 1 if peak is None else max(1, search(peak, 1)))
    if field == "ranks":
        units = (units + 1) % (most + 1)
    smallest = None if units else predict(at(most if field == "ranks" else 1))
    return Answer(field, units * unit, smallest, capped=units == most)


def _units(setup: Setup, field: str) -> tuple[int, int]:
    """Return what values of a field are multiples of, and the largest number of these units."""
    if field == "batch":
        return 1, LARGEST_BATCH
    if field == "sequence":
        unit = TOKENS * setup.cp
        longest = getattr(config_of(setup).get_text_config(), "max_position_embeddings", None)
        return unit, max(1, (longest or LIMITS["sequence"][1]) // unit)
    # Tensor parallelism with sharding needs two groups of ranks. Without sharding, more ranks save nothing.
    unit = setup.tp * setup.cp * (2 if setup.tp > 1 and setup.shard != "none" else 1)
    return unit, 1 if setup.shard == "none" else MOST_RANKS // unit


def _around(setup: Setup, field: str) -> list[int]:
    """Return the value of a field, and about a quarter, half, twice and four times of it."""
    unit, most = _units(setup, field)
    units = getattr(setup, field) / unit
    return sorted({getattr(setup, field), *(unit * min(most, max(1, round(units * 2**k))) for k in (-2, -1, 1, 2))})
