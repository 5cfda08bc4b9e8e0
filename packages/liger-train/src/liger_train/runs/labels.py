# SPDX-License-Identifier: Apache-2.0
"""Tokens and labels of conversations, and of prompts and completions, as TRL's SFTTrainer makes them, with checks."""

import contextlib
import copy
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core.errors import OptionError
from liger_train.configs import config_of, loading_options
from liger_train.errors import SetupError
from liger_train.runs.rows import ASSISTANT, Row, Rows, conversations
from liger_train.setup import Setup

# The label of tokens that are not trained on.
MASKED = -100
# Fields of a message that say whether to train on it.
WEIGHTS = ("weight", "train", "training", "loss")
# Variables of torchrun and accelerate. With them TRL would join the other ranks, but each rank reads all data itself.
LAUNCHER = re.compile("RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|ACCELERATE_.*")
# The maximum length of text that a note or an error quotes.
LONGEST = 80


def labeled(rows: Rows, tokenizer: Any, setup: Setup, notes: list[str]) -> list[Tensor]:
    """Return the tokens and labels (2, tokens) of each example, cut to the sequence, unless that leaves no labels.

    Raises OptionError, with its line, for a row that cannot be read, rendered or trained on, and if no answer ends with
    a token that ends generation.
    """
    if setup.cp > 1:
        raise SetupError(f"--data {setup.data} has {' and '.join(rows.columns)}, but --cp shards text; use --cp 1")
    examples = list(conversations(rows))
    first = examples[0][1]
    in_messages = "messages" in first or isinstance(first["prompt"], list)
    if tokenizer is None or (in_messages and getattr(tokenizer, "chat_template", None) is None):
        needed = "whose tokenizer has a chat template" if in_messages else "with a tokenizer"
        raise SetupError(
            f"--data {setup.data} has {' and '.join(rows.columns)}, which need a model {needed}, got {setup.model}"
        )
    by_tags = False
    if in_messages:
        weights = [_answer_weights(location, example) for location, example in examples]
        notes.extend(_unread_fields(examples, tokenizer))
        by_tags = "messages" in first and all(map(all, weights)) and _marks_answers(tokenizer, notes)
        if "messages" in first and not by_tags:
            examples = [
                answer
                for example, flags in zip(examples, weights, strict=True)
                for answer in _prompts_and_answers(example, flags)
            ]
            left_out = sum(map(len, weights)) - len(examples)
            lost = f"; left out, without a message before them or with a weight of 0: {left_out}" if left_out else ""
            notes.append(f"Each answer is an example of its own, after the messages before it{lost}.")
        if not examples:
            raise SetupError(
                f"--data must have an answer to train on, with a message before it, got {setup.data}, which has none"
            )
        notes.extend(_differing_prompt(examples[0][1], tokenizer))
    # A copy, because TRL sets a padding token if there is none.
    with tempfile.TemporaryDirectory(prefix="liger-train-") as folder, quiet_trl():
        table = _tokenize(examples, copy.deepcopy(tokenizer), by_tags, folder)
    return _cut_and_check(table, tokenizer, setup, notes)


def _messages(example: dict[str, Any]) -> list[dict[str, Any]]:
    return example.get("messages") or example["prompt"] + example["completion"]


def _answer_weights(location: str, example: dict[str, Any]) -> list[bool]:
    """Return whether to train on each answer; fields of messages may exclude some."""
    weights: list[bool] = []
    for message in example.get("messages") or example["completion"]:
        flags = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
        is_answer = message["role"] == ASSISTANT
        for name, value in flags.items():
            if value not in (0, 1) or (value and not is_answer):
                raise OptionError(
                    f"{location}: {name} must be 0 or 1 in a message of the assistant, and not 1 in others, got "
                    f"{value} for {message['role']}; without the field, every answer is trained on"
                )
        if is_answer:
            weights.append(all(flags.values()))
    if "completion" in example and not all(weights):
        raise OptionError(f"{location}: a completion must be trained on, got a message that says not to; leave it out")
    return weights


