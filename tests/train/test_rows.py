# SPDX-License-Identifier: Apache-2.0
"""`--data` with rows: conversations, or prompts and completions, of which TRL makes tokens and labels; what comes out
is checked."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from liger_bench.progress import progress_bar
from liger_train import compiling
from liger_train.model import build
from liger_train.runs import rows as rows_of_files
from liger_train.runs.data import Data, read
from liger_train.runs.labels import MASKED
from liger_train.runs.run import run
from liger_train.setup import Setup
from liger_train.text import Sequences
from train.training import CHATML, FOUR, TAGS, USER, model_with, refused, saved_model, setup_of, written

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.slow

# TRL has a template for training instead of this one.
QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
# An answer is ended by the role that comes next.
GLM = (
    "[gMask]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TAGS_BEFORE_THE_END = TAGS.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# As templates that drop the reasoning of earlier answers.
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '' }}")
STRICT = "{% if messages[0].role == 'assistant' %}{{ raise_exception('The user must begin.') }}{% endif %}" + CHATML
AGAIN, SEVEN = {"role": "user", "content": "and three"}, {"role": "assistant", "content": "seven of course"}
SYSTEM = {"role": "system", "content": "be brief"}
TURNS = [USER, FOUR, AGAIN, SEVEN]
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NUMBERS}}]
WITH_TOOLS = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": "4"}, FOUR]
NAMES = {"user": "human", "assistant": "gpt", "system": "system"}

MESSAGES = [{"messages": TURNS}, {"messages": [USER, FOUR]}]
# The names of the formats, and their rows.
FORMATS: dict[str, list[dict[str, Any]]] = {
    "messages": MESSAGES,
    "system messages": [{"messages": [SYSTEM, *row["messages"]]} for row in MESSAGES],
    "ShareGPT": [{"conversations": [{"from": NAMES[m["role"]], "value": m["content"]} for m in row["messages"]]} for row in MESSAGES],
    "prompt and completion": [{"prompt": "two and two is", "completion": " four"}, {"prompt": "and three:", "completion": " seven"}],
    "prompt and completion with messages": [{"prompt": TURNS[:3], "completion": [SEVEN]}, {"prompt": [USER], "completion": [FOUR]}],
    "tools": [{"messages": WITH_TOOLS, "tools": TOOLS}, {"messages": [USER, FOUR]}],
    "tools as text": [{"messages": WITH_TOOLS, "tools": json.dumps(TOOLS)}, {"messages": [USER, FOUR]}],
    "roles in conversations": [{"conversations": row["messages"]} for row in MESSAGES],
}  # fmt: skip
FOUR_ENDS, SEVEN_ENDS = "four<|im_end|>", "seven of course<|im_end|>"
THOUGHT = "<think>\n\n</think>\n\n"
CALLED = '<call>{"name": "add", "arguments": {"a": 2}}<|im_end|>'


def trained_with(
    template: str | None, folder: Path, rows: list[Any] | str, end: str = "<|im_end|>", **options: Any
) -> Setup:
    model = model_with(template, folder / "model", end)
    source = rows if isinstance(rows, str) else written(folder / "chats.jsonl", rows)
    return replace(setup_of(model, data=source), **({"batch": 1, "sequence": 768} | options))


def data_of(*given: Any, **options: Any) -> Data:
    return read(trained_with(*given, **options), 400, own_tokenizer=True)


def trained_on(data: Data) -> list[str]:
    """The tokens with labels of each sequence."""
    return [data.tokenizer.decode(labels[labels != MASKED]) for labels in data.sequences[:, 1]]


def sft_trainer(template: str, name: str, tokenizer: Any, folder: Path, **options: Any) -> Any:
    """An SFTTrainer with its defaults, for the rows of a format as TRL documents them."""
    rows = MESSAGES if name in ("ShareGPT", "roles in conversations") else FORMATS[name]
    by_tags = "messages" in rows[0] and template != CHATML
    rows = split(rows) if "messages" in rows[0] and not by_tags else rows
    arguments = trl.SFTConfig(
        str(folder / "sft"), report_to="none", use_cpu=True, bf16=False, max_length=768, assistant_only_loss=by_tags,
        **options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    return trl.SFTTrainer(model, arguments, train_dataset=table, processing_class=tokenizer)


def split(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A prompt and a completion for every answer."""
    return [
        {"prompt": row["messages"][:index], "completion": row["messages"][index : index + 1]}
        | {k: row[k] for k in row if k == "tools"}
        for row in rows
        for index, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    ]


