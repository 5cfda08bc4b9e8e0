# SPDX-License-Identifier: Apache-2.0
"""Tokens and labels of conversations, and of prompts and completions: those of TRL's SFTTrainer, and checks of them."""

from __future__ import annotations

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
from liger_train.setup import Setup
from liger_train.train.rows import ASSISTANT, Row, Rows, conversations

MASKED = -100
# Fields of a message by which files say whether to train on it.
WEIGHTS = ("weight", "train", "training", "loss")
# What torchrun and accelerate set: with it, TRL would join the other ranks, each of which reads the same data.
LAUNCHER = re.compile("RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|ACCELERATE_.*")
LONGEST = 80


def labeled(rows: Rows, tokenizer: Any, setup: Setup, notes: list[str]) -> list[Tensor]:
    """The tokens and labels of each example, (2, tokens), cut to the sequence; without those that are left without
    labels.

    Raises OptionError, with the line, for a row that cannot be read, rendered or trained on, and if no answer ends.
    """
    if setup.cp > 1:
        raise OptionError(
            f"train: --data {setup.data} has {' and '.join(rows.columns)}, and --cp {setup.cp} shards text; use --cp 1"
        )
    examples = list(conversations(rows))
    first = examples[0][1]
    in_messages = "messages" in first or isinstance(first["prompt"], list)
    if tokenizer is None or (in_messages and getattr(tokenizer, "chat_template", None) is None):
        needed = "whose tokenizer has a chat template" if in_messages else "with a tokenizer"
        raise OptionError(
            f"train: --data {setup.data} has {' and '.join(rows.columns)}, which need a model {needed}, got "
            f"{setup.model}"
        )
    by_tags = False
    if in_messages:
        weights = [_weights(location, example) for location, example in examples]
        notes.extend(_unread(examples, tokenizer))
        by_tags = "messages" in first and all(map(all, weights)) and _marks_answers(tokenizer, notes)
        if "messages" in first and not by_tags:
            examples = [
                answer for example, flags in zip(examples, weights, strict=True) for answer in _answers(example, flags)
            ]
            left = sum(map(len, weights)) - len(examples)
            lost = f"; left out, without a message before them or with a weight of 0: {left}" if left else ""
            notes.append(f"Each answer is an example of its own, after the messages before it{lost}.")
        if not examples:
            raise OptionError(
                f"train: --data must have an answer to train on, with a message before it, got {setup.data}, which has "
                "none"
            )
        notes.extend(_differing_prompt(examples[0][1], tokenizer))
    # TRL sets a padding token where there is none.
    with tempfile.TemporaryDirectory(prefix="liger-train-") as folder, quiet_trl():
        prepared = _prepared(examples, copy.deepcopy(tokenizer), by_tags, folder)
    return _checked(prepared, tokenizer, setup, notes)


def _messages(example: dict[str, Any]) -> list[dict[str, Any]]:
    return example.get("messages") or example["prompt"] + example["completion"]


def _weights(location: str, example: dict[str, Any]) -> list[bool]:
    """Whether to train on each answer; a file may leave some out."""
    weights: list[bool] = []
    for message in example.get("messages") or example["completion"]:
        named = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
        is_answer = message["role"] == ASSISTANT
        for name, value in named.items():
            if value not in (0, 1) or (value and not is_answer):
                raise OptionError(
                    f"{location}: {name} must be 0 or 1 in a message of the assistant, and not 1 in others, got "
                    f"{value} for {message['role']}; without the field, every answer is trained on"
                )
        if is_answer:
            weights.append(all(named.values()))
    if "completion" in example and not all(weights):
        raise OptionError(
            f"{location}: a completion must be trained on, got a message that says not to; leave out the row"
        )
    return weights


