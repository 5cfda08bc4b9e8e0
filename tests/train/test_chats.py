# SPDX-License-Identifier: Apache-2.0
"""`--data chats.jsonl`: conversations through the model's chat template, of which the assistant's tokens alone are trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from liger_bench.text import Sequences, trained_tokenizer
from liger_core.errors import OptionError
from liger_train.setup import Setup
from liger_train.train.chats import MASKED, holds_chats
from liger_train.train.data import Data, read
from liger_train.train.run import run
from train.training import saved_model, setup_of

# Every message in its own tags; what a model generates is the content and the end.
PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
# As templates that drop the reasoning of earlier answers.
FORGETFUL = PLAIN.replace("{{ message.content }}", "{{ message.content if loop.last or message.role != 'assistant' else '' }}")
STRICT = "{% if messages[0].role == 'assistant' %}{{ raise_exception('The user must begin.') }}{% endif %}" + PLAIN
TAGS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>")
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is two and two"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and three"},
    {"role": "assistant", "content": "seven of course"},
]
WORDS = " ".join(turn["content"] for turn in TURNS)


def model_with(template: str | None, folder: Path) -> Path:
    saved_model(folder, vocab_size=400)
    made = trained_tokenizer([WORDS] * 4, 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in TAGS])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def written(folder: Path, *rows: Any) -> str:
    path = folder / "chats.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps({"messages": row}) for row in rows) + "\n")
    return str(path)


def data_of(template: str | None, folder: Path, *rows: Any, **options: Any) -> Data:
    model = model_with(template, folder / "model")
    setup = replace(setup_of(model, data=written(folder, *rows)), **({"batch": 1, "sequence": 96} | options))
    return read(setup, 400, own_tokenizer=True)


def trained_on(data: Data, index: int = 0) -> str:
    labels = data.sequences[index, 1]
    text: str = data.tokenizer.decode(labels[labels != MASKED])
    return text


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by generation tags"])
def test_only_what_the_assistant_wrote_is_trained_on(template: str, tmp_path: Path) -> None:
    data = data_of(template, tmp_path, TURNS)
    assert trained_on(data) == "four<|end|>seven of course<|end|>"
    ids, labels = data.sequences[0]
    assert torch.equal(labels[labels != MASKED], ids[labels != MASKED])
    whole = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in TURNS)
    assert data.tokenizer.decode(ids).replace("<|pad|>", "") == whole
    assert "Training on" in data.notes[0]


def test_the_trainer_gets_the_labels(tmp_path: Path) -> None:
    data = data_of(PLAIN, tmp_path, TURNS)
    row = Sequences(data.sequences)[0]
    assert torch.equal(torch.stack([row["input_ids"], row["labels"]]), data.sequences[0])


def test_padding_is_never_trained_on_and_each_conversation_has_its_own_sequence(tmp_path: Path) -> None:
    data = data_of(PLAIN, tmp_path, TURNS, TURNS[:3])
    assert data.sequences.shape == (2, 2, 96)
    ids, labels = data.sequences.unbind(1)
    assert (labels[ids == data.tokenizer.pad_token_id] == MASKED).all()
    assert trained_on(data, 1) == "four<|end|>"


def test_long_conversations_are_cut_and_those_without_an_answer_left_are_left_out(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "two " * 60}, {"role": "assistant", "content": "four"}]
    data = data_of(PLAIN, tmp_path, TURNS[1:3], [*TURNS[1:3], *long], long, sequence=32)
    assert len(data.sequences) == 2
    assert data.notes[1] == "Conversations longer than --sequence 32 were cut: 2, 1 of them before the first answer, which were left out."


def test_some_are_held_out_for_validation_with_their_labels(tmp_path: Path) -> None:
    data = data_of(PLAIN, tmp_path, *[TURNS] * 10, validation=0.2)
    assert data.held is not None
    assert (tuple(data.sequences.shape), tuple(data.held.shape)) == ((8, 2, 96), (2, 2, 96))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([TURNS, "{not json"], "line 2: must be JSON like .*got '{not json'"),
        ([TURNS, "[1]"], r"line 2: must have a list of messages like .*, got '\[1\]'"),
        ([TURNS, []], "line 2: must have a list of messages"),
        ([TURNS, [{"content": "hi"}]], "line 2: message 1 must have a role and content"),
        ([TURNS, "", TURNS[:2]], "line 3: must have a message of the role assistant, on which to train, got user"),
        ([TURNS, TURNS[2:]], "line 2: the chat template must accept the messages, but it does not: The user must begin."),
    ],
    ids=["not JSON", "no messages", "empty messages", "no role", "no answer", "refused by the template"],
)
def test_the_line_of_a_bad_conversation_is_named(rows: list[Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"^train: --data .*chats.jsonl, {sentence}"):
        data_of(STRICT, tmp_path, *rows)


def test_a_template_that_forgets_earlier_answers_is_refused_rather_than_trained_on_wrongly(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="line 1: the chat template changes message 3 when others follow"):
        data_of(FORGETFUL, tmp_path, TURNS)
    assert trained_on(data_of(FORGETFUL, tmp_path, TURNS[:3])) == "four<|end|>"


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="need a model whose tokenizer has a chat template, got "):
        data_of(None, tmp_path, TURNS)
    with pytest.raises(OptionError, match="has a chat template, got tiny"):
        read(Setup("tiny", data=written(tmp_path, TURNS)), 400, own_tokenizer=False)


def test_too_few_conversations_for_a_step_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="must have at least the 4 conversations of a step, got 1 from"):
        data_of(PLAIN, tmp_path, TURNS, batch=4)


def test_other_json_lines_are_text(tmp_path: Path) -> None:
    for name, content, chats in (
        ("a.jsonl", '{"text": "x"}', False),
        ("a.txt", '{"messages": []}', False),
        ("b.jsonl", '{"messages": []}', True),
    ):
        (tmp_path / name).write_text(content)
        assert holds_chats(str(tmp_path / name)) == chats
    assert not holds_chats("library")


@pytest.mark.parametrize("liger", ["none", "all"])
def test_a_run_learns_the_answers(liger: str, tmp_path: Path) -> None:
    model = model_with(PLAIN, tmp_path / "model")
    rows = [TURNS, TURNS[:3]] * 4
    setup = replace(setup_of(model, data=written(tmp_path, *rows), liger=liger, steps=12), sequence=96)
    row = run(setup)
    assert row.losses is not None
    assert row.losses[-1] < 0.7 * row.losses[0]
    assert any("tokens of assistants in 8 conversations" in note for note in row.notes or [])