TEMPLATES = {"tags": TAGS, "TRL's own": QWEN3}
CASES = {f"{name}-no tags": (CHATML, name) for name in FORMATS}
CASES |= {f"{name}-{key}": (TEMPLATES[key], name) for name in ("system messages", "tools") for key in TEMPLATES}


@pytest.mark.parametrize(("template", "name"), CASES.values(), ids=CASES)
def test_tokens_and_labels_are_those_of_sft_trainer(template: str, name: str, tmp_path: Path) -> None:
    data = data_of(template, tmp_path, FORMATS[name])
    expected = sft_trainer(template, name, data.tokenizer, tmp_path).train_dataset
    assert len(data.sequences) == len(expected)
    for (ids, labels), row in zip(data.sequences.tolist(), expected, strict=True):
        missing = 768 - len(row["input_ids"])
        assert ids == row["input_ids"] + [data.tokenizer.pad_token_id] * missing
        assert labels == row["labels"] + [MASKED] * missing


@pytest.mark.parametrize(("template", "name"), [(CHATML, "messages"), (TAGS, "tools")], ids=["no tags", "tags"])
def test_packed_documents_have_the_labels_and_the_loss_of_sft_trainer(template: str, name: str, tmp_path: Path) -> None:
    data = data_of(template, tmp_path, FORMATS[name], packing=True)
    trainer = sft_trainer(template, name, data.tokenizer, tmp_path, packing=True)
    (number,) = (len(row["seq_lengths"]) for row in trainer.train_dataset)
    assert any(note.startswith(f"Packed {number} documents into 1 sequence; ") for note in data.notes)
    expected = trainer.data_collator(list(trainer.train_dataset))
    length = expected["input_ids"].shape[1]
    for row, key in zip(data.sequences[0], ("input_ids", "labels", "position_ids"), strict=True):
        assert torch.equal(row[:length], expected[key][0])
    assert (data.sequences[0, 1, length:] == MASKED).all()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        loss = model(**{key: value[None] for key, value in Sequences(data.sequences)[0].items()}, use_cache=False).loss
        assert float(loss) == pytest.approx(float(trainer.compute_loss(trainer.model, expected)), rel=1e-6)


ONE, TWO = f"{FOUR_ENDS}\n", f"{SEVEN_ENDS}\n"


