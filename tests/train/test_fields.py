# SPDX-License-Identifier: Apache-2.0
"""`liger train --set`: fields of TrainingArguments beside the options of Liger, and label smoothing without the logits
of the whole batch."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from bench.commands import InProcess, assert_refused
from liger_core.errors import OptionError
from liger_train import fields, techniques
from liger_train.plan.ledger import LOGITS
from liger_train.plan.step import predict
from liger_train.runs.arguments import training_arguments
from liger_train.runs.data import read
from liger_train.runs.run import run
from liger_train.runs.saved_checkpoints import fixed_options
from liger_train.setup import Setup
from liger_train.smoothing import is_smoothed, smooth, smoothed_loss


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["warmup_ration=0.1"], "--set must name a field of transformers.TrainingArguments, got 'warmup_ration'. Did you mean 'warmup_ratio'?"),
        (["learning_rate=1"], "--set cannot set learning_rate; use --learning-rate"),
        (["--per-device-train-batch-size=1"], "--set cannot set per_device_train_batch_size; use --batch"),
        (["weight_decay=much"], "--set must have values that TrainingArguments accepts, got --weight_decay=much"),
        (["lr_scheduler_type=cosin"], "--lr_scheduler_type"),
        (["weight_decay"], "--set must be a name and a value, for instance weight_decay=0.1, got 'weight_decay'"),
        (["weight_decay=0", "weight-decay=1"], "--set must name each field once, got weight_decay twice"),
        (["warmup_steps=1", "warmup_ratio=0.1"], "got warmup_ratio and warmup_steps"),
        (["num_train_epochs=0"], "--set num_train_epochs must be a positive number, got 0.0"),
        (["num_train_epochs=1", "--steps=3"], "--set num_train_epochs cannot be combined with --steps or --sweep"),
        (["report_to=tensorbored"], "--set report_to must be integrations of Transformers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_field_that_cannot_be_set_is_a_clear_error_before_anything_is_loaded(
    liger: InProcess, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.setattr("liger_train.runs.command._train", lambda *more: pytest.fail("it trained"))
    options = [word for word in words if word.startswith("--steps")]
    sets = [part for word in words if word not in options for part in ("--set", word)]
    assert_refused(liger, sentence, "train", "--model", "tiny", "--device", "cpu", *options, *sets)


def test_a_field_that_a_technique_sets_cannot_be_set() -> None:
    with pytest.raises(OptionError, match="cannot set max_grad_norm, which another option sets"):
        fields.values("max_grad_norm=1", techniques.arguments(Setup("tiny", optimizer="galore-layerwise")))


def test_every_field_that_is_set_reaches_the_trainer(small: Setup, tmp_path: Path) -> None:
    words = [
        "weight_decay=0.1", "max_grad_norm=0.5", "warmup_ratio=0.25", 'lr_scheduler_kwargs={"a": 1}',
        "lr_scheduler_type=cosine", "logging-first-step=true",
    ]  # fmt: skip
    found = training_arguments(replace(small, set=fields.joined(words)), tmp_path)
    assert (found.weight_decay, found.max_grad_norm, found.warmup_steps) == (0.1, 0.5, 0.25)
    assert (found.lr_scheduler_kwargs, found.lr_scheduler_type, found.logging_first_step) == ({"a": 1}, "cosine", True)
    # Warm-up needs no schedule, and what is reported is logged.
    found = training_arguments(replace(small, set="warmup_steps=2 report_to=none"), tmp_path)
    assert found.lr_scheduler_type == "constant_with_warmup"
    assert (found.logging_strategy, found.logging_steps, found.report_to) == ("steps", 1, [])


def test_values_that_transformers_rejects_together_are_a_clear_error(small: Setup, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"got warmup_steps=-1: .*warmup_steps"):
        training_arguments(replace(small, set="warmup_steps=-1"), tmp_path)


class Rates(TrainerCallback):
    """Notes the learning rate of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_begin(self, *rest: Any, lr_scheduler: Any, **more: Any) -> None:
        self.found += lr_scheduler.get_last_lr()[:1]


def test_the_schedule_that_is_set_is_trained_with(small: Setup) -> None:
    rates = Rates()
    run(replace(small, set="lr_scheduler_type=linear warmup_steps=2"), observers=[rates])
    assert rates.found == pytest.approx([0, 0.5e-2, 1e-2, 0.75e-2, 0.5e-2, 0.25e-2])