def _unread_fields(examples: list[Row], tokenizer: Any) -> list[str]:
    """Return a note on fields that neither TRL nor the chat template reads, if there are any."""
    fields = ([*_messages(example), {"tools": example.get("tools") or None}] for _, example in examples)
    names = dict.fromkeys(
        name for each in fields for message in each for name, value in message.items() if value is not None
    )
    template = str(tokenizer.chat_template)
    unread = [
        name
        for name in names
        if name not in ("role", "content", *WEIGHTS) and not re.search(rf"\b{re.escape(name)}\b", template)
    ]
    note = f"The chat template does not read these fields, which have no effect: {', '.join(unread)}."
    return [note] if unread else []


def _marks_answers(tokenizer: Any, notes: list[str]) -> bool:
    """Return whether the chat template, or TRL's version of it for training, marks answers including their ends."""
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    template = None
    if not has_generation_markers(tokenizer.chat_template):
        try:
            template = get_training_chat_template(tokenizer)
        except ValueError:
            notes.append("The chat template has no {% generation %} tags, and TRL has no version of it with tags.")
            return False
        notes.append("The chat template has no {% generation %} tags; TRL's version of it with tags is used.")
    trained: bool = is_chat_template_stop_token_trained(tokenizer, chat_template=template)
    if not trained:
        notes.append("The {% generation %} tags of the chat template leave out the token that ends an answer.")
    return trained


def _prompts_and_answers(example: Row, weights: list[bool]) -> Iterator[Row]:
    """Yield a row with prompt and completion for each answer that is trained on."""
    location, row = example
    indices = [index for index, message in enumerate(row["messages"]) if message["role"] == ASSISTANT]
    for index, trained in zip(indices, weights, strict=True):
        # TRL requires a prompt.
        if index and trained:
            messages = row["messages"]
            yield location, {**row, "messages": None, "prompt": messages[:index], "completion": [messages[index]]}