@pytest.mark.parametrize(
    ("template", "name", "answers"),
    [
        (CHATML, "messages", [ONE, TWO, ONE]),
        (CHATML, "tools", [f"{CALLED}\n", ONE, ONE]),
        (TAGS, "tools", [CALLED + FOUR_ENDS, FOUR_ENDS]),
        (QWEN3, "messages", [THOUGHT + ONE + THOUGHT + TWO, THOUGHT + ONE]),
        (FORGETFUL, "messages", [ONE, TWO, ONE]),
        (TAGS_BEFORE_THE_END, "messages", [FOUR_ENDS, SEVEN_ENDS, FOUR_ENDS]),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_answers_with_their_ends_are_trained_on(template: str, name: str, answers: list[str], tmp_path: Path) -> None:
    data = data_of(template, tmp_path, FORMATS[name])
    assert trained_on(data) == answers
    assert data.notes[-1] == f"The first trained answer: {(data.tokenizer.decode(first_answer(data)))!r}."


def first_answer(data: Data) -> list[int]:
    labels = data.sequences[0, 1].tolist()
    begin = next(index for index, label in enumerate(labels) if label != MASKED)
    return labels[begin : labels.index(MASKED, begin)]


def test_answers_are_trained_on_after_the_messages_before_them(tmp_path: Path) -> None:
    data = data_of(FORGETFUL, tmp_path, [{"messages": TURNS}])
    words = [data.tokenizer.decode(ids).replace("<|pad|>", "") for ids in data.sequences[:, 0]]
    asked = "<|im_start|>user\nwhat is two and two<|im_end|>\n<|im_start|>assistant\n"
    again = "<|im_end|>\n<|im_start|>user\nand three<|im_end|>\n<|im_start|>assistant\n"
    assert words == [asked + ONE, asked + again + TWO]
    assert data.notes[1:3] == [
        "The chat template has no {% generation %} tags, and TRL has no version of it with tags.",
        "Each answer is an example of its own, after the messages before it.",
    ]


@pytest.mark.parametrize(("batch", "accumulation", "packing"), [(2, 2, False), (1, 4, False), (1, 2, True)], ids=str)
def test_a_step_has_the_loss_of_sft_trainer_however_it_is_split(
    batch: int, accumulation: int, packing: bool, tmp_path: Path
) -> None:
    how = {"batch": batch, "accumulation": accumulation, "packing": packing, "liger": "all" if packing else "none"}
    setup = trained_with(TAGS, tmp_path, MESSAGES * 2, steps=1, sequence=128, **how)
    row = run(setup)
    arguments = trl.SFTConfig(
        str(tmp_path / "sft"), report_to="none", use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=4,
        logging_steps=1, assistant_only_loss=True, packing=packing, max_length=128,
    )  # fmt: skip
    trainer = trl.SFTTrainer(setup.model, arguments, train_dataset=datasets.Dataset.from_list(MESSAGES * 2))
    trainer.train()
    assert row.losses == [pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-6)]


def test_compiled_layers_keep_packed_documents_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiling, "COMPILER", "aot_eager")
    setup = trained_with(TAGS, tmp_path, MESSAGES * 2, steps=1, packing=True, sequence=256)
    eager, compiled = (run(replace(setup, compile=how)) for how in ("none", "default"))
    assert compiled.losses == [pytest.approx(loss, rel=1e-6) for loss in eager.losses]


