# SPDX-License-Identifier: Apache-2.0
"""`--export`: a folder that Transformers loads alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from bench.commands import InProcess
from liger_core.errors import OptionError
from liger_train.runs.run import run
from liger_train.setup import Setup

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
    code, said = liger(
        "train", "--model", "tiny", "--device", "cpu", "--data", small.data, "--export", str(tmp_path), *arguments
    )
    assert (code, sentence in " ".join(said.split())) == (2, True), said


def test_a_run_without_a_step_left_exports_nothing(small: Setup, tmp_path: Path) -> None:
    setup = replace(small, steps=1)
    run(setup, folder=tmp_path / "run")
    with pytest.raises(OptionError, match="--export needs a step to train, but all 1 were done before"):
        run(setup, folder=tmp_path / "run", resume=True, export=tmp_path / "exported")
