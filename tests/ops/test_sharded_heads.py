# SPDX-License-Identifier: Apache-2.0
"""A head whose vocabulary is sharded: DTensors, what ranks exchange, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch

from forks import on_ranks
from liger_core import OptionError, VocabShard, linear_cross_entropy, linear_log_prob
from ops import sharded_heads as work

pytestmark = pytest.mark.slow


# Of 12 rows 9 count.
DIVERGENCES: tuple[tuple[dict[str, Any], list[tuple[str, int]]], ...] = (
    ({}, [("reduce_scatter_tensor", 12)]),
    ({"pack": False}, [("reduce_scatter_tensor", 12)]),
    ({"reduction": "none"}, [("reduce_scatter_tensor", 12)]),
    ({"reduction": "none", "chunk": 12}, [("reduce_scatter_tensor", 12)]),
    ({"chunk": 4}, [("all_reduce_", 4), ("all_reduce_", 4), ("all_reduce_", 1)]),
)


def test_dtensors_and_what_two_ranks_exchange() -> None:
    on_ranks(
        2,
        work.on_gloo,
        work.takes_a_dtensor,
        work.gathers_rows_that_the_vocabulary_shards,
        work.adds_rows_that_are_not_in_the_order_of_ranks,
        work.sums_where_few_rows_count,
        work.exchanges_once,
        work.compiles,
        work.holds_a_budget_of_an_even_share,
        *(partial(work.scatters_the_gradient, pack) for pack in (True, False)),
        *(partial(work.scatters_the_gradient_of_a_divergence, *each) for each in DIVERGENCES),
    )


def test_rows_over_one_dimension_of_a_mesh_and_the_vocabulary_over_another() -> None:
    on_ranks(
        4,
        work.on_gloo,
        *(partial(work.takes_rows_of_another_dimension, reduction) for reduction in ("none", "sum")),
        *(partial(work.scatters_the_gradient, pack) for pack in (True, False)),
        work.refuses,
    )


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
