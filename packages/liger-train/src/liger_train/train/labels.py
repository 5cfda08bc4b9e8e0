# SPDX-License-Identifier: Apache-2.0
"""Tokens and labels of conversations, and of prompts and completions: those of TRL's SFTTrainer, and checks of them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import operator
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core.errors import OptionError
from liger_train.configs import config_of, loading_options
from liger_train.setup import Setup
from liger_train.train.rows import ASSISTANT, Rows, conversations

MASKED = -100
# Fields of a message by which files say whether to train on it.
WEIGHTS = ("weight", "train", "training", "loss")
# What torchrun sets: with it, TRL would join the other ranks, each of which reads the same data.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
LONGEST = 80

Example = tuple[str, dict[str, Any]]


def labeled(rows: Rows, tokenizer: Any, setup: Setup, notes: list[str]) -> Tensor:
    """Token sequences and their labels, (number, 2, sequence): one example each, padded, with labels for what is trained.

    Raises OptionError, with the line, for a row that cannot be read, rendered or trained on, and if no answer ends.
    """
    examples = list(conversations(rows))
    first = examples[0][1]
    in_messages = "messages" in first or isinstance(first["prompt"], list)
    if tokenizer is None or (in_messages and getattr(tokenizer, "chat_template", None) is None):
        needed = "whose tokenizer has a chat template" if in_messages else "with a tokenizer"
        raise OptionError(f"train: --data {setup.data} has {' and '.join(rows.columns)}, which need a model {needed}, got {setup.model}")
    by_tags = False
    if in_messages:
        weights = [_weights(place, example) for place, example in examples]
        notes.extend(_unread(examples, tokenizer))
        by_tags = "messages" in first and all(map(all, weights)) and _marks_answers(tokenizer, notes)
        if "messages" in first and not by_tags:
            examples = [answer for example, own in zip(examples, weights, strict=True) for answer in _answers(example, own)]
            left = sum(map(len, weights)) - len(examples)
            lost = f"; left out, without a message before them or with a weight of 0: {left}" if left else ""
            notes.append(f"Each answer is an example of its own, after the messages before it{lost}.")
            if not examples:
                raise OptionError(
                    f"train: --data must have an answer to train on, with a message before it, got {setup.data}, which has none"
                )
        notes.extend(_differing_prompt(examples[0][1], tokenizer))
    table, padding = _prepared(examples, tokenizer, by_tags)
    return _checked(table, padding, tokenizer, setup, notes)


def _weights(place: str, example: dict[str, Any]) -> list[bool]:
    """Whether to train on each answer; a file may leave some out."""
    found: list[bool] = []
    for message in example.get("messages") or example["completion"]:
        own = message["role"] == ASSISTANT
        for name in WEIGHTS:
            value = message.get(name)
            if value is not None and (value not in (0, 1) or (value and not own)):
                raise OptionError(
                    f"{place}: {name} must be 0 or 1 in a message of the assistant, and not 1 in others, got {value} for "
                    f"{message['role']}; without the field, every answer is trained on"
                )
        if own:
            found.append(all(message.get(name) in (None, 1) for name in WEIGHTS))
    if "completion" in example and not all(found):
        raise OptionError(f"{place}: a completion must be trained on, got a message that says not to; leave out the row")
    return found


def _unread(examples: list[Example], tokenizer: Any) -> list[str]:
    """A note on fields that neither TRL nor the chat template reads."""
    names: dict[str, None] = {}
    for _, example in examples:
        for message in example.get("messages") or example["prompt"] + example["completion"]:
            names |= dict.fromkeys(name for name, value in message.items() if value is not None)
        names |= dict.fromkeys(["tools"] if example.get("tools") else [])
    source = str(tokenizer.chat_template)
    unread = [name for name in names if name not in ("role", "content", *WEIGHTS) and not re.search(rf"\b{re.escape(name)}\b", source)]
    return [f"The chat template does not read these fields, which have no effect: {', '.join(unread)}."] if unread else []


def _marks_answers(tokenizer: Any, notes: list[str]) -> bool:
    """Whether a chat template marks answers with their ends, or TRL has one for training in its place."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers, is_chat_template_stop_token_trained

    template = None
    if not has_generation_markers(tokenizer.chat_template):
        try:
            template = get_training_chat_template(tokenizer)
        except ValueError:
            notes.append("The chat template has no {% generation %} tags, and TRL has none for it.")
            return False
        notes.append("The chat template has no {% generation %} tags, so TRL's template with tags for it is used.")
    if is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        return True
    notes.append("The {% generation %} tags of the chat template leave out the token that ends an answer.")
    return False