@pytest.mark.parametrize(("liger", "attention"), [("all", "sdpa"), ("none", "eager")])
def test_a_packed_document_does_not_change_the_loss_of_another(liger: str, attention: str, tmp_path: Path) -> None:
    data = data_of(TAGS, tmp_path, MESSAGES, packing=True)
    model = build(setup_of(tmp_path / "model", liger=liger), torch.device("cpu")).model
    model.set_attn_implementation(attention)
    ids, labels, positions = data.sequences.unbind(1)
    second = int(positions[0].eq(0).nonzero()[1])
    losses = []
    for token in (5, 6):
        changed = torch.cat([torch.full_like(ids[:, :second], token), ids[:, second:]], 1)
        masked = torch.cat([torch.full_like(labels[:, :second], MASKED), labels[:, second:]], 1)
        losses.append(float(model(input_ids=changed, labels=masked, position_ids=positions).loss))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mamba", {}), ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 64}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    ],
    ids=["recurrent", "with convolutions", "with a mask of its own", "whose mask knows no positions"],
)  # fmt: skip
def test_a_model_that_mixes_packed_documents_is_refused(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    setup = trained_with(TAGS, tmp_path, MESSAGES, steps=1, packing=True, sequence=128)
    saved_model(tmp_path / "model", kind, vocab_size=400, pad_token_id=None, max_position_embeddings=1024, **options)
    with refused("--packing needs a model whose layers keep the documents of a sequence apart by their positions"):
        run(setup)


def test_text_is_not_packed(small: Setup) -> None:
    with refused(r"--packing needs rows with answers, got .*, which is text; leave it out"):
        read(replace(small, packing=True), 400, own_tokenizer=True)


def saved(rows: list[dict[str, Any]], folder: Path) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("saved", lambda table, path: table.save_to_disk(path)),
        ("rows.json", lambda table, path: Path(path).write_text(json.dumps(table.to_list(), indent=1))),
        ("rows.parquet", lambda table, path: table.to_parquet(path)),
        ("rows.csv", lambda table, path: table.to_csv(path)),
    ],
)
def test_other_files_of_rows_are_read_as_json_lines_are(
    file: str, write: Callable[[Any, str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = FORMATS["prompt and completion"] if file == "rows.csv" else MESSAGES
    write(datasets.Dataset.from_list(rows), str(tmp_path / file))
    data = data_of(TAGS, tmp_path, str(tmp_path / file))
    assert torch.equal(data.sequences, data_of(TAGS, tmp_path, rows).sequences)


def test_columns_that_are_read_and_others_are_named(tmp_path: Path) -> None:
    row = {"prompt": "what is two and two", "prompt_id": "0f" * 32, "messages": [USER, FOUR]}
    for columns in (["prompt", "prompt_id", "messages"], ["prompt_id", "messages"]):
        source = saved([{name: row[name] for name in columns}] * 3, tmp_path)
        data = data_of(TAGS, tmp_path, source)
        assert trained_on(data) == [FOUR_ENDS] * 3
        assert data.notes[0] == f"Training on the column messages of {source}; not used: {', '.join(columns[:-1])}."


def test_rows_without_a_column_to_train_on_are_refused_and_not_read_as_text(tmp_path: Path) -> None:
    with refused(r"row 1: a row must have messages, .*, or text, got the columns prompt_id, answer; rename"):
        data_of(TAGS, tmp_path, saved([{"prompt_id": "0f", "answer": "four"}], tmp_path))
    with refused(r"line 1: a row must have messages, .*, got the columns comment; rename a column, or give text as"):
        data_of(TAGS, tmp_path, [{"comment": "v1"}, *MESSAGES])


def test_a_column_of_texts_is_text(tmp_path: Path) -> None:
    data = data_of(None, tmp_path, [{"text": "two and two "}, {"text": None}, {"text": "and three"}] * 9, sequence=16)
    assert data.sequences.dim() == 2
    words = data.tokenizer.decode(data.sequences.flatten())
    assert words.startswith("two and two <|im_end|>and three<|im_end|>two and two")
    with refused(r"line 2: text must be a string, got \[1\]"):
        data_of(None, tmp_path, [{"text": "two"}, {"text": [1]}])


def test_files_of_rows_in_a_folder_of_texts_are_named(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    written(tmp_path / "texts" / "chats.jsonl", MESSAGES)
    data = data_of(None, tmp_path, str(tmp_path / "texts"), sequence=16)
    assert data.notes == [
        f"Files in {tmp_path}/texts were read as text, not as rows: chats.jsonl; give one as --data to train on rows."
    ]


@pytest.mark.parametrize(("template", "name"), [(CHATML, "weight"), (TAGS, "train")], ids=["no tags", "tags"])
def test_an_answer_that_the_data_excludes_is_not_trained_on(template: str, name: str, tmp_path: Path) -> None:
    data = data_of(template, tmp_path, [{"messages": [USER, {**FOUR, name: 0}, AGAIN, {**SEVEN, name: 1}]}])
    assert [text.strip() for text in trained_on(data)] == [SEVEN_ENDS]
    (note,) = (note for note in data.notes if note.startswith("Each answer is an example of its own"))
    assert note.endswith("before it; left out, without a message before them or with a weight of 0: 1.")


def test_fields_that_nobody_reads_are_named(tmp_path: Path) -> None:
    answer = {**FOUR, "mood": "calm", "tool_calls": None, "note": None}
    data = data_of(TAGS, tmp_path, [{"messages": [USER, answer], "tools": TOOLS}])
    assert "The chat template does not read these fields, which have no effect: mood, tools." in data.notes


def test_a_prompt_that_differs_when_the_model_is_to_answer_is_named(tmp_path: Path) -> None:
    thinking = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    data = data_of(thinking, tmp_path, [{"messages": TURNS}])
    assert "In generation, prompts end with '<think>\\n', which the chat template leaves out in training." in data.notes


def test_an_answer_that_begins_with_a_newline_is_trained_on_from_the_token_with_that_newline(tmp_path: Path) -> None:
    data = data_of(CHATML, tmp_path, [{"messages": [USER, {"role": "assistant", "content": "\nfour"}]}])
    assert trained_on(data) == ["\n\nfour<|im_end|>\n"]
    assert not any("Prompts end" in note for note in data.notes)


def test_answers_that_do_not_end_are_refused(tmp_path: Path) -> None:
    sentence = r"must end with a token that ends generation \(<\|endoftext\|>\), got 'four' from .*; let the chat template end answers"
    with refused(sentence):
        data_of(GLM, tmp_path, MESSAGES, "<|endoftext|>")
    end = "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    ending = GLM.replace("{% endfor %}", end)
    data = data_of(ending, tmp_path, MESSAGES, "<|endoftext|>")
    assert trained_on(data) == ["four<|endoftext|>", "seven of course<|endoftext|>", "four<|endoftext|>"]


def test_answers_that_end_with_another_token_are_named(tmp_path: Path) -> None:
    data = data_of(TAGS, tmp_path, MESSAGES, "<|endoftext|>")
    assert data.notes[-1] == (
        "Answers end with <|im_end|>, which does not end generation (<|endoftext|> does); generate with it as "
        "eos_token_id."
    )


def test_long_examples_are_cut_and_those_without_an_answer_left_are_left_out(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "two " * 60}, {"role": "assistant", "content": "four"}]
    rows = [{"messages": turns} for turns in ([USER, FOUR], [USER, FOUR, *long], long)]
    data = data_of(TAGS, tmp_path, rows, sequence=64)
    assert len(data.sequences) == 2
    assert (
        data.notes[2]
        == "Examples longer than --sequence 64 were cut: 2, 1 of them before the first answer, which were left out."
    )
    with refused(r"must have answers that begin within --sequence 8 tokens, got .*, which has none"):
        data_of(TAGS, tmp_path, [{"messages": long}], sequence=8)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["{not json"], r"line 2: must be JSON, .* got '{not json' \(Expecting property name"),
        (["[1]"], r"line 2: must have messages, as the rows before, got \[1\]"),
        ([{"comment": "v1"}], "line 2: must have messages, as the rows before, got comment"),
        ([{"messages": []}], "line 2: messages must have messages, got none"),
        ([{"messages": "hi"}], "line 2: messages must be a list of messages, got "),
        ([{"messages": [{"content": "hi"}]}], "line 2: messages: message 1 must have a role and content"),
        (["", {"messages": [USER]}], "line 3: must have a message of the assistant to train on, got user"),
        ([{"messages": [FOUR, AGAIN, SEVEN]}], "line 2: the chat template must accept the messages, .*: The user must begin."),
        ([{"messages": [USER, {**FOUR, "weight": 0.5}]}], "line 2: weight must be 0 or 1 in a message of the assistant, .*, got 0.5"),
        ([{"messages": [{**USER, "train": True}, FOUR]}], "line 2: train must be 0 or 1 .*, and not 1 in others, got True for user"),
    ],
    ids=[
        "not JSON", "no row", "other keys", "empty", "no list", "no role", "no answer", "refused by the template",
        "a weight", "a prompt",
    ],
)  # fmt: skip
def test_the_line_of_a_bad_row_is_named(rows: list[Any], sentence: str, tmp_path: Path) -> None:
    with refused(f"^train: --data .*chats.jsonl, {sentence}"):
        data_of(STRICT, tmp_path, [{"messages": TURNS}, *rows])


