# SPDX-License-Identifier: Apache-2.0
"""What a plan advises, with predictions that are written down."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf.tiny_configs import tiny_config
from liger_train.plan import planning
from liger_train.plan.advice import BARE, CHECKLIST, KEEPING_ADAPTERS, SPEEDS, alternatives, checklist
from liger_train.plan.step import Prediction
from liger_train.setup import ALL_LINEAR, Setup

GiB = 1 << 30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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
        "none", "none", "none", "zero2", "zero2",
    ]  # fmt: skip


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
        first, last = (
            _rows(path, speed) for path, speed in zip((paths[0], paths[-1]), measured["tokens_per_second"], strict=True)
        )
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
        return [
            {} for words in re.findall(r"([\d,]+) tokens/s", path.read_text()) if int(words.replace(",", "")) == speed
        ]
    return [row for row in json.loads(path.read_text()) if round(row["tokens_per_second"] or 0) == speed]


def test_the_checklist_has_the_cheapest_technique_first_by_measured_speed() -> None:
    titles = [title for title, _ in CHECKLIST]
    titles.insert(len(KEEPING_ADAPTERS), "weights in 4 bits")
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