def _unread(examples: list[Row], tokenizer: Any) -> list[str]:
    """A note on fields that neither TRL nor the chat template reads."""
    fields = ([*_messages(example), {"tools": example.get("tools") or None}] for _, example in examples)
    names = dict.fromkeys(
        name for each in fields for message in each for name, value in message.items() if value is not None
    )
    source = str(tokenizer.chat_template)
    unread = [
        name
        for name in names
        if name not in ("role", "content", *WEIGHTS) and not re.search(rf"\b{re.escape(name)}\b", source)
    ]
    return (
        [f"The chat template does not read these fields, which have no effect: {', '.join(unread)}."] if unread else []
    )


def _marks_answers(tokenizer: Any, notes: list[str]) -> bool:
    """Whether a chat template marks answers with their ends, or TRL has one for training in its place."""
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
            notes.append("The chat template has no {% generation %} tags, and TRL has none for it.")
            return False
        notes.append("The chat template has no {% generation %} tags, so TRL's template with tags for it is used.")
    trained: bool = is_chat_template_stop_token_trained(tokenizer, chat_template=template)
    if not trained:
        notes.append("The {% generation %} tags of the chat template leave out the token that ends an answer.")
    return trained


def _answers(example: Row, weights: list[bool]) -> Iterator[Row]:
    """A prompt and a completion for each answer that is trained."""
    location, row = example
    indices = [index for index, message in enumerate(row["messages"]) if message["role"] == ASSISTANT]
    for index, trained in zip(indices, weights, strict=True):
        # TRL has no completion without a prompt.
        if index and trained:
            messages = row["messages"]
            yield location, {**row, "messages": None, "prompt": messages[:index], "completion": [messages[index]]}


def _differing_prompt(example: dict[str, Any], tokenizer: Any) -> list[str]:
    """A note if the prompt of the first answer ends otherwise when the model is to answer."""
    from trl.data_utils import common_prefix_length

    messages = _messages(example)
    index = next(index for index, message in enumerate(messages) if message["role"] == ASSISTANT)
    options = {"tools": example.get("tools") or None, "tokenize": False, **(example.get("chat_template_kwargs") or {})}
    # What the template refuses is an error later.
    with contextlib.suppress(Exception):
        options["tools"] = json.loads(options["tools"]) if isinstance(options["tools"], str) else options["tools"]
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **options)
        in_training = tokenizer.apply_chat_template(messages[: index + 1], **options)
        if differing := prompt[common_prefix_length(prompt, in_training) :]:
            return [
                f"Prompts end with {differing!r} when the model is to answer, which the chat template leaves out in "
                "training."
            ]
    return []


