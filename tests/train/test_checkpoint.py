# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint: trained, kept as they are, or left out with a note; and `--export`, a folder that
Transformers loads alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen3_5ForConditionalGeneration,
    TrainerCallback,
)

from bench.commands import InProcess, assert_refused
from liger_core.errors import OptionError
from liger_train.checkpointing import checkpointed_layers
from liger_train.model import build
from liger_train.plan.step import predict
from liger_train.runs.run import run
from liger_train.setup import Setup

pytestmark = pytest.mark.slow

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
    assert any("language_model.layers.1" in name for name in changed)
    assert not any("visual" in name for name in changed)
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


MORE = {f"mtp.layers.{index}.norm.weight": torch.ones(6) for index in range(2)} | {"mtp.head.weight": torch.ones(5, 6)}
# A buffer of older versions does not count.
BUFFER = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
LEFT = "LlamaForCausalLM leaves out 42 weights of {}, which are neither trained nor saved: mtp.head, mtp.layers."
LACKS = "{} lacks 1 tensor of LlamaForCausalLM, which starts with random values: model.norm."


@pytest.mark.parametrize(
    ("more", "without", "ignored", "note"),
    [(MORE | BUFFER, "", [], LEFT), (MORE, "", ["^mtp"], LEFT), ({}, "model.norm.weight", [], LACKS)],
    ids=["unexpected", "ignored_by_transformers", "lost"],
)
def test_weights_that_are_left_out_or_lost_are_named(
    more: dict[str, Tensor], without: str, ignored: list[str], note: str,
    small: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
    folder = shutil.copytree(small.model, tmp_path / "changed")
    weights = {name: weight for name, weight in load_file(folder / WEIGHTS).items() if name != without}
    save_file(weights | more, folder / WEIGHTS, metadata={"format": "pt"})
    assert build(replace(small, model=str(folder), liger="none"), CPU).notes == [note.format(folder)]


TOKENS = torch.arange(16)[None]


class Last(TrainerCallback):
    """What the model computes when training ends."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        with torch.no_grad():
            # Not in evaluation mode, in which bitsandbytes packs weights for the CPU; there is no dropout.
            self.logits = model(input_ids=TOKENS).logits.float().clone()


@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
def test_an_exported_model_computes_what_was_trained(adapter: str, small: Setup, model: Path, tmp_path: Path) -> None:
    if adapter != "none":
        pytest.importorskip("peft")
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
    last, folder = Last(), tmp_path / "exported"
    row = run(replace(small, adapter=adapter, learning_rate=3e-2), observers=[last], export=folder)
    assert not row.failed, row.reason
    assert row.notes[-1] == f"Exported the trained model to {folder}."
    found, before = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logits, first = found(input_ids=TOKENS).logits, before(input_ids=TOKENS).logits
    learned = (last.logits - first).norm()
    # Four bits round the weights that the adapters were trained beside.
    assert (logits - last.logits).norm() < (0.3 if adapter == "qlora" else 1e-4) * learned
    assert type(found) is type(before)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert found.config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id is not None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--shard", "fsdp2", "--adapter", "lora"),
            "--export needs a rank that holds the whole model, got --shard fsdp2 and --adapter lora; use --output",
        ),
        (("--sweep", "batch=1,2"), "--export cannot be combined with --sweep"),
        ((), "--export must be an empty or a new folder"),
    ],
)
def test_an_export_that_cannot_be_written_is_a_clear_error(
    small: Setup, liger: InProcess, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "something").touch()
    words = ("train", "--model", "tiny", "--device", "cpu", "--data", small.data, "--export", str(tmp_path))
    assert_refused(liger, sentence, *words, *arguments)


def test_a_run_without_a_step_left_exports_nothing(small: Setup, tmp_path: Path) -> None:
    setup = replace(small, steps=1)
    run(setup, folder=tmp_path / "run")
    with pytest.raises(OptionError, match="--export needs a step to train, but all 1 were done before"):
        run(setup, folder=tmp_path / "run", resume=True, export=tmp_path / "exported")
