# SPDX-License-Identifier: Apache-2.0
"""A head whose vocabulary is sharded: DTensors, what ranks exchange, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forks import on_ranks
from liger_core import OptionError, VocabShard, linear_cross_entropy, linear_log_prob
from ops import sharded_heads as work

pytestmark = pytest.mark.slow


def test_a_dtensor_says_which_classes_a_rank_has() -> None:
    on_ranks(2, work.on_gloo, work.takes_a_dtensor)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_rows_may_be_distributed_over_another_dimension(reduction: str) -> None:
    on_ranks(4, work.on_gloo, work.takes_rows_of_another_dimension, reduction)


def test_rows_that_are_sharded_like_the_vocabulary_are_gathered() -> None:
    on_ranks(2, work.on_gloo, work.gathers_rows_that_the_vocabulary_shards)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "not_packed"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_that_are_sharded_like_the_vocabulary_get_the_gradient_of_their_own(ranks: int, pack: bool) -> None:
    on_ranks(ranks, work.on_gloo, work.scatters_the_gradient, pack)


# Of 12 rows 9 count.
@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ({}, [("reduce_scatter_tensor", 12)]),
        ({"pack": False}, [("reduce_scatter_tensor", 12)]),
        ({"reduction": "none"}, [("reduce_scatter_tensor", 12)]),
        ({"reduction": "none", "chunk": 12}, [("reduce_scatter_tensor", 12)]),
        ({"chunk": 4}, [("all_reduce_", 4), ("all_reduce_", 4), ("all_reduce_", 1)]),
    ],
    ids=["packed", "not_packed", "kept", "recomputed", "chunks"],
)
def test_the_gradient_of_a_divergence_is_scattered_where_all_rows_come_at_once(
    options: dict[str, Any], sums: list[Any]
) -> None:
    on_ranks(2, work.on_gloo, work.scatters_the_gradient_of_a_divergence, options, sums)


def test_halves_of_two_sequences_get_the_gradient_of_their_own() -> None:
    on_ranks(2, work.on_gloo, work.adds_rows_that_are_not_in_the_order_of_ranks)


def test_the_gradient_of_few_counted_rows_is_summed_as_a_whole() -> None:
    on_ranks(2, work.on_gloo, work.sums_where_few_rows_count)


def test_a_step_sends_eight_numbers_a_row_once_and_the_gradient_of_hidden_once() -> None:
    on_ranks(2, work.on_gloo, work.exchanges_once)


def test_a_sharded_head_compiles_to_one_graph() -> None:
    on_ranks(2, work.on_gloo, work.compiles)


def test_a_budget_is_too_small_on_all_ranks_or_on_none() -> None:
    on_ranks(2, work.on_gloo, work.holds_a_budget_of_an_even_share)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("linear_cross_entropy: reduction='mean' needs a normalizer where rows are distributed", {}),
        ("linear_cross_entropy: weight must be replicated, or sharded over its classes", {"dimension": 1, "reduction": "sum"}),
        ("linear_cross_entropy: target must be a DTensor like hidden, whose rows are distributed", {"plain": True, "reduction": "sum"}),
    ],
    ids=["mean", "width", "plain_target"],
)  # fmt: skip
def test_what_would_be_wrong_in_silence_is_refused(message: str, options: dict[str, Any]) -> None:
    on_ranks(4, work.on_gloo, work.refuses, message, options)


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        (3, "vocab must be a VocabShard(group, start, classes), got int"),
        (VocabShard("group", -1, 8), "vocab must have start ≥ 0 and classes > 0, got start=-1 and classes=8"),
        (VocabShard("group", 0, 0), "vocab must have start ≥ 0 and classes > 0, got start=0 and classes=0"),
        (VocabShard(None, 0, 8), "vocab.group must be a process group, got NoneType"),
        (VocabShard("group", 0.5, 8), "vocab.start must be an integer, got 0.5"),
    ],
    ids=["type", "start", "classes", "group", "float"],
)
@pytest.mark.parametrize("op", [linear_cross_entropy, linear_log_prob], ids=lambda op: op.name)
def test_a_wrong_shard_is_refused_before_anything_is_computed(op: Any, vocab: Any, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        op(torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(2, dtype=torch.int64), vocab=vocab)
    assert str(raised.value) == f"{op.name}: {message}"
