# SPDX-License-Identifier: Apache-2.0
"""The largest batch, the longest sequence and the fewest ranks that fit, with peaks that are written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liger_train.plan import planning, search
from liger_train.plan.search import LINEAR, answered, fast_peak, largest, what_fits
from liger_train.plan.step import Prediction
from liger_train.setup import Setup


def predicting(size: Callable[[Setup], float]) -> Callable[[Setup], Prediction]:
    return lambda setup: Prediction(setup, int(size(setup)), {}, "forward pass", 0, 1, 1)


def shared(setup: Setup) -> float:
    """Return the bytes of weights that the ranks share, and of tokens."""
    return 64_000 / setup.ranks + setup.batch * setup.sequence


@given(
    st.integers(0, 500), st.integers(1, 50), st.integers(0, 300), st.integers(0, 40), st.integers(1, 2000),
    st.integers(1, 99),
)  # fmt: skip
def test_the_largest_number_fits_and_one_more_does_not(
    static: int, slope: int, bend: int, steeper: int, limit: int, first: int
) -> None:
    def size(number: int) -> int:
        return static + slope * number + steeper * max(0, number - bend)

    found = largest(size, limit, 1 << 20, first)
    assert found == 0 or size(found) <= limit
    assert size(found + 1) > limit
    # Out of memory, nothing is measured.
    assert largest(lambda number: size(number) if size(number) <= limit else math.inf, limit, 1 << 20, first) == found


@given(
    st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**12)
)
def test_the_largest_number_takes_few_sizes(static: int, slope: int, bend: int, steeper: int, limit: int) -> None:
    asked: list[int] = []

    def size(number: int) -> int:
        asked.append(number)
        return static + slope * number + steeper * max(0, number - bend)

    largest(size, limit, 1 << 20)
    # While the size does not grow, the number doubles, up to 20 times. Of the 21 halvings after that, each may take
    # three: two of three may go to lines that meet far from the bend.
    assert len(asked) <= 20 + 3 * 21


def test_a_search_that_starts_at_its_answer_takes_two_sizes() -> None:
    for first, limit in ((37, 37), (37, 37.5), (36, 37), (38, 37)):
        asked: list[int] = []

        def size(number: int, asked: list[int] = asked) -> int:
            asked.append(number)
            return number

        assert largest(size, limit, 1 << 20, first) == 37
        assert len(asked) <= 3 - (first == 37)


@given(st.integers(0, 10**6), st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 9000))
def test_the_fewest_ranks_fit_and_one_less_does_not(fixed: int, weights: int, limit: int, first: int) -> None:
    def size(setup: Setup) -> float:
        return fixed + weights // setup.ranks

    setup, (answer,) = answered(Setup("tiny", shard="fsdp2"), limit, ["ranks"], predicting(size))
    if answer.value:
        assert setup.ranks == answer.value
        assert size(setup) <= limit
        assert answer.value == 1 or size(replace(setup, ranks=setup.ranks - 1)) > limit
    else:
        assert size(answer.smallest.setup) == answer.smallest.peak_bytes > limit
        assert (setup.ranks, answer.smallest.setup.ranks) == (1, search.MOST_RANKS)


def test_more_ranks_are_of_no_use_without_sharding() -> None:
    _, (answer,) = answered(Setup("tiny"), 100, ["ranks"], predicting(lambda setup: 200))
    assert (answer.value, answer.smallest.setup.ranks) == (0, 1)


def test_ranks_are_groups_of_those_that_share_layers_and_sequences() -> None:
    setup = Setup("tiny", shard="fsdp2", tp=2, cp=2, ranks=4)
    _, (answer,) = answered(setup, 10_000, ["ranks"], predicting(shared))
    # 64,000 / 7 + 1,024 do not fit on seven ranks. A tensor-parallel group and its shards take twice as many.
    assert answer.value == 8


def test_the_fewest_ranks_come_first_then_the_longest_sequence_then_the_largest_batch() -> None:
    setup, answers = answered(Setup("tiny", shard="fsdp2"), 18_000, ["batch", "sequence", "ranks"], predicting(shared))
    assert [(answer.field, answer.value) for answer in answers] == [("ranks", 4), ("sequence", 1984), ("batch", 1)]
    assert (setup.ranks, setup.sequence, setup.batch) == (4, 1984, 1)


def test_a_sequence_is_at_most_as_long_as_the_model_supports() -> None:
    setup, (answer,) = answered(Setup("tiny"), 1 << 40, ["sequence"], predicting(shared))
    assert (answer.capped, answer.value) == (True, setup.sequence)
    assert answer.value == 2048


@pytest.mark.parametrize("field", ["batch", "sequence", "ranks"])
def test_where_nothing_fits_the_least_need_is_known(field: str) -> None:
    before = Setup("tiny", shard="fsdp2")
    setup, (answer,) = answered(before, 10, [field], predicting(shared))
    assert setup == before
    assert answer.value == 0
    assert answer.smallest.peak_bytes == int(shared(answer.smallest.setup))


def test_a_fast_prediction_that_is_a_little_off_does_not_change_the_answer() -> None:
    for error in (0.9, 1.0, 1.1):
        found = answered(
            Setup("tiny", shard="fsdp2"), 70_000, ["batch", "ranks"], predicting(shared),
            lambda setup, error=error: error * shared(setup),
        )  # fmt: skip
        assert [answer.value for answer in found[1]] == [1, 5]


def test_the_table_has_the_values_around_the_answer() -> None:
    limit = 70_000
    setup = Setup("tiny", batch=5, sequence=1024, shard="fsdp2", ranks=2)
    rows = what_fits(setup, limit, ["batch"], shared)
    assert [(row["ranks"], row["sequence"]) for row in rows] == [(2, 256), (2, 512), (2, 1024), (2, 2048)]
    assert [row["batch"] for row in rows] == [(limit - 32_000) // row["sequence"] for row in rows]
    rows = what_fits(setup, limit, ["sequence"], shared)
    assert [(row["batch"], row["sequence"]) for row in rows] == [
        (batch, min(2048, 38_000 // batch // 64 * 64)) for batch in (1, 2, 5, 10, 20)
    ]
    rows = what_fits(setup, limit, ["ranks", "batch"], shared)
    assert sorted({row["ranks"] for row in rows}) == [1, 2, 4, 8]
    assert len(rows) == 16
    assert what_fits(setup, 10, ["batch"], shared) == []


OTHERS: dict[str, Any] = {
    "device": "cpu", "liger": "rms_norm", "precision": "fp32", "checkpoint": "2", "optimizer": "galore",
    "shard": "zero3", "offload": "optimizer", "mlp": "tiled", "packing": True, "set": "label_smoothing_factor=0.1",
    "accumulation": 2, "tp": 2, "cp": 2, "compile": "default",
}  # fmt: skip


@pytest.mark.parametrize("change", [*OTHERS.items(), ("ranks", 2)], ids=str)
def test_peaks_that_are_not_linear_are_planned_one_by_one(change: tuple[str, Any]) -> None:
    assert OTHERS.keys() == LINEAR.keys()
    assert fast_peak(replace(Setup("tiny"), **dict([change]))) is None


def test_the_largest_batch_of_a_plan_is_an_answer_and_not_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "predict", predicting(shared))
    found = planning.make_plan(Setup("tiny", 2), 70_000, techniques=False)
    assert (found.prediction.setup.batch, found.columns()["largest_batch"], found.what_fits) == (2, 5, [])
