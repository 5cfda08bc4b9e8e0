# SPDX-License-Identifier: Apache-2.0
"""The plan of `--checkpoint auto`: it ends as a run does that measures its memory."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from liger_train.auto_checkpoint import MARGIN, AutoCheckpoint
from liger_train.plan import planning
from liger_train.plan.auto_checkpoint import PlannedMemory, predict_end
from liger_train.plan.step import AUTO, Prediction, predict
from liger_train.runs.data import _train_tokenizer
from liger_train.runs.run import run
from liger_train.setup import Setup

SIZES = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "bos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    _train_tokenizer(["some text"], SIZES["vocab_size"]).save_pretrained(folder)
    # Its tokens are part of the memory of a run.
    text = folder / "text.txt"
    text.write_text("some text " * 4096)
    options = {"liger": "none", "precision": "fp32", "checkpoint": "auto", "device": "cpu", "random_weights": True}
    return Setup(str(folder), 4, 256, data=str(text), **options)


class RealMemory(PlannedMemory):
    """The memory of a run on the CPU, whose tensors a ledger records."""

    def peak(self) -> int:
        return self.ledger.peak().total


# A third of the difference is room for some of the layers, with half a layer to spare.
@pytest.mark.slow
@pytest.mark.parametrize("share", [0.335, 2.0], ids=["some layers keep matmul outputs", "every layer keeps everything"])
def test_a_run_decides_as_its_plan(setup: Setup, share: float) -> None:
    start, whole = predict(setup), predict(replace(setup, checkpoint="none"))
    limit = int((start.peak_bytes + share * (whole.peak_bytes - start.peak_bytes)) / (1 - MARGIN))
    planned = predict_end(start, limit)
    notes: list[str] = []
    memory = RealMemory(limit, 0, start)
    with memory.ledger:
        run(replace(setup, checkpoint="full", steps=9), observers=[AutoCheckpoint(memory, notes.append)])
    assert planned.notes[-1] == notes[-1]
    assert planned.peak_bytes == pytest.approx(memory.peak(), rel=0.02)
    assert start.peak_bytes < planned.peak_bytes <= limit * (1 - MARGIN)
    assert (planned.peak_bytes == whole.peak_bytes) == (share > 1)


def test_inputs_of_layers_are_offloaded_where_they_take_an_eighth_of_the_memory(setup: Setup) -> None:
    start = predict(replace(setup, batch=32))
    planned = predict_end(start, start.peak_bytes)
    assert "layers with offloaded inputs: " in planned.notes[-1]
    assert planned.peak_bytes < start.peak_bytes


def test_only_a_limit_above_the_start_has_an_end(setup: Setup) -> None:
    start = predict(setup)
    assert AUTO in start.notes
    for limit in (None, start.peak_bytes - 1):
        assert predict_end(start, limit) is start
    full = predict(replace(setup, checkpoint="full"))
    assert predict_end(full, 1 << 40) is full


def test_techniques_save_what_they_save_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def prediction(setup: Setup) -> Prediction:
        return Prediction(setup, 100 - 40 * (setup.optimizer != "adamw"), {}, "forward pass", 0, 1, 1)

    monkeypatch.setattr(planning, "predict", prediction)
    monkeypatch.setattr(planning, "predict_end", lambda start, limit: replace(start, peak_bytes=500))
    plan = planning.make_plan(Setup("tiny", checkpoint="auto"), None, techniques=True)
    columns = plan.columns()
    assert columns["prediction"]["peak_bytes"] == 500
    assert {row["saves_bytes"] for row in columns["techniques"] if row["option"] == "optimizer"} == {40}
