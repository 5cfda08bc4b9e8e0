# SPDX-License-Identifier: Apache-2.0
"""The largest batch, the longest sequence and the fewest ranks that fit, and what a plan advises, with peaks that are
written down."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf.tiny_configs import tiny_config
from liger_hf import application
from liger_train.plan import planning, search, step
from liger_train.plan.advice import BARE, CHECKLIST, SPEEDS, Alternative, alternatives, checklist
from liger_train.plan.search import LINEAR, answered, fast_peak, largest, what_fits
from liger_train.plan.step import Prediction
from liger_train.setup import ALL_LINEAR, Setup
from liger_train.techniques import TECHNIQUES


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


def test_ranks_are_groups_of_those_that_share_layers_and_sequences_and_need_sharding() -> None:
    _, (answer,) = answered(Setup("tiny"), 100, ["ranks"], predicting(lambda setup: 200))
    assert (answer.value, answer.smallest.setup.ranks) == (0, 1)
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
    longest = [(batch, min(2048, 38_000 // batch // 64 * 64)) for batch in (1, 2, 5, 10, 20)]
    assert [(row["batch"], row["sequence"]) for row in rows] == longest
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


def test_the_predictions_of_a_plan_share_the_checks_of_modules_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def decide(match: Any, verify: bool) -> Any:
        checked.append(match.op)
        return application.Decision(None, "left")

    def others(setup: Setup, foresee: Callable[[Setup], Prediction]) -> Iterator[Alternative]:
        yield from (Alternative(TECHNIQUES["shard"]["none"], foresee(replace(setup, batch=n))) for n in (2, 3))

    monkeypatch.setattr(application, "decide", decide)
    monkeypatch.setattr(planning, "alternatives", others)
    for _ in range(2):
        step._step.cache_clear()
        planning.make_plan(Setup("tiny", 1, 64, device="cpu", precision="fp32", liger="rms_norm"), None, True)
    # Another plan checks again.
    assert checked == ["rms_norm"] * 2


GiB = 1 << 30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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


def test_the_checklist_passes_over_what_needs_more_ranks_or_excludes_an_earlier_item() -> None:
    one, four = (list(checklist(Setup("tiny", ranks=ranks), 0, predicting(counted))) for ranks in (1, 4))
    assert {item.title: item.problem for item in one}["ZeRO stage 2"] == "there is only one GPU"
    shards = [item.prediction.setup.shard for item in four if item.prediction]
    assert shards[:5] == ["none", "none", "none", "zero2", "zero2"]
    (excluded,) = (item for item in four if item.title == "GaLore")
    problem = "with the items before it, --optimizer galore cannot be combined with --shard zero2"
    assert excluded.prediction is None
    assert excluded.problem.startswith(problem)


def test_the_checklist_passes_over_what_saves_nothing() -> None:
    items = list(
        checklist(Setup("tiny"), 0, predicting(lambda setup: 20 * GiB if setup.mlp == "tiled" else counted(setup)))
    )
    assert "tiled MLPs" not in [item.title for item in items]
    peaks = [item.prediction.peak_bytes for item in items if item.prediction]
    assert peaks == sorted(set(peaks), reverse=True)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_a_mixture_with_adapters_gets_four_bits_and_then_no_adapters_on_experts(adapter: str, tmp_path: Path) -> None:
    tiny_config("qwen2_moe").save_pretrained(tmp_path)

    def size(setup: Setup) -> float:
        on_experts = setup.adapter_targets == ALL_LINEAR
        return (8 - 2 * (setup.optimizer == "adamw-8bit") - 3 * (setup.adapter == "qlora") - 2 * (not on_experts)) * GiB

    setup = Setup(str(tmp_path), adapter=adapter)
    items = [item for item in checklist(setup, GiB, predicting(size)) if item.prediction]
    four_bits = ["weights in 4 bits"] if adapter == "lora" else []
    assert [item.title for item in items[-1 - len(four_bits) :]] == [*four_bits, "no adapters on experts"]
    fitting = items[-1].prediction.setup
    assert (fitting.adapter, fitting.optimizer) == ("qlora", "adamw-8bit")
    # Neither the gate of the shared expert nor "down_proj", which would name the experts' matrix as well.
    assert fitting.adapter_targets == "gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj"
    assert "no adapters on experts" not in [item.title for item in checklist(fitting, 0, predicting(size))]


@pytest.mark.parametrize("title", SPEEDS)
def test_a_measured_speed_is_that_of_two_rows_that_differ_by_the_technique(title: str) -> None:
    for measured in SPEEDS[title]:
        paths = [RESULTS / name for name in measured["rows"]]
        ends = zip((paths[0], paths[-1]), measured["tokens_per_second"], strict=True)
        first, last = (_rows(path, speed) for path, speed in ends)
        assert first, measured
        # A text has no columns. Both 16-bit precisions are as fast.
        alike = {*first[0]} & set(OPTIONS) - {*STEPS[title], "precision"}
        assert any(all(a[key] == b[key] for key in alike) for a in first for b in last), measured


# A strategy of an earlier version is the value of --shard.
OPTIONS = ("model", "batch", "sequence", "ranks", "implementation", *BARE, "adapter", "adapter_rank", "adapter_targets")
STEPS = dict(CHECKLIST) | {"weights in 4 bits": {"adapter": "qlora"}, "no adapters on experts": {"adapter_targets": ""}}


def _rows(path: Path, speed: int) -> list[dict[str, Any]]:
    """Return the rows of a file with this speed."""
    if path.suffix == ".txt":
        speeds = re.findall(r"([\d,]+) tokens/s", path.read_text())
        return [{} for words in speeds if int(words.replace(",", "")) == speed]
    return [row for row in json.loads(path.read_text()) if round(row["tokens_per_second"] or 0) == speed]


def test_the_checklist_has_the_cheapest_technique_first_by_measured_speed() -> None:
    """Weights in 4 bits come later than their speed says, since they are rounded."""
    titles = [title for title, _ in CHECKLIST]
    # Checkpoints that exist are offloaded at no cost.
    measured = [SPEEDS[title] for title in titles if title in SPEEDS and title != "offload checkpoints"]
    speeds = [min(after / before for before, after in (row["tokens_per_second"] for row in rows)) for rows in measured]
    assert speeds == sorted(speeds, reverse=True)


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
    found = planning.make_plan(setup, limit, techniques=False)
    assert found.prediction.fits(limit)
    assert found.command == setup.command()
    assert [name for name, _ in found.bars] == ["this setup"]


def test_an_alternative_changes_one_option_or_has_the_reason_why_it_cannot() -> None:
    setup, problems = Setup("tiny", shard="zero3"), {}
    for other in alternatives(setup, predicting(counted)):
        problems[other.technique.value] = other.problem
        if other.prediction is not None:
            changed = [name for name in vars(setup) if getattr(setup, name) != getattr(other.prediction.setup, name)]
            assert changed == [other.technique.option]
    assert "DeepSpeed keeps float32 weights" in problems["bf16-pure"]
