# SPDX-License-Identifier: Apache-2.0
"""`--set label_smoothing_factor`: the loss of Transformers, without the logits of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from liger_train.plan.ledger import LOGITS
from liger_train.plan.step import predict
from liger_train.runs.run import run
from liger_train.setup import Setup
from liger_train.smoothing import is_smoothed, smooth, smoothed_loss

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
