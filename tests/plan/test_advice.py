# SPDX-License-Identifier: Apache-2.0
"""What a plan advises, with predictions that are written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liger_train.plan import planning
from liger_train.plan.advice import BARE, CHECKLIST, alternatives, checklist, largest_batch
from liger_train.plan.step import Prediction
from liger_train.setup import Setup

GiB = 1 << 30


def predicting(size: Callable[[Setup], float]) -> Callable[[Setup], Prediction]:
    return lambda setup: Prediction(setup, int(size(setup)), {}, "forward pass", 0, 1, 1)


def counted(setup: Setup) -> float:
    """Return a GiB less for each technique of the checklist, two less for GaLore and four for offloading, which replace
    others."""
    used = {(option, value) for _, changes in CHECKLIST for option, value in changes.items() if value != BARE[option]}
    saved = {("optimizer", "galore"): 2, ("offload", "optimizer"): 4, ("offload", "parameters"): 4}
    return (20 - sum(saved.get((option, value), 1) for option, value in used if getattr(setup, option) == value)) * GiB


def test_the_checklist_ends_with_the_first_item_that_fits() -> None:
    items = list(checklist(Setup("tiny"), 18 * GiB, predicting(counted)))
    assert [item.title for item in items if item.prediction] == ["no technique", "Liger", "mixed precision"]
    assert items[-1].prediction.setup.command() == "liger train --model tiny --checkpoint none"


def test_the_checklist_passes_over_what_needs_more_ranks() -> None:
    items = list(checklist(Setup("tiny"), 0, predicting(counted)))
    assert {item.title: item.problem for item in items}["ZeRO stage 2"] == "there is only one GPU"


def test_several_ranks_share() -> None:
    items = list(checklist(Setup("tiny", ranks=4), 0, predicting(counted)))
    assert [item.prediction.setup.shard for item in items if item.prediction][:5] == [
        "none",
        "none",
        "none",
        "zero2",
        "zero2",
    ]


def test_the_checklist_passes_over_what_excludes_an_earlier_item() -> None:
    items = {item.title: item for item in checklist(Setup("tiny", ranks=4), 0, predicting(counted))}
    assert items["GaLore"].prediction is None
    assert items["GaLore"].problem.startswith(
        "with the items before it, --optimizer galore cannot be combined with --shard zero2"
    )


def test_the_checklist_passes_over_what_saves_nothing() -> None:
    items = list(
        checklist(Setup("tiny"), 0, predicting(lambda setup: 20 * GiB if setup.mlp == "tiled" else counted(setup)))
    )
    assert "tiled MLPs" not in [item.title for item in items]
    peaks = [item.prediction.peak_bytes for item in items if item.prediction]
    assert peaks == sorted(set(peaks), reverse=True)


def test_what_is_offloaded_is_updated_by_adamw() -> None:
    setups = [item.prediction.setup for item in checklist(Setup("tiny"), 0, predicting(counted)) if item.prediction]
    assert {setup.optimizer for setup in setups if setup.offload == "none"} == {"adamw", "adamw-8bit", "galore"}
    assert {setup.optimizer for setup in setups if setup.offload != "none"} == {"adamw"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_the_cpu_nothing_is_offered_that_takes_a_gpu(ranks: int) -> None:
    setup = Setup("tiny", device="cpu", precision="fp32", checkpoint="none", ranks=ranks)
    for other in alternatives(setup, predicting(counted)):
        assert "cpu" in other.technique.devices, other
        assert other.technique.option != "offload"
        assert "paged" not in other.technique.value
    items = list(checklist(setup, 0, predicting(counted)))
    assert {item.title for item in items} >= {"Liger", "GaLore", "8-bit optimizer"}
    assert not [item.title for item in items if "offload" in item.title]
    assert ranks > 1 or not [item for item in items if "zero" in f"{item.changes}{item.problem}"]


@pytest.mark.parametrize("limit", [18 * GiB, 30 * GiB], ids=["with its techniques", "without any"])
def test_a_setup_that_fits_is_advised_as_it_is(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # With a batch of two it fits no more.
    monkeypatch.setattr(planning, "predict", predicting(lambda setup: counted(setup) * setup.batch))
    setup = Setup("tiny", memory_limit=limit)
    found = planning.planned(setup, limit, techniques=False)
    assert found.prediction.fits(limit)
    assert found.command == setup.command()
    assert [name for name, _ in found.bars] == ["this setup"]


@given(st.integers(0, 500), st.integers(1, 50), st.integers(0, 300), st.integers(0, 40), st.integers(1, 2000))
def test_the_largest_batch_fits_and_one_more_does_not(
    static: int, slope: int, bend: int, steeper: int, limit: int
) -> None:
    def size(setup: Setup) -> int:
        return static + slope * setup.batch + steeper * max(0, setup.batch - bend)

    found = largest_batch(Setup("tiny"), limit, predicting(size))
    assert found == 0 or size(replace(Setup("tiny"), batch=found)) <= limit
    assert size(replace(Setup("tiny"), batch=found + 1)) > limit


@given(
    st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**12)
)
def test_the_largest_batch_takes_few_predictions(static: int, slope: int, bend: int, steeper: int, limit: int) -> None:
    asked: list[int] = []

    def size(setup: Setup) -> int:
        asked.append(setup.batch)
        return static + slope * setup.batch + steeper * max(0, setup.batch - bend)

    largest_batch(Setup("tiny"), limit, predicting(size))
    # Bisection alone takes 20; two of three may go to lines that meet far from the bend.
    assert len(asked) <= 60


def test_an_alternative_changes_one_option() -> None:
    setup = Setup("tiny")
    for other in alternatives(setup, predicting(counted)):
        if other.prediction is not None:
            changed = [name for name in vars(setup) if getattr(setup, name) != getattr(other.prediction.setup, name)]
            assert changed == [other.technique.option]


def test_an_unsupported_alternative_has_the_reason() -> None:
    found = {
        a.technique.value: a
        for a in alternatives(Setup("tiny", shard="zero3"), predicting(counted))
        if a.technique.option == "precision"
    }
    assert found["bf16-pure"].prediction is None
    assert "DeepSpeed keeps float32 weights" in found["bf16-pure"].problem