def _answers(example: Example, weights: list[bool]) -> Iterator[Example]:
    """A prompt and a completion for each answer that is trained."""
    place, row = example
    places = [index for index, message in enumerate(row["messages"]) if message["role"] == ASSISTANT]
    for index, trained in zip(places, weights, strict=True):
        # TRL has no completion without a prompt.
        if index and trained:
            messages = row["messages"]
            yield place, {**row, "messages": None, "prompt": messages[:index], "completion": [messages[index]]}


def _differing_prompt(example: dict[str, Any], tokenizer: Any) -> list[str]:
    """A note if the prompt of the first answer ends otherwise when the model is to answer."""
    messages = example.get("messages") or example["prompt"] + example["completion"]
    index = next(index for index, message in enumerate(messages) if message["role"] == ASSISTANT)
    # What the template refuses is an error later.
    with contextlib.suppress(Exception):
        asked = _rendered(tokenizer, example, messages[:index], add_generation_prompt=True)
        whole = _rendered(tokenizer, example, messages[: index + 1])
        same = len(list(itertools.takewhile(bool, map(operator.eq, asked, whole))))
        if same < len(asked):
            return [f"Prompts end with {asked[same:]!r} when the model is to answer, which the chat template leaves out in training."]
    return []


def _rendered(tokenizer: Any, example: dict[str, Any], messages: list[dict[str, Any]], **options: Any) -> str:
    tools = example.get("tools") or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    options |= example.get("chat_template_kwargs") or {}
    words: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    return words


def _prepared(examples: list[Example], tokenizer: Any, by_tags: bool) -> tuple[Any, int]:
    """The table that SFTTrainer makes of examples, with input_ids and labels, and the token that pads it."""
    from datasets import Dataset, Features, Json
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    names = {name for _, example in examples for name, value in example.items() if value is not None}
    # TRL reads no tools as None, and options as a dict.
    columns = {name: [example.get(name) or ({} if name == "chat_template_kwargs" else None) for _, example in examples] for name in names}
    # As JSON, since Arrow gives every message the fields of all others.
    table = Dataset.from_dict(columns, features=Features({name: Json() for name in names}))
    # Its padding token may be set.
    tokenizer = copy.deepcopy(tokenizer)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    with tempfile.TemporaryDirectory(prefix="liger-train-") as folder, _apart():
        options: dict[str, Any] = {"max_length": None, "assistant_only_loss": by_tags, "report_to": "none", "use_cpu": True, "bf16": False}
        try:
            trainer = SFTTrainer(model, SFTConfig(folder, **options), train_dataset=table, processing_class=tokenizer)
        # A template is anybody's code, and raises what it likes, such as that roles must alternate.
        except Exception as problem:
            raise _refusal(examples, tokenizer, problem) from problem
    return trainer.train_dataset, tokenizer.pad_token_id


