# SPDX-License-Identifier: Apache-2.0
"""`--adapter-rank`, `--adapter-alpha` and `--adapter-targets`."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from liger_core.errors import OptionError
from liger_hf.four_bits import in_four_bits
from liger_train import techniques
from liger_train.configs import config_of
from liger_train.model import build
from liger_train.plan.step import predict
from liger_train.setup import Setup
from liger_train.train.run import run

pytest.importorskip("peft")


def test_adapters_have_the_rank_the_scale_and_the_places_that_were_asked_for(small: Setup) -> None:
    setup = replace(small, adapter="lora", adapter_rank=4, adapter_alpha=6, adapter_targets="q_proj, v_proj")
    built = build(setup, torch.device("cpu"))
    layers = {
        name: one for name, one in built.model.named_modules() if hasattr(one, "lora_A") and hasattr(one, "scaling")
    }
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
    assert len(layers) == 4
    assert {(one.r["default"], one.scaling["default"]) for one in layers.values()} == {(4, 1.5)}
    assert built.notes[0] == (
        "Training adapters of rank 4 on 4 linear layers (q_proj, v_proj), in float32; the frozen weights are in "
        "float32. "
        "83 % of the layers' weights have none: gate_proj, up_proj, down_proj, o_proj and 1 more."
    )


@pytest.mark.parametrize("liger", ["none", "all"])
def test_a_run_with_such_adapters_learns(small: Setup, liger: str) -> None:
    row = run(
        replace(
            small, adapter="lora", adapter_rank=4, adapter_targets="q_proj,down_proj", liger=liger, learning_rate=3e-2
        )
    )
    assert not row.failed, row.reason
    assert row.losses[-1] < row.losses[0] - 0.05
    # Two layers with rank 4: 32 to 32 and 64 to 32.
    assert row.trainable_parameters == 2 * 4 * (32 + 32 + 64 + 32)
    assert (row.adapter_rank, row.adapter_targets) == (4, "q_proj,down_proj")


EXPERTS = {
    "gpt_oss": ("8 linear layers (q_proj, k_proj, v_proj, o_proj) and 4 weights (down_proj, gate_up_proj)", "3 % of the layers' weights have none: gate_up_proj_bias, router, down_proj_bias."),
    "qwen3_moe": ("8 linear layers (q_proj, k_proj, v_proj, o_proj) and 4 weights (down_proj, gate_up_proj)", "2 % of the layers' weights have none: gate."),
}  # fmt: skip


@pytest.fixture
def experts(small: Setup, request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    """A model with experts that peft would adapt by itself, or would not."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    counts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    AutoConfig.for_model(request.param, vocab_size=400, **sizes, **counts, pad_token_id=None).save_pretrained(tmp_path)
    return replace(small, model=str(tmp_path), random_weights=True, adapter="lora", steps=1)


@pytest.mark.parametrize(
    ("experts", "places", "left"), [(kind, *words) for kind, words in EXPERTS.items()], indirect=["experts"]
)
def test_the_note_counts_adapters_on_the_model(experts: Setup, places: str, left: str) -> None:
    (note,) = (note for note in build(experts, torch.device("cpu")).notes if "adapters of rank" in note)
    assert (f"rank 16 on {places}, in" in note, left in note) == (True, True), note


@pytest.mark.parametrize("experts", EXPERTS, indirect=True)
def test_experts_in_four_bits_are_trained_planned_and_saved_for_peft(experts: Setup, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    setup = replace(experts, adapter="qlora", precision="bf16")
    built = build(setup, torch.device("cpu"))
    experts_of = [module for module in built.model.modules() if in_four_bits(module)]
    linear = [p.quant_state for p in built.model.parameters() if hasattr(p, "quant_state")]
    matrices = [getattr(module, name) for module in experts_of for name in in_four_bits(module)]
    packed = sum(math.prod(state.shape) for state in linear) + sum(matrix.numel() for matrix in matrices)
    assert (len(linear), len(matrices)) == (8, 4)
    assert f"the frozen weights are in 4 bits ({packed:,}) and float32 (" in built.notes[0]
    built.model.save_pretrained(tmp_path / "adapter")
    plain = build(replace(setup, adapter="none"), torch.device("cpu")).model
    loaded = pytest.importorskip("peft").PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert {name for name, _ in loaded.named_parameters() if "lora_" in name} == {
        name for name, _ in built.model.named_parameters() if "lora_" in name
    }
    row, planned = run(setup), predict(setup)
    assert not row.failed, row.reason
    assert planned.trainable_parameters == row.trainable_parameters


@pytest.mark.parametrize("experts", EXPERTS, indirect=True)
def test_experts_that_are_named_are_trained_and_planned(experts: Setup) -> None:
    setup = replace(experts, adapter_targets="gate_up_proj,down_proj")
    techniques.check(setup)
    row, planned = run(setup), predict(setup)
    assert not row.failed, row.reason
    assert any("on 4 weights (down_proj, gate_up_proj)" in note for note in row.notes)
    assert planned.trainable_parameters == row.trainable_parameters
    assert [note for note in planned.notes if "adapters of rank" in note] == [
        note for note in row.notes if "adapters of rank" in note
    ]


@pytest.mark.parametrize("experts", ["gpt_oss"], indirect=True)
def test_targets_that_a_model_with_experts_lacks_name_its_experts(experts: Setup) -> None:
    with pytest.raises(OptionError, match=r"and the experts' down_proj, gate_up_proj, got 'gate_proj'"):
        techniques.check(replace(experts, adapter_targets="gate_proj"))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside_a_config"])
def test_an_adapter_as_a_model_says_what_to_do(small: Setup, model: Path, tmp_path: Path, beside: bool) -> None:
    build(replace(small, adapter="lora"), torch.device("cpu")).model.save_pretrained(tmp_path)
    if beside:
        shutil.copy(model / "config.json", tmp_path)
    with pytest.raises(
        OptionError, match=r"--model must be a whole model, got .*, an adapter of peft; .*merge_and_unload"
    ):
        config_of(replace(small, model=str(tmp_path)))
