# SPDX-License-Identifier: Apache-2.0
"""The time of a step on paper, against training runs on an H200."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liger_train.plan.estimate import Rates, estimate
from liger_train.setup import Setup

pytestmark = pytest.mark.slow

RATES = Rates(matmul=750e12, memory=4.2e12, attention=375e12, links=350e9, hosts=45e9)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STEPS = RESULTS / "2026-11-23-h200-steps" / "step.json"
TRAINED = [
    row
    for row in json.loads((RESULTS / "2026-11-21-h200-training-runs" / "train.json").read_text())
    if (row["model"], row["batch"], row["checkpoint"]) == ("llama-3-8b", 32, "full") and row["liger"] in ("none", "all")
]
ONE = Setup("llama-3.2-1b", 4, 1024)
WEIGHTS = 1_235_814_400


@pytest.fixture(autouse=True)
def kernels() -> None:
    pytest.importorskip("liger_triton.table")


def seconds(row: dict[str, Any]) -> float:
    setup = Setup("llama-3-8b", row["batch"], row["sequence"], liger=row["liger"], precision=row["precision"])
    return estimate(setup, RATES, row["trainable_parameters"]).seconds


def test_a_step_of_an_8b_model_takes_about_what_was_measured_and_liger_as_much_less() -> None:
    estimated = {row["liger"]: seconds(row) for row in TRAINED}
    measured = {row["liger"]: row["step_seconds"] for row in TRAINED}
    for liger in ("none", "all"):
        assert estimated[liger] == pytest.approx(measured[liger], rel=0.2)
    assert estimated["none"] / estimated["all"] == pytest.approx(measured["none"] / measured["all"], rel=0.1)


def test_adapted_layers_count_the_matmuls_with_their_frozen_weights() -> None:
    rows = json.loads(STEPS.read_text())
    (measured,) = (row["tokens_per_second"] for row in rows if row["implementation"] == "liger")
    setup = Setup("llama-3-8b", 16, 2048, adapter="lora")
    found = estimate(setup, RATES, 41_943_040, 8_072_204_288).seconds
    assert found == pytest.approx(16 * 2048 / measured, rel=0.2)


def test_matmuls_in_float8_take_half_as_long() -> None:
    rates = replace(RATES, memory=1e18, launch=0.0)
    pure, float8 = (
        estimate(replace(ONE, precision=each, checkpoint="none"), rates, WEIGHTS) for each in ("bf16-pure", "fp8-pure")
    )
    # Three passes of the layers, which have 973 M of the weights; the head and attention keep their rate.
    saved = 3 * 2 * 973_078_528 * 4 * 1024 / rates.matmul / 2
    assert pure.operations - float8.operations == pytest.approx(saved, rel=0.01)


def test_attention_counts_at_its_own_rate_alone() -> None:
    rates = replace(RATES, attention=1e30, memory=1e18, launch=0.0)
    shapes = ((16, 1024), (1, 16 * 1024))
    short, long = (estimate(replace(ONE, batch=b, sequence=s), rates, WEIGHTS).seconds for b, s in shapes)
    assert long == pytest.approx(short, rel=1e-3)


def test_tensor_parallelism_shares_the_matmuls_and_adds_its_collectives() -> None:
    one, two = (estimate(replace(ONE, ranks=tp, tp=tp), RATES, WEIGHTS) for tp in (1, 2))
    assert one.tensor == one.sharding == 0
    assert 0.4 < two.operations / one.operations < 0.8
    gathered, fused = (
        estimate(replace(ONE, ranks=2, tp=2, liger=liger), RATES, WEIGHTS).tensor for liger in ("none", "all")
    )
    logits = 4 * 1024 * 128_256 * 2
    assert gathered - fused == pytest.approx(logits / 2 / RATES.links)


def test_fsdp2_counts_only_where_it_takes_longer_than_the_step() -> None:
    near, far = (
        estimate(replace(ONE, ranks=16, shard="fsdp2"), replace(RATES, hosts=rate), WEIGHTS) for rate in (45e9, 2e9)
    )
    assert near.seconds == near.operations
    # The embedding, which is the head, is gathered once. Half of all crosses the network, over eight adapters.
    once = 2 * (128_256 + 1) * 2048
    assert far.seconds == far.sharding == pytest.approx((8 * WEIGHTS - once) / 2 / 8 / 2e9)


def test_recomputing_half_of_the_layers_takes_half_of_the_time_that_recomputing_all_adds() -> None:
    none, some, every = (
        estimate(replace(ONE, checkpoint=how), RATES, WEIGHTS).operations for how in ("none", "8", "full")
    )
    assert some == pytest.approx((none + every) / 2)