def _refusal(examples: list[Example], tokenizer: Any, problem: Exception) -> OptionError:
    """The error for rows that TRL does not prepare, with the place of the first one whose messages the chat template refuses."""
    for place, example in examples:
        prompt = example.get("prompt", [])
        if isinstance(prompt, str):
            break
        try:
            _rendered(tokenizer, example, example.get("messages") or prompt + example["completion"])
            if prompt:
                _rendered(tokenizer, example, prompt, add_generation_prompt=True)
        except Exception as refused:
            reason = str(refused).strip().split("\n")[0] or type(refused).__name__
            return OptionError(f"{place}: the chat template must accept the messages, but it does not: {reason}")
    return OptionError(f"train: --data must have rows that TRL can prepare, but it raises {type(problem).__name__}: {problem}")


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Construct a trainer of TRL without ranks, telemetry, progress bars and warnings; the checks here say what these warn of."""
    import datasets

    environment, level, bars = dict(os.environ), logging.getLogger("trl").level, datasets.is_progress_bar_enabled()
    for name in environment:
        if name in LAUNCHER or name.startswith("ACCELERATE_"):
            del os.environ[name]
    os.environ["CI"] = "1"
    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        logging.getLogger("trl").setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _checked(table: Iterable[dict[str, list[int]]], padding: int, tokenizer: Any, setup: Setup, notes: list[str]) -> Tensor:
    """The examples of a table, padded or cut to the sequence; those that are left without labels are left out."""
    sequences: list[Tensor] = []
    answers: list[Tensor] = []
    cut = without = trained = 0
    for row in table:
        example = torch.tensor([row["input_ids"], row["labels"]])
        answers += _answers_of(example, setup.sequence)
        cut += example.shape[1] > setup.sequence
        example = example[:, : setup.sequence]
        # The first label is that of no prediction.
        count = int((example[1, 1:] != MASKED).sum())
        without += count == 0
        trained += count
        if count:
            filling = torch.tensor([[padding], [MASKED]]).expand(2, setup.sequence - example.shape[1])
            sequences.append(torch.cat([example, filling], 1))
    if not sequences:
        raise OptionError(
            f"train: --data must have answers that begin within --sequence {setup.sequence} tokens, got {setup.data}, which has none"
        )
    number, every = len(sequences), len(sequences) * setup.sequence
    notes.append(
        f"Training on {trained:,} of {every:,} tokens ({trained / every:.1%}) in {number} sequence{'s' * (number > 1)}, those of answers; "
        "the rest is prompts and padding."
    )
    if cut:
        lost = f", {without} of them before the first answer, which were left out" if without else ""
        notes.append(f"Examples longer than --sequence {setup.sequence} were cut: {cut}{lost}.")
    if answers:
        notes.append(f"The first trained answer: {tokenizer.decode(answers[0])[:LONGEST]!r}.")
        notes.extend(_ends(answers, tokenizer, setup))
    return torch.stack(sequences)


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
    ended = sum(token in stops for token in last)
    if ended == len(last):
        return []
    wanted = ", ".join(tokenizer.convert_ids_to_tokens(sorted(stops)))
    other = next(token for token in last if token not in stops)
    if ended:
        return [f"{len(last) - ended} of {len(last)} answers do not end with a token that ends generation ({wanted})."]
    if other in tokenizer.get_added_vocab().values():
        return [f"Answers end with {words[other]}, which does not end generation ({wanted} does); generate with it as eos_token_id."]
    raise OptionError(
        f"train: answers must end with a token that ends generation ({wanted}), got {tokenizer.decode(answers[0])[-LONGEST:]!r} from "
        f"{setup.data}, after which the model would not stop; let the chat template end answers with {{{{ eos_token }}}}"
    )


def _stops(tokenizer: Any, setup: Setup) -> set[int]:
    """The tokens that end generation: those of the tokenizer, the config and the generation config."""
    from transformers import GenerationConfig

    named = [tokenizer.eos_token_id, config_of(setup).get_text_config().eos_token_id]
    with contextlib.suppress(OSError):
        named.append(GenerationConfig.from_pretrained(setup.model, **loading_options(setup)).eos_token_id)
    return {token for each in named if each is not None for token in (each if isinstance(each, list) else [each])}
