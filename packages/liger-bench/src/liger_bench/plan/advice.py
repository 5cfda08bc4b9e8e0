# SPDX-License-Identifier: Apache-2.0
"""What each technique would save, the first setup down the seed report's checklist that fits, and the largest batch that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from liger_bench.plan.step import Prediction, predict
from liger_bench.train.combinations import ZERO
from liger_bench.train.setup import Setup
from liger_bench.train.technique import Technique
from liger_bench.train.techniques import LIST, NUMBER, TECHNIQUES
from liger_core.errors import OptionError

Predict = Callable[[Setup], Prediction]
# What depends on the memory that there is, on the user, or on the machine, and not on the plan.
NO_ALTERNATIVE = ("auto", NUMBER, LIST, "nvme")


@dataclass(frozen=True)
class Alternative:
    """A technique in the place of what a setup has; problem says why the two do not go together."""

    technique: Technique
    prediction: Prediction | None
    problem: str = ""

    def saves(self, before: Prediction) -> int:
        return 0 if self.prediction is None else before.peak_bytes - self.prediction.peak_bytes


@dataclass(frozen=True)
class Item:
    """One step down the checklist: what it changes, and the prediction with it; or why it is passed over."""

    title: str
    changes: dict[str, Any]
    prediction: Prediction | None
    problem: str = ""


# The checklist of the report, in its order; the offloading of DeepSpeed in two steps, the optimizer before the weights.
CHECKLIST: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Liger", {"liger": "all"}),
    ("ZeRO stage 2", {"shard": "zero2"}),
    ("gradient checkpointing", {"checkpoint": "full"}),
    ("mixed precision", {"precision": "bf16"}),
    ("ZeRO stage 3", {"shard": "zero3"}),
    ("offload the optimizer", {"offload": "optimizer"}),
    ("offload weights, too", {"shard": "zero3", "offload": "parameters"}),
    ("GaLore", {"optimizer": "galore"}),
    ("8-bit optimizer", {"optimizer": "adamw-8bit"}),
    ("offload to NVMe", {"shard": "zero3", "offload": "nvme"}),
)
BARE: dict[str, Any] = {
    "liger": "none",
    "checkpoint": "none",
    "precision": "fp32",
    "optimizer": "adamw",
    "shard": "none",
    "offload": "none",
}
MANY_RANKS = ("ZeRO stage 2", "ZeRO stage 3")


def alternatives(setup: Setup, foresee: Predict = predict) -> Iterator[Alternative]:
    """Every technique that the setup does not use and its device allows, alone in the place of what it uses."""
    for option, values in TECHNIQUES.items():
        for value, technique in values.items():
            if value in NO_ALTERNATIVE or value == getattr(setup, option) or (option == "shard" and setup.ranks == 1 and value != "none"):
                continue
            if setup.device not in technique.devices or _stays_where_it_is(setup, option, value):
                continue
            change: dict[str, Any] = {option: value}
            changed = replace(setup, **change)
            yield _alternative(technique, changed, foresee)


def _alternative(technique: Technique, changed: Setup, foresee: Predict) -> Alternative:
    problem = problem_of(changed)
    if problem:
        return Alternative(technique, None, problem)
    try:
        return Alternative(technique, foresee(changed))
    except OptionError as error:
        # Only the model shows that a library is missing.
        return Alternative(technique, None, str(error).removeprefix("plan: "))


def checklist(setup: Setup, limit: int, foresee: Predict = predict) -> Iterator[Item]:
    """The setup without techniques, then one more at a time, until it fits; what cannot be added is passed over."""
    now = replace(setup, **(BARE if setup.adapter == "none" else BARE | {"precision": setup.precision}))
    prediction = foresee(now)
    yield Item("no technique", {}, prediction)
    for title, changes in CHECKLIST:
        if prediction.fits(limit):
            return
        if any(_stays_where_it_is(setup, option, value) for option, value in changes.items()):
            continue
        if title in MANY_RANKS and setup.ranks == 1:
            if setup.device != "cpu":
                yield Item(title, changes, None, "there is only one GPU")
            continue
        # DeepSpeed's stages also offload for one GPU.
        more = {"shard": "zero2"} if changes == {"offload": "optimizer"} and now.shard not in ZERO else {}
        changed = replace(now, **(changes | more))
        problem = problem_of(changed)
        if problem:
            yield Item(title, changes, None, f"after the items before it, {problem}")
            continue
        now, prediction = changed, foresee(changed)
        yield Item(title, changes | more, prediction)


def _stays_where_it_is(setup: Setup, option: str, value: str) -> bool:
    """What would go to the host is there already, in a training on the CPU."""
    return setup.device == "cpu" and (option == "offload" or value.startswith("paged"))


def largest_batch(setup: Setup, limit: int, foresee: Predict = predict) -> int:
    """The most sequences of a micro-batch that fit; 0 if one is too much already.

    Between two batches memory grows along a line, or along one that is steeper from some batch on.
    """
    low, high = 0, 1
    sizes: dict[int, int] = {0: 0}
    while True:
        sizes[high] = foresee(replace(setup, batch=high)).peak_bytes
        if sizes[high] > limit:
            break
        low, high = high, 2 * high
        if low >= LARGEST_BATCH:
            return low
    while high - low > 1:
        slope = (sizes[high] - sizes[low]) / (high - low)
        guess = low + int((limit - sizes[low]) / slope) if low else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        # Where the line is straight, the next batch shows at once that this one is the last.
        for batch in (middle, middle + 1):
            if low < batch < high:
                sizes[batch] = foresee(replace(setup, batch=batch)).peak_bytes
                low, high = (batch, high) if sizes[batch] <= limit else (low, batch)
    return low


LARGEST_BATCH = 1 << 20


def problem_of(setup: Setup) -> str:
    """Why a combination cannot be trained, or nothing; what the machine lacks is no matter here."""
    for option, values in TECHNIQUES.items():
        value = str(getattr(setup, option))
        technique = values.get(value)
        if technique is None or value == "nvme":
            continue
        if setup.device not in technique.devices:
            return f"needs --device {' or '.join(technique.devices)}: {technique.reason}"
        found = technique.problem(setup)
        if found:
            return f"--{option} {value} {found}"
    return ""
