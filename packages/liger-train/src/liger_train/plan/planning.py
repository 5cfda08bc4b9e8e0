# SPDX-License-Identifier: Apache-2.0
"""Plan a setup: its prediction, other techniques, a checklist, and values that fit."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from liger_hf.application import shared_checks
from liger_train.plan.advice import Alternative, Item, alternatives, checklist
from liger_train.plan.auto_checkpoint import predict_end
from liger_train.plan.estimate import Estimate, Rates, estimate, seconds_of
from liger_train.plan.search import Answer, answered, fast_peak, what_fits
from liger_train.plan.step import Prediction, predict
from liger_train.plan.traffic import checkpoint_bytes, exchanges, host_bytes
from liger_train.setup import Setup

# Field of Setup → the name of its answer.
NAMES = {"batch": "largest_batch", "sequence": "longest_sequence", "ranks": "fewest_ranks"}


@dataclass(frozen=True)
class Traffic:
    """The exchanges of a step, by a formula, and the times that these and the operations take at some rates.

    exchanges         for each exchange: what, kind, ranks, bytes that a rank receives within its machine and from
                      others, and seconds
    host_bytes        host memory of a machine for offloaded state
    checkpoint_bytes  host memory of a machine for a sharded checkpoint while it is written
    """

    rates: Rates
    estimate: Estimate
    exchanges: list[dict[str, Any]]
    host_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class Plan:
    """The plan of a setup; without a limit, there are no answers and no checklist.

    start      the prediction without the memory that --checkpoint auto adds
    answers    the largest batch, or what the options with the value auto search
    what_fits  with such an option, the largest batch or the longest sequence at other values; see search.py
    """

    prediction: Prediction
    start: Prediction
    alternatives: list[Alternative]
    checklist: list[Item]
    answers: list[Answer]
    what_fits: list[dict[str, int]]
    limit: int | None
    traffic: Traffic | None = None

    @property
    def bars(self) -> list[tuple[str, Prediction]]:
        """The setup, and the items of the checklist."""
        items = [(item.title, item.prediction) for item in self.checklist if item.prediction is not None]
        return [("this setup", self.prediction), *items]

    @property
    def command(self) -> str | None:
        """The command line of the setup if it fits, otherwise of the first item of the checklist that does."""
        _, last = self.bars[-1]
        return last.setup.command() if self.limit is not None and last.fits(self.limit) else None

    def columns(self) -> dict[str, Any]:
        return {
            "prediction": asdict(self.prediction) | {"command": self.prediction.setup.command()},
            "memory_limit": self.limit,
            "fits": None if self.limit is None else self.prediction.fits(self.limit),
            **{name: next((a.value for a in self.answers if a.field == field), None) for field, name in NAMES.items()},
            "what_fits": self.what_fits,
            "techniques": [
                {
                    "option": a.technique.option,
                    "value": a.technique.value,
                    "saves_bytes": a.saves(self.start) if a.prediction else None,
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
                    "speed": item.speed,
                    "costs": item.costs,
                }
                for item in self.checklist
            ],
            "traffic": None if self.traffic is None else asdict(self.traffic),
            "command": self.command,
        }


@shared_checks()
def make_plan(
    setup: Setup,
    limit: int | None,
    techniques: bool,
    auto: Collection[str] = (),
    rates: Rates | None = None,
    show: Callable[[str], object] = lambda doing: None,
) -> Plan:
    """Plan a setup.

    techniques  also predict each other technique
    auto        fields of the setup to search; the plan has the values that fit
    rates       also compute the traffic of several GPUs at these rates
    show        gets a text on each prediction
    """

    def predict_and_show(other: Setup) -> Prediction:
        changed = [f"{name} {value}" for name, value in asdict(other).items() if value != getattr(setup, name)]
        show(f"predicting {', '.join(changed) or setup.model}")
        return predict(other)

    answers: list[Answer] = []
    rows: list[dict[str, int]] = []
    if limit is not None:
        show(f"predicting {setup.model}")
        peak = fast_peak(setup) if auto else None
        changed, answers = answered(setup, limit, auto or ["batch"], predict_and_show, peak)
        setup = changed if auto else setup
        rows = [] if peak is None else what_fits(setup, limit, auto, peak)
    start = predict_and_show(setup)
    prediction = predict_end(start, limit)
    others = list(alternatives(setup, predict_and_show)) if techniques else []
    items = list(checklist(setup, limit, predict_and_show)) if limit is not None and not start.fits(limit) else []
    traffic = None if rates is None or setup.ranks == 1 or setup.device == "cpu" else _traffic(prediction, rates)
    return Plan(prediction, start, others, items, answers, rows, limit, traffic)


def _traffic(prediction: Prediction, rates: Rates) -> Traffic:
    setup, counts = prediction.setup, (prediction.parameters, prediction.trainable_parameters)
    rows = []
    for each in exchanges(setup, *counts):
        near, network = each.received(rates.per_host)
        row = {"what": each.what, "kind": each.kind, "ranks": each.ranks}
        rows.append(row | {"machine_bytes": near, "network_bytes": network, "seconds": seconds_of(each, rates)})
    seconds = estimate(setup, rates, prediction.trainable_parameters, prediction.parameters)
    copy = checkpoint_bytes(setup, prediction.static_bytes, prediction.trainable_parameters, rates.per_host)
    return Traffic(rates, seconds, rows, host_bytes(setup, *counts, rates.per_host), copy)