@pytest.mark.parametrize(
    ("content", "line"), [('[\n {"text": "two"},\n {"text":', 3), ('[{"text": "two"},\n', 2), ("[1]\n[2]\n", 2)]
)
def test_the_line_where_an_array_breaks_off_is_named(content: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(content)
    with refused(f"rows.json, line {line}: must be JSON, a row on each line or an array of rows, got "):
        data_of(TAGS, tmp_path, str(tmp_path / "rows.json"))


def test_a_completion_of_other_roles_is_refused(tmp_path: Path) -> None:
    with refused(r"line 1: completion must have messages of the assistant alone, .*, got assistant, user; give"):
        data_of(TAGS, tmp_path, [{"prompt": [USER], "completion": [FOUR, AGAIN, SEVEN]}])
    with refused("line 2: prompt and completion must be strings or lists of messages, the same in every row"):
        data_of(TAGS, tmp_path, [{"prompt": [USER], "completion": [FOUR]}, {"prompt": "two", "completion": "four"}])


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with refused("has messages, which need a model whose tokenizer has a chat template, got "):
        data_of(None, tmp_path, MESSAGES)
    with refused("has a chat template, got tiny"):
        read(Setup("tiny", data=written(tmp_path / "chats.jsonl", MESSAGES)), 400, own_tokenizer=False)


def test_prompts_and_completions_need_no_chat_template(tmp_path: Path) -> None:
    data = data_of(None, tmp_path, FORMATS["prompt and completion"])
    assert trained_on(data) == [" four<|im_end|>", " seven<|im_end|>"]
    with refused("has prompt and completion, which need a model with a tokenizer, got tiny"):
        read(Setup("tiny", data=str(tmp_path / "chats.jsonl")), 400, own_tokenizer=False)


def test_too_few_examples_for_a_step_are_an_error(tmp_path: Path) -> None:
    with refused("must have at least the 4 sequences of a step, got 1 from"):
        data_of(TAGS, tmp_path, MESSAGES[:1], batch=4)


def test_a_missing_library_is_named_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_of_files.importlib.util, "find_spec", lambda name: None)
    with refused(r"needs trl, not installed here; pip install 'liger-train\[trl\]'"):
        data_of(TAGS, tmp_path, MESSAGES)


