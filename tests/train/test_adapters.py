# SPDX-License-Identifier: Apache-2.0
"""`--adapter-rank`, `--adapter-alpha` and `--adapter-targets`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from liger_core.errors import OptionError
from liger_train import techniques
from liger_train.model import build
from liger_train.setup import Setup
from liger_train.train.run import run

pytest.importorskip("peft")


def test_adapters_have_the_rank_the_scale_and_the_places_that_were_asked_for(small: Setup) -> None:
    setup = replace(small, adapter="lora", adapter_rank=4, adapter_alpha=6, adapter_targets="q_proj, v_proj")
    built = build(setup, torch.device("cpu"))
    layers = {name: one for name, one in built.model.named_modules() if hasattr(one, "lora_A") and hasattr(one, "scaling")}
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
    assert len(layers) == 4
    assert {(one.r["default"], one.scaling["default"]) for one in layers.values()} == {(4, 1.5)}
    assert "Training adapters of rank 4 on q_proj, v_proj, in float32; the frozen weights are in float32." in built.notes


@pytest.mark.parametrize("liger", ["none", "all"])
def test_a_run_with_such_adapters_learns(small: Setup, liger: str) -> None:
    row = run(replace(small, adapter="lora", adapter_rank=4, adapter_targets="q_proj,down_proj", liger=liger, learning_rate=3e-2))
    assert not row.failed, row.reason
    assert row.losses[-1] < row.losses[0] - 0.05
    # Two layers with rank 4: 32 to 32 and 64 to 32.
    assert row.trainable_parameters == 2 * 4 * (32 + 32 + 64 + 32)
    assert (row.adapter_rank, row.adapter_targets) == (4, "q_proj,down_proj")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"adapter_rank": 8}, "--adapter-rank needs --adapter lora or qlora, got none"),
        ({"adapter": "lora", "adapter_rank": 0}, "--adapter-rank must be from 1 to"),
        ({"adapter": "lora", "adapter_targets": " "}, "--adapter-targets must not be empty"),
        ({"adapter": "lora", "adapter_targets": "q_proj,v_prj"}, "down_proj, .*, got 'v_prj'. Did you mean 'v_proj'?"),
        ({"adapter": "lora", "adapter_targets": "lm_head"}, "got 'lm_head'"),
        ({"adapter": "lora", "adapter_targets": "proj"}, "got 'proj'"),
    ],
)
def test_adapters_that_cannot_be_made_are_a_clear_error(small: Setup, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence.replace("?", r"\?")):
        techniques.check(replace(small, **options))