def _prepared(examples: list[Row], tokenizer: Any, by_tags: bool, folder: str) -> Any:
    """The table that SFTTrainer makes of examples, with input_ids and labels."""
    from datasets import Dataset, Features, Json
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    names = {name for _, example in examples for name, value in example.items() if value is not None}
    # TRL reads no tools as None, and options as a dict.
    columns = {
        name: [example.get(name) or ({} if name == "chat_template_kwargs" else None) for _, example in examples]
        for name in names
    }
    # As JSON, since Arrow gives every message the fields of all others.
    table = Dataset.from_dict(columns, features=Features({name: Json() for name in names}))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    arguments = SFTConfig(
        folder, max_length=None, assistant_only_loss=by_tags, report_to="none", use_cpu=True, bf16=False
    )
    try:
        return SFTTrainer(model, arguments, train_dataset=table, processing_class=tokenizer).train_dataset
    # A template is anybody's code, and raises what it likes, such as that roles must alternate.
    except Exception as problem:
        # The first half that fails has the first row that does.
        for half in (examples[: len(examples) // 2], examples[len(examples) // 2 :]) if len(examples) > 1 else ():
            _prepared(half, tokenizer, by_tags, folder)
        reason = str(problem).strip().split("\n")[0] or type(problem).__name__
        what = (
            "TRL must accept the row"
            if isinstance(examples[0][1].get("prompt"), str)
            else "the chat template must accept the messages"
        )
        raise OptionError(f"{examples[0][0]}: {what}, but it does not: {reason}") from problem


@contextlib.contextmanager
def quiet_trl() -> Iterator[None]:
    """Call TRL without ranks, telemetry, progress bars and warnings; the checks here say what these warn of."""
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


def _checked(table: Any, tokenizer: Any, setup: Setup, notes: list[str]) -> list[Tensor]:
    """The examples of a table, cut to the sequence, without those that are left without labels; notes on what is
    trained."""
    whole = [torch.tensor([row["input_ids"], row["labels"]]) for row in table]
    answers = [answer for example in whole for answer in _answers_of(example, setup.sequence)]
    # The first label is that of no prediction.
    examples = [example[:, : setup.sequence] for example in whole if (example[1, 1 : setup.sequence] != MASKED).any()]
    if not examples:
        raise OptionError(
            f"train: --data must have answers that begin within --sequence {setup.sequence} tokens, got {setup.data}, "
            "which has none"
        )
    number, every = len(examples), sum(example.shape[1] if setup.packing else setup.sequence for example in examples)
    trained = sum(int((example[1, 1:] != MASKED).sum()) for example in examples)
    notes.append(
        f"Training on {trained:,} of {every:,} tokens ({trained / every:.1%}) in {number} "
        f"{'document' if setup.packing else 'sequence'}"
        f"{'s' * (number > 1)}, those of answers; the rest is prompts{'' if setup.packing else ' and padding'}."
    )
    if cut := sum(example.shape[1] > setup.sequence for example in whole):
        without = len(whole) - number
        lost = f", {without} of them before the first answer, which were left out" if without else ""
        notes.append(f"Examples longer than --sequence {setup.sequence} were cut: {cut}{lost}.")
    if answers:
        notes.append(f"The first trained answer: {tokenizer.decode(answers[0])[:LONGEST]!r}.")
        notes.extend(_ends(answers, tokenizer, setup))
    return examples


def _answers_of(example: Tensor, sequence: int) -> list[Tensor]:
    """The tokens of each answer in an example, without those that are cut."""
    ids, labels = example
    edges = torch.nn.functional.pad(labels != MASKED, (1, 1)).int().diff().nonzero().flatten().view(-1, 2)
    return [ids[first:last] for first, last in edges.tolist() if last <= sequence]


def _ends(answers: list[Tensor], tokenizer: Any, setup: Setup) -> list[str]:
    """A note on answers whose last token does not end generation; OptionError if that is none of them."""
    words = {token: tokenizer.decode([token]) for token in torch.cat(answers).unique().tolist()}
    last = [next((token for token in reversed(answer.tolist()) if words[token].strip()), None) for answer in answers]
    stops = _stops(tokenizer, setup)
    others = [token for token in last if token not in stops]
    wanted = ", ".join(tokenizer.convert_ids_to_tokens(sorted(stops)))
    if not others:
        return []
    if len(others) < len(last):
        return [f"{len(others)} of {len(last)} answers do not end with a token that ends generation ({wanted})."]
    if others[0] in tokenizer.get_added_vocab().values():
        return [
            f"Answers end with {words[others[0]]}, which does not end generation ({wanted} does); generate with it as "
            "eos_token_id."
        ]
    raise OptionError(
        f"train: answers must end with a token that ends generation ({wanted}), got "
        f"{tokenizer.decode(answers[0])[-LONGEST:]!r} from {setup.data}, after which the model would not stop; let the "
        "chat template end answers with {{ eos_token }}"
    )


def _stops(tokenizer: Any, setup: Setup) -> set[int]:
    """The tokens that end generation: those of the tokenizer, the config and the generation config."""
    from transformers import GenerationConfig

    named = [tokenizer.eos_token_id, config_of(setup).get_text_config().eos_token_id]
    with contextlib.suppress(OSError):
        named.append(GenerationConfig.from_pretrained(setup.model, **loading_options(setup)).eos_token_id)
    return {token for each in named if each is not None for token in (each if isinstance(each, list) else [each])}