def _differing_prompt(example: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return a note if the prompt of the first answer ends differently in training and in generation."""
    from trl.data_utils import common_prefix_length

    messages = _messages(example)
    index = next(index for index, message in enumerate(messages) if message["role"] == ASSISTANT)
    options = {"tools": example.get("tools") or None, "tokenize": False, **(example.get("chat_template_kwargs") or {})}
    # If the template rejects the messages, _tokenize raises an error.
    with contextlib.suppress(Exception):
        options["tools"] = json.loads(options["tools"]) if isinstance(options["tools"], str) else options["tools"]
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **options)
        in_training = tokenizer.apply_chat_template(messages[: index + 1], **options)
        if differing := prompt[common_prefix_length(prompt, in_training) :]:
            return [f"In generation, prompts end with {differing!r}, which the chat template leaves out in training."]
    return []


def _tokenize(examples: list[Row], tokenizer: Any, by_tags: bool, folder: str) -> Any:
    """Return the table that SFTTrainer makes of examples, with input_ids and labels."""
    from datasets import Dataset, Features, Json
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    names = {name for _, example in examples for name, value in example.items() if value is not None}
    # TRL expects None for no tools, but a dict for no chat_template_kwargs.
    columns = {
        name: [example.get(name) or ({} if name == "chat_template_kwargs" else None) for _, example in examples]
        for name in names
    }
    # As JSON, because Arrow would give every message the fields of all others.
    table = Dataset.from_dict(columns, features=Features({name: Json() for name in names}))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    config = SFTConfig(folder, max_length=None, assistant_only_loss=by_tags, report_to="none", use_cpu=True, bf16=False)
    try:
        return SFTTrainer(model, config, train_dataset=table, processing_class=tokenizer).train_dataset
    # A template is a user's code, which may raise anything, for instance that roles must alternate.
    except Exception as problem:
        # Bisect: the first half that fails contains the first row that fails.
        for half in (examples[: len(examples) // 2], examples[len(examples) // 2 :]) if len(examples) > 1 else ():
            _tokenize(half, tokenizer, by_tags, folder)
        reason = str(problem).strip().split("\n")[0] or type(problem).__name__
        is_text = isinstance(examples[0][1].get("prompt"), str)
        what = "TRL must accept the row" if is_text else "the chat template must accept the messages"
        raise OptionError(f"{examples[0][0]}: {what}, but it does not: {reason}") from problem


@contextlib.contextmanager
def quiet_trl() -> Iterator[None]:
    """Call TRL without ranks, telemetry, progress bars, and warnings, which the checks of this module replace."""
    import datasets
    from accelerate.utils import clear_environment

    environment = {name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)} | {"CI": "1"}
    level, bars = logging.getLogger("trl").level, datasets.is_progress_bar_enabled()
    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with clear_environment(), warnings.catch_warnings(action="ignore"):
            os.environ.update(environment)
            yield
    finally:
        logging.getLogger("trl").setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _cut_and_check(table: Any, tokenizer: Any, setup: Setup, notes: list[str]) -> list[Tensor]:
    """Return the examples of a table, cut to the sequence, unless that leaves no labels; note what is trained on."""
    uncut = [torch.tensor([row["input_ids"], row["labels"]]) for row in table]
    answers = [answer for example in uncut for answer in _answers_of(example, setup.sequence)]
    # Nothing predicts the first token, so its label does not count.
    examples = [example[:, : setup.sequence] for example in uncut if (example[1, 1 : setup.sequence] != MASKED).any()]
    if not examples:
        raise SetupError(
            f"--data must have answers that begin within --sequence {setup.sequence} tokens, got {setup.data}, "
            "which has none"
        )
    number, every = len(examples), sum(example.shape[1] if setup.packing else setup.sequence for example in examples)
    trained = sum(int((example[1, 1:] != MASKED).sum()) for example in examples)
    notes.append(
        f"Training on {trained:,} of {every:,} tokens ({trained / every:.1%}) in {number} "
        f"{'document' if setup.packing else 'sequence'}"
        f"{'s' * (number > 1)}, those of answers; the rest is prompts{'' if setup.packing else ' and padding'}."
    )
    if cut := sum(example.shape[1] > setup.sequence for example in uncut):
        without = len(uncut) - number
        lost = f", {without} of them before the first answer, which were left out" if without else ""
        notes.append(f"Examples longer than --sequence {setup.sequence} were cut: {cut}{lost}.")
    if answers:
        notes.append(f"The first trained answer: {tokenizer.decode(answers[0])[:LONGEST]!r}.")
        notes.extend(_check_endings(answers, tokenizer, setup))
    return examples


def _answers_of(example: Tensor, sequence: int) -> list[Tensor]:
    """Return the tokens of each answer in an example, without answers that are cut."""
    ids, labels = example
    edges = torch.nn.functional.pad(labels != MASKED, (1, 1)).int().diff().nonzero().flatten().view(-1, 2)
    return [ids[first:last] for first, last in edges.tolist() if last <= sequence]


def _check_endings(answers: list[Tensor], tokenizer: Any, setup: Setup) -> list[str]:
    """Return a note on answers whose last token does not end generation.

    Raises OptionError if no answer ends generation, unless answers end with another token that was added.
    """
    words = {token: tokenizer.decode([token]) for token in torch.cat(answers).unique().tolist()}
    last = [next((token for token in reversed(answer.tolist()) if words[token].strip()), None) for answer in answers]
    stops = _stop_tokens(tokenizer, setup)
    others = [token for token in last if token not in stops]
    expected = ", ".join(tokenizer.convert_ids_to_tokens(sorted(stops)))
    if not others:
        return []
    if len(others) < len(last):
        return [f"{len(others)} of {len(last)} answers do not end with a token that ends generation ({expected})."]
    if others[0] in tokenizer.get_added_vocab().values():
        return [
            f"Answers end with {words[others[0]]}, which does not end generation ({expected} does); generate with it "
            "as eos_token_id."
        ]
    raise SetupError(
        f"answers must end with a token that ends generation ({expected}), got "
        f"{tokenizer.decode(answers[0])[-LONGEST:]!r} from {setup.data}, after which the model would not stop; let the "
        "chat template end answers with {{ eos_token }}"
    )


def _stop_tokens(tokenizer: Any, setup: Setup) -> set[int]:
    from transformers import GenerationConfig

    ids = [tokenizer.eos_token_id, config_of(setup).get_text_config().eos_token_id]
    with contextlib.suppress(OSError):
        ids.append(GenerationConfig.from_pretrained(setup.model, **loading_options(setup)).eos_token_id)
    return {token for each in ids if each is not None for token in (each if isinstance(each, list) else [each])}
