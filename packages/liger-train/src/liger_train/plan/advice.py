# SPDX-License-Identifier: Apache-2.0
"""Predict the savings of each technique, and find the first setup of the checklist and the largest batch that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from liger_core.errors import LigerError
from liger_train.combinations import ZERO
from liger_train.implementations import PEER
from liger_train.plan.step import Prediction, predict
from liger_train.setup import Setup
from liger_train.technique import Technique
from liger_train.techniques import LIST, NUMBER, TECHNIQUES, check_techniques

Predict = Callable[[Setup], Prediction]
# These depend on free memory, on the user, on the machine or on another library.
NO_ALTERNATIVE = ("auto", NUMBER, LIST, "nvme", PEER)
MESH = ("tp", "cp")
# What has no prediction of its own.
UNPREDICTED = ("compile",)


@dataclass(frozen=True)
class Alternative:
    """A technique instead of the one that a setup uses; `problem` is why it cannot be combined with the rest."""

    technique: Technique
    prediction: Prediction | None
    problem: str = ""

    def saves(self, before: Prediction) -> int:
        return 0 if self.prediction is None else before.peak_bytes - self.prediction.peak_bytes


@dataclass(frozen=True)
class Item:
    """One technique of the checklist: what it changes, and the prediction with it, or why it is skipped."""

    title: str
    changes: dict[str, Any]
    prediction: Prediction | None
    problem: str = ""


# Cheapest first: the first two make a step faster, the last ones wait for the host or a disk. Offloading takes AdamW,
# which then runs on the CPU.
CHECKLIST: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Liger", {"liger": "all"}),
    ("mixed precision", {"precision": "bf16"}),
    ("ZeRO stage 2", {"shard": "zero2"}),
    ("8-bit optimizer", {"optimizer": "adamw-8bit"}),
    ("gradient checkpointing", {"checkpoint": "full"}),
    ("tiled MLPs", {"mlp": "tiled"}),
    ("offload checkpoints", {"checkpoint": "offload"}),
    ("ZeRO stage 3", {"shard": "zero3"}),
    ("GaLore", {"optimizer": "galore"}),
    ("offload the optimizer", {"optimizer": "adamw", "offload": "optimizer"}),
    ("offload the weights, too", {"optimizer": "adamw", "shard": "zero3", "offload": "parameters"}),
    ("offload to NVMe", {"optimizer": "adamw", "shard": "zero3", "offload": "nvme"}),
)
BARE: dict[str, Any] = {
    "liger": "none",
    "checkpoint": "none",
    "mlp": "whole",
    "precision": "fp32",
    "optimizer": "adamw",
    "shard": "none",
    "offload": "none",
}
MANY_RANKS = ("ZeRO stage 2", "ZeRO stage 3")


def alternatives(setup: Setup, foresee: Predict = predict) -> Iterator[Alternative]:
    """Yield each technique that the setup does not use and its device supports, as the only change to the setup."""
    for option, values in TECHNIQUES.items():
        for value, technique in values.items():
            if (
                value in NO_ALTERNATIVE
                or option in (*MESH, *UNPREDICTED)
                or value == getattr(setup, option)
                or (option == "shard" and setup.ranks == 1 and value != "none")
            ):
                continue
            if setup.device not in technique.devices or _stays_where_it_is(setup, option, value):
                continue
            change: dict[str, Any] = {option: value}
            changed = replace(setup, **change)
            yield _alternative(technique, changed, foresee)


def _alternative(technique: Technique, changed: Setup, foresee: Predict) -> Alternative:
    try:
        check_techniques(changed, here=False)
        return Alternative(technique, foresee(changed))
    except LigerError as error:
        return Alternative(technique, None, str(error).removeprefix("plan: ").removeprefix("train: "))


def checklist(setup: Setup, limit: int, foresee: Predict = predict) -> Iterator[Item]:
    """Yield the setup without techniques, then with one more at a time until it fits.

    Techniques that cannot be added are skipped, and so are those that save nothing, except for Liger, which costs
    nothing.
    """
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
        # DeepSpeed offloads only with a ZeRO stage, also on one GPU.
        more: dict[str, Any] = (
            {"shard": "zero2"} if changes.get("offload") == "optimizer" and now.shard not in ZERO else {}
        )
        if changes.get("shard") == "zero3":
            more["mlp"] = "whole"
        changed = replace(now, **(changes | more))
        try:
            check_techniques(changed, here=False)
        except LigerError as error:
            yield Item(title, changes, None, f"with the items before it, {str(error).removeprefix('train: ')}")
            continue
        predicted = foresee(changed)
        if title != "Liger" and predicted.peak_bytes >= prediction.peak_bytes:
            continue
        now, prediction = changed, predicted
        yield Item(title, changes | more, prediction)


def _stays_where_it_is(setup: Setup, option: str, value: str) -> bool:
    """Whether a technique would offload to the host in a run on the CPU, where everything is already."""
    return setup.device == "cpu" and ("offload" in (option, value) or value.startswith("paged"))


def largest_batch(setup: Setup, limit: int, foresee: Predict = predict) -> int:
    """Return the largest micro-batch that fits, in sequences; 0 if not even one fits.

    Memory grows piecewise linearly with the batch, and never more slowly for larger batches.
    """
    low, high, batch = 0, LARGEST_BATCH + 1, 1
    sizes: dict[int, int] = {}
    # Between low and high, after each prediction.
    widths: list[int] = []
    while high - low > 1:
        sizes[batch] = foresee(replace(setup, batch=batch)).peak_bytes
        if sizes[batch] <= limit:
            # On along the line through the last two that fit, memory passes the limit here, or before.
            slope = (sizes[batch] - sizes[low]) / (batch - low) if low else 0
            guess = batch + int((limit - sizes[batch]) / slope) + 1 if slope else 2 * batch
            low = batch
        else:
            # Below the line between the two, memory still fits here.
            high = batch
            guess = low + (limit - sizes[low]) * (high - low) // (sizes[high] - sizes[low]) if low else 0
        widths.append(high - low)
        if high in sizes and len(widths) > 2 and widths[-1] > widths[-3] // 2:
            # The lines meet far from where memory bends.
            guess = (low + high) // 2
        batch = min(max(guess, low + 1), high - 1)
    return low


LARGEST_BATCH = 1 << 20
