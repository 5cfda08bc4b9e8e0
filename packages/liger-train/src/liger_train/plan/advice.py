# SPDX-License-Identifier: Apache-2.0
"""Predict the savings of each technique, and find the first setup of the checklist that fits."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from liger_core.errors import LigerError
from liger_hf.four_bits import routers
from liger_train.adapters import adaptable, last_parts
from liger_train.combinations import ZERO
from liger_train.implementations import PEER
from liger_train.model import on_meta
from liger_train.plan.step import Prediction, predict
from liger_train.setup import ALL_LINEAR, Setup
from liger_train.technique import Technique
from liger_train.techniques import LIST, NUMBER, TECHNIQUES, check_techniques

Predict = Callable[[Setup], Prediction]
# These depend on free memory, on the user, on the machine or on another library.
NO_ALTERNATIVE = ("auto", NUMBER, LIST, "nvme", PEER)
MESH = ("tp", "cp", "replicate")


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

    @property
    def speed(self) -> str:
        """The measured speed with the technique, as a multiple of the speed without it."""
        rows = [(row["run"], *row["tokens_per_second"]) for row in SPEEDS.get(self.title, ())]
        return "; ".join(f"{after / before:.2f} × ({run})" for run, before, after in rows)

    @property
    def costs(self) -> str:
        techniques = [TECHNIQUES[option][value] for option, value in self.changes.items() if option in TECHNIQUES]
        return "; ".join(technique.costs for technique in techniques if technique.costs != "nothing")


SPEEDS: dict[str, Any] = tomllib.loads((files("liger_train.plan") / "speeds.toml").read_text())
Step = tuple[str, dict[str, Any]]
# Cheapest first: the first two make a step faster, the last ones wait for the host or a disk. Offloading checkpoints is
# free, but needs them. Offloading takes AdamW, which then runs on the CPU. Weights in 4 bits follow the techniques that
# do not round weights.
KEEPING_ADAPTERS: tuple[Step, ...] = (
    ("Liger", {"liger": "all"}),
    ("mixed precision", {"precision": "bf16"}),
    ("ZeRO stage 2", {"shard": "zero2"}),
    ("8-bit optimizer", {"optimizer": "adamw-8bit"}),
    ("gradient checkpointing", {"checkpoint": "full"}),
    ("tiled MLPs", {"mlp": "tiled"}),
    ("offload checkpoints", {"checkpoint": "offload"}),
)
CHECKLIST: tuple[Step, ...] = (
    *KEEPING_ADAPTERS,
    ("ZeRO stage 3", {"shard": "zero3"}),
    ("GaLore", {"optimizer": "galore"}),
    ("offload the optimizer", {"optimizer": "adamw", "offload": "optimizer"}),
    ("offload the weights, too", {"optimizer": "adamw", "shard": "zero3", "offload": "parameters"}),
    ("offload to NVMe", {"optimizer": "adamw", "shard": "zero3", "offload": "nvme"}),
)
# The first value of each option leaves its techniques out.
BARE: dict[str, Any] = {
    option: next(iter(TECHNIQUES[option]))
    for option in ("liger", "checkpoint", "mlp", "precision", "optimizer", "shard", "offload")
}
MANY_RANKS = ("ZeRO stage 2", "ZeRO stage 3")


def alternatives(setup: Setup, foresee: Predict = predict) -> Iterator[Alternative]:
    """Yield each technique that the setup does not use and its device supports, as the only change to the setup."""
    for option, values in TECHNIQUES.items():
        for value, technique in values.items():
            if (
                value in NO_ALTERNATIVE
                or option in MESH
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
    for title, changes in (*KEEPING_ADAPTERS, *_of_adapters(setup), *CHECKLIST[len(KEEPING_ADAPTERS) :]):
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


def _of_adapters(setup: Setup) -> Iterator[Step]:
    """Yield what makes adapters take less memory: a frozen model in 4 bits and, since it trains less, after that,
    experts without adapters."""
    if setup.adapter == "lora":
        yield "weights in 4 bits", {"adapter": "qlora"}
    if setup.adapter != "none" and setup.adapter_targets == ALL_LINEAR:
        model = on_meta(setup)
        linear, experts = adaptable(model)
        names = {*last_parts({*linear} - {*routers(model)})} - {*last_parts(experts)}
        if experts and names:
            yield "no adapters on experts", {"adapter_targets": ",".join(sorted(names))}


def _stays_where_it_is(setup: Setup, option: str, value: str) -> bool:
    """Whether a technique would offload to the host in a run on the CPU, where everything is already."""
    return setup.device == "cpu" and ("offload" in (option, value) or value.startswith("paged"))