def test_the_tokenizer_is_left_as_it_was(tmp_path: Path) -> None:
    setup, path = trained_with(TAGS, tmp_path, MESSAGES, sequence=64), tmp_path / "model" / "tokenizer_config.json"
    others = {name: value for name, value in json.loads(path.read_text()).items() if name != "pad_token"}
    path.write_text(json.dumps(others))
    assert read(setup, 400, own_tokenizer=True).tokenizer.pad_token is None


def test_text_needs_neither_trl_nor_datasets(small: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trl", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    text = written(tmp_path / "text.jsonl", [{"text": "two and two make four "}] * 40)
    for source in (small.data, text):
        assert len(read(replace(small, data=source), 400, own_tokenizer=True).sequences)


def test_what_is_read_is_printed_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup, notes = trained_with(TAGS, tmp_path, MESSAGES, steps=1, sequence=128), ["A decision."]
    with progress_bar() as bar:
        row = run(setup, bar=bar, notes=notes)
    printed = capsys.readouterr().err
    expected = [
        f"Training on the column messages of {setup.data}.",
        "Training on 10 of 256 tokens (3.9%) in 2 sequences, those of answers; the rest is prompts and padding.",
        "The first trained answer: 'four<|im_end|>'.",
    ]
    assert "\n".join(expected) in printed.partition("loss")[0]
    assert notes == ["A decision.", *expected]
    assert row.notes[:4] == notes
