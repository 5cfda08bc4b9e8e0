# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint: trained, kept as they are, or left out with a note."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM, Qwen3_5ForConditionalGeneration

from liger_train.checkpointing import checkpointed_layers
from liger_train.model import build
from liger_train.plan.step import predict
from liger_train.runs.run import run
from liger_train.setup import Setup

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture
def seeing(small: Setup, tmp_path: Path) -> Setup:
    """A vision-language model, of which AutoModelForCausalLM takes the language model alone."""
    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    text |= {"vocab_size": 400, "head_dim": 8, "layer_types": ["full_attention"] * 2, "eos_token_id": None}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    folder = tmp_path / "seeing"
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    for file in Path(small.model).glob("token*"):
        shutil.copy(file, folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return replace(small, model=str(folder), learning_rate=3e-2)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_vision_language_model_is_trained_on_text_and_exported_whole(
    seeing: Setup, tmp_path: Path, adapter: str
) -> None:
    if adapter == "lora":
        pytest.importorskip("peft")
    setup = replace(seeing, adapter=adapter)
    row = run(setup, export=tmp_path / "exported")
    assert not row.failed, row.reason
    assert row.losses[-1] < row.losses[0]
    before, after = (load_file(Path(folder) / WEIGHTS) for folder in (seeing.model, tmp_path / "exported"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert (any("language_model.layers.1" in name for name in changed), any("visual" in name for name in changed)) == (
        True,
        False,
    )
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")) is Qwen3_5ForConditionalGeneration
    assert (tmp_path / "exported" / "preprocessor_config.json").read_text() == "{}"
    beside = sum(weight.numel() for name, weight in before.items() if "visual" in name)
    note = (
        f"Training the language model of Qwen3_5ForConditionalGeneration; {beside:,} weights that text does not reach "
        "are frozen, "
        "and saved with it: model.visual."
    )
    planned = predict(setup)
    assert (row.notes[0], planned.notes[0]) == (note, note)
    assert (planned.parameters, planned.trainable_parameters) == (row.parameters, row.trainable_parameters)


def test_the_layers_that_are_recomputed_are_those_of_the_language_model(seeing: Setup) -> None:
    model = build(replace(seeing, checkpoint="1"), CPU).model
    layers = model.model.language_model.layers
    assert (checkpointed_layers(model), [bool(layer.gradient_checkpointing) for layer in layers]) == (1, [True, False])


@pytest.fixture
def changed(small: Setup, tmp_path: Path) -> Callable[..., Setup]:
    """A model whose checkpoint has other weights beside its own, or lacks one."""

    def make(more: dict[str, Tensor], without: str = "") -> Setup:
        folder = shutil.copytree(small.model, tmp_path / "changed")
        weights = {name: weight for name, weight in load_file(folder / WEIGHTS).items() if name != without}
        save_file(weights | more, folder / WEIGHTS, metadata={"format": "pt"})
        return replace(small, model=str(folder), liger="none")

    return make


@pytest.mark.parametrize("ignored", [[], ["^mtp"]], ids=["unexpected", "ignored_by_transformers"])
def test_weights_that_the_model_leaves_out_are_counted(
    changed: Callable[..., Setup], ignored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
    setup = changed(
        {
            "mtp.layers.0.norm.weight": torch.ones(6),
            "mtp.layers.1.norm.weight": torch.ones(6),
            "mtp.head.weight": torch.ones(5, 6),
        }
    )
    assert build(setup, CPU).notes == [
        f"LlamaForCausalLM leaves out 42 weights of {setup.model}, which are neither trained nor saved: mtp.head, "
        "mtp.layers."
    ]


def test_buffers_of_older_versions_do_not_count(changed: Callable[..., Setup]) -> None:
    assert build(changed({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}), CPU).notes == []


def test_weights_that_the_checkpoint_lacks_are_named(changed: Callable[..., Setup]) -> None:
    setup = changed({}, without="model.norm.weight")
    assert build(setup, CPU).notes == [
        f"{setup.model} lacks 1 tensor of LlamaForCausalLM, which starts with random values: model.norm."
    ]
