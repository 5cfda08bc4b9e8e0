# SPDX-License-Identifier: Apache-2.0
"""`--validation`: sequences that are never trained on, and their loss."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf.two_ranks import on_two_ranks
from liger_train.runs.command import _figures
from liger_train.runs.data import read
from liger_train.runs.run import run
from liger_train.setup import Setup
from train.training import CHATML, USER, model_with, setup_of, written

pytestmark = pytest.mark.slow


def test_held_out_sequences_are_spread_over_the_text_and_never_trained_on(small: Setup, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(20_000))))
    plain = replace(small, data=str(tmp_path / "text.txt"))
    split = replace(plain, validation=0.1)
    whole, data = read(plain, 400, False).sequences, read(split, 400, False)
    trained, held = ({tuple(one.tolist()) for one in part} for part in (data.sequences, data.held_out))
    assert not trained & held
    assert len(held) == round(0.1 * len(whole))
    assert torch.equal(data.held_out, read(replace(split, batch=5), 400, False).held_out)
    at = [index for index, one in enumerate(whole) if tuple(one.tolist()) in held]
    assert max(b - a for a, b in itertools.pairwise(at)) <= 11


def test_the_validation_loss_is_that_of_the_trained_model_on_held_out_text(small: Setup, tmp_path: Path) -> None:
    setup = replace(small, validation=0.05)
    row = run(setup, export=tmp_path)
    held = read(setup, 400, False).held_out
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=held, labels=held).loss
    assert row.validation_loss == pytest.approx(float(loss), rel=1e-4)
    assert (row.validation_losses, row.validation_steps) == ([row.validation_loss], [6])
    assert _figures(row)["validation loss"] == f"{row.validation_loss:.5f}"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A setup whose tokens differ in loss, as those of a trained model do, with answers of many lengths."""
    folder = tmp_path_factory.mktemp("chats")
    model = model_with(CHATML, folder / "model")
    weights = AutoModelForCausalLM.from_pretrained(model)
    weights.lm_head.weight.data *= 40
    weights.save_pretrained(model)
    pytest.importorskip("trl")
    words = ["two", "four", "and", "three", "seven", "of", "course", "what", "is"]
    draw = random.Random(0)
    answers = [" ".join(draw.choices(words, k=draw.choice([1, 2, 9, 10]))) for _ in range(40)]
    rows = [{"messages": [USER, {"role": "assistant", "content": answer}]} for answer in answers]
    setup = setup_of(model, data=written(folder / "chats.jsonl", rows), steps=1, learning_rate=1e-12, validation=0.175)
    return replace(setup, batch=1, sequence=96)


@pytest.fixture(scope="module")
def mean_over_tokens(chats: Setup) -> float:
    """In float64, over all held-out tokens with labels; the same ones for every batch, packed or not."""
    held = read(chats, 400, True).held_out
    model = AutoModelForCausalLM.from_pretrained(chats.model, dtype=torch.float64)
    with torch.no_grad():
        return float(model(input_ids=held[:, 0], labels=held[:, 1]).loss)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 1, "liger": "all"}, {"batch": 2, "packing": True, "liger": "none"},
        {"batch": 4, "accumulation": 2, "packing": True, "liger": "all"}, {"batch": 9, "liger": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_it_is_the_mean_over_all_tokens_with_labels(
    options: dict[str, Any], chats: Setup, mean_over_tokens: float
) -> None:
    assert run(replace(chats, **options)).validation_loss == pytest.approx(mean_over_tokens, rel=1e-6)


def on_a_rank(rank: int, setup: Setup, expected: list[float]) -> None:
    for shard in ("none", "fsdp2"):
        row = run(replace(setup, shard=shard))
        assert [*(row.losses or []), row.validation_loss] == pytest.approx(expected, rel=1e-6), shard


def test_ranks_have_the_losses_of_one_process(chats: Setup, mean_over_tokens: float) -> None:
    expected = [*(run(replace(chats, batch=4)).losses or []), mean_over_tokens]
    on_two_ranks(on_a_rank, replace(chats, ranks=2, batch=2), expected)


def test_it_is_computed_as_often_as_asked_and_kept_when_resumed(small: Setup, tmp_path: Path) -> None:
    setup = replace(small, validation=0.05, set="eval_steps=2", steps=5)
    whole = run(setup)
    assert whole.validation_steps == [2, 4, 5]
    assert whole.validation_losses == sorted(whole.validation_losses, reverse=True)
    run(replace(setup, steps=2), folder=tmp_path)
    assert run(setup, folder=tmp_path, resume=True).validation_losses == whole.validation_losses