def test_epochs_determine_the_number_of_steps(small: Setup, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text of a few steps, which is read more than once. " * 40)
    setup = replace(small, data=str(text), set="num_train_epochs=2.5")
    sequences = len(read(setup, 400, own_tokenizer=True).sequences)
    row = run(setup)
    assert row.steps == len(row.losses) == -(-sequences // 2 * 5 // 2)
    assert row.losses[-1] < row.losses[0]


def test_an_epoch_is_the_whole_text(small: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_train.runs.data.CHARACTERS", 1000)
    epoch, step = (replace(small, set="num_train_epochs=1"), replace(small, steps=1))
    assert len(read(epoch, 400, False).sequences) > 2 * len(read(step, 400, False).sequences)


def test_the_row_and_the_command_have_what_was_set(small: Setup) -> None:
    setup = replace(small, steps=1, set=fields.joined(["weight_decay=0.1", "run_name=a name", "max_grad_norm=2"]))
    row = run(setup)
    assert row.set == "max_grad_norm=2 'run_name=a name' weight_decay=0.1"
    words = shlex.split(row.command())
    sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    assert sets == ["max_grad_norm=2", "run_name=a name", "weight_decay=0.1"]


def test_a_run_cannot_be_resumed_with_other_fields(small: Setup) -> None:
    assert fixed_options(replace(small, set="weight_decay=0.1"))["set"] == "weight_decay=0.1"
    assert fixed_options(small)["set"] == ""


FACTOR = 0.2
SMOOTHED = f"label_smoothing_factor={FACTOR}"


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_the_loss_is_that_of_transformers(items: int | torch.Tensor | None, shifted: bool) -> None:
    logits, labels = torch.randn(2, 9, 30), torch.randint(30, (2, 9))
    labels[:, :3] = -100
    expected = LabelSmoother(FACTOR)({"logits": logits}, labels, shift_labels=True, num_items_in_batch=items)
    given = {"shift_labels": torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]} if shifted else {}
    found = smoothed_loss(FACTOR, logits, None if shifted else labels, 30, items, **given)
    torch.testing.assert_close(found, expected)


def test_a_run_has_the_losses_of_transformers(small: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(small, set=SMOOTHED, accumulation=2, validation=0.05)
    fused = run(setup)
    monkeypatch.setattr("liger_train.smoothing.smooth", lambda *rest: None)
    plain = run(replace(setup, liger="none"))
    assert (fused.reason, fused.losses) == ("", pytest.approx(plain.losses, rel=1e-4))
    assert fused.validation_loss == pytest.approx(plain.validation_loss, rel=1e-4)
    assert plain.losses != pytest.approx(run(replace(setup, set="")).losses, rel=1e-4)


def test_a_plan_counts_no_logits_for_a_smoothed_loss() -> None:
    setup = Setup("tiny", batch=4, sequence=128, device="cpu", precision="fp32", checkpoint="none")
    plain, fused, logits = (
        predict(replace(setup, set=words, liger=liger))
        for words, liger in [("", "all"), (SMOOTHED, "all"), (SMOOTHED, "none")]
    )
    assert fused.peak_bytes == pytest.approx(plain.peak_bytes, rel=1e-3)
    assert (fused.held[LOGITS] == plain.held[LOGITS], logits.peak_bytes > 1.5 * fused.peak_bytes) == (True, True)


@pytest.fixture
def bart(small: Setup, tmp_path: Path) -> Setup:
    """A model whose forward computes its loss itself."""
    sizes = {
        "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "vocab_size": 4000,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bart", **sizes)).save_pretrained(tmp_path)
    return replace(small, model=str(tmp_path), random_weights=True, set=SMOOTHED)


def test_a_loss_that_is_left_to_transformers_is_noted_and_planned(bart: Setup) -> None:
    model, notes = AutoModelForCausalLM.from_pretrained(bart.model), []
    smooth(model, bart, notes)
    assert notes == [
        "--set label_smoothing_factor: Transformers computes the loss from the logits of the whole batch, "
        "since BartForCausalLM computes its own loss."
    ]
    assert not is_smoothed(model)
    assert predict(bart).held[LOGITS] > predict(replace(bart, set="")).held[LOGITS]
