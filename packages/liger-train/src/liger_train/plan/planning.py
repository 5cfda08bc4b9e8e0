# SPDX-License-Identifier: Apache-2.0
"""The plan of a setup: prediction, techniques, checklist, largest batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from liger_train.plan.advice import Alternative, Item, alternatives, checklist, largest_batch
from liger_train.plan.step import Prediction, predict
from liger_train.setup import Setup


@dataclass(frozen=True)
class Plan:
    """The plan of a setup."""

    prediction: Prediction
    alternatives: list[Alternative]
    checklist: list[Item]
    largest_batch: int | None
    limit: int | None

    @property
    def bars(self) -> list[tuple[str, Prediction]]:
        """The setup, and each item of the checklist if it does not fit."""
        items = [(item.title, item.prediction) for item in self.checklist if item.prediction is not None]
        return [("this setup", self.prediction), *items]

    @property
    def command(self) -> str | None:
        """The command line of the setup if it fits, otherwise of the first item of the checklist that does."""
        taken = [item.prediction for item in self.checklist if item.prediction is not None] or [self.prediction]
        return taken[-1].setup.command() if self.limit is not None and taken[-1].fits(self.limit) else None

    def columns(self) -> dict[str, Any]:
        return {
            "prediction": asdict(self.prediction) | {"command": self.prediction.setup.command()},
            "memory_limit": self.limit,
            "fits": None if self.limit is None else self.prediction.fits(self.limit),
            "largest_batch": self.largest_batch,
            "techniques": [
                {
                    "option": a.technique.option,
                    "value": a.technique.value,
                    "saves_bytes": a.saves(self.prediction) if a.prediction else None,
                    "peak_bytes": a.prediction.peak_bytes if a.prediction else None,
                    "costs": a.technique.costs,
                    "problem": a.problem,
                }
                for a in self.alternatives
            ],
            "checklist": [
                {
                    "title": item.title,
                    "peak_bytes": item.prediction.peak_bytes if item.prediction else None,
                    "problem": item.problem,
                }
                for item in self.checklist
            ],
            "command": self.command,
        }


def planned(
    setup: Setup,
    limit: int | None,
    techniques: bool,
    fill: bool = False,
    show: Callable[[str], object] = lambda doing: None,
) -> Plan:
    """Plan a setup; without a limit, there is no checklist and no largest batch.

    fill  plan its largest batch that fits, if there is one
    show  gets what is being predicted
    """

    def foresee(other: Setup) -> Prediction:
        changed = [f"{name} {value}" for name, value in asdict(other).items() if value != getattr(setup, name)]
        show(f"predicting {', '.join(changed) or setup.model}")
        return predict(other)

    largest = largest_batch(setup, limit, foresee) if limit is not None else None
    if fill and largest:
        setup = replace(setup, batch=largest)
    prediction = foresee(setup)
    rest = list(alternatives(setup, foresee)) if techniques else []
    items = list(checklist(setup, limit, foresee)) if limit is not None and not prediction.fits(limit) else []
    return Plan(prediction, rest, items, largest, limit)
