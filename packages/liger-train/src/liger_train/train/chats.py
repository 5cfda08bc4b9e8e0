# SPDX-License-Identifier: Apache-2.0
"""Conversations as training data: JSON lines with `messages`, through the chat template of the model's tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_core.errors import OptionError

MASKED = -100
ASSISTANT = "assistant"
# With this tag, a template marks what the assistant wrote.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHAPE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'


@dataclass(frozen=True)
class Chat:
    """A conversation and where it is from, for errors."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str


def holds_chats(source: str) -> bool:
    """Whether a source is a file of JSON lines whose first line is a conversation; other files are text."""
    path = Path(source).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    return '"messages"' in first and first.lstrip().startswith("{")


def read_chats(source: str, tokenizer: Any, model: str, sequence: int, notes: list[str]) -> Tensor:
    """Token sequences and their labels, (number, 2, sequence): one conversation each, padded, with labels for what the assistant wrote.

    Raises OptionError, with the line, for a conversation that cannot be read, rendered or trained on.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise OptionError(f"train: --data {source} has conversations, which need a model whose tokenizer has a chat template, got {model}")
    padding = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    marked = isinstance(tokenizer.chat_template, str) and GENERATION.search(tokenizer.chat_template) is not None
    found: list[Tensor] = []
    cut = without = trained = 0
    for chat in _chats(Path(source).expanduser()):
        ids, written = (_by_mask if marked else _by_prefixes)(tokenizer, chat)
        cut += len(ids) > sequence
        ids, written = ids[:sequence], written[:sequence]
        if not any(written):
            without += 1
            continue
        trained += sum(written)
        missing = sequence - len(ids)
        labels = [token if own else MASKED for token, own in zip(ids, written, strict=True)]
        found.append(torch.tensor([ids + [padding] * missing, labels + [MASKED] * missing]))
    if not found:
        raise OptionError(
            f"train: --data must have conversations whose answers begin within --sequence {sequence} tokens, got {source}, which has none"
        )
    share = trained / (len(found) * sequence)
    notes.append(
        f"Training on {trained} tokens of assistants in {len(found)} conversations, {share:.0%} of all; the rest is prompts and padding."
    )
    if cut:
        lost = f", {without} of them before the first answer, which were left out" if without else ""
        notes.append(f"Conversations longer than --sequence {sequence} were cut: {cut}{lost}.")
    return torch.stack(found)


def _chats(path: Path) -> Iterator[Chat]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _chat(line, f"train: --data {path}, line {number}")


def _chat(line: str, place: str) -> Chat:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise OptionError(f"{place}: must be JSON like {SHAPE}, got {line.strip()[:60]!r}: {problem}") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise OptionError(f"{place}: must have a list of messages like {SHAPE}, got {line.strip()[:60]!r}")
    for index, message in enumerate(messages, start=1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not ("content" in message or "tool_calls" in message)
        ):
            raise OptionError(f"{place}: message {index} must have a role and content, got {json.dumps(message)[:60]}")
    if all(message["role"] != ASSISTANT for message in messages):
        raise OptionError(f"{place}: must have a message of the role assistant, on which to train, got {messages[-1]['role']}")
    return Chat(messages, row.get("tools"), place)


def _by_mask(tokenizer: Any, chat: Chat) -> tuple[list[int], list[bool]]:
    """The tokens, and which of them the template marks as written by the assistant."""
    rendered = _rendered(tokenizer, chat, chat.messages, return_assistant_tokens_mask=True)
    return list(rendered["input_ids"]), [bool(own) for own in rendered["assistant_masks"]]


def _by_prefixes(tokenizer: Any, chat: Chat) -> tuple[list[int], list[bool]]:
    """The tokens, and which of them come after the prompt that precedes each message of the assistant."""
    ids = list(_rendered(tokenizer, chat, chat.messages)["input_ids"])
    written = [False] * len(ids)
    for index, message in enumerate(chat.messages):
        if message["role"] == ASSISTANT:
            # Templates may not accept an empty list.
            before = list(_rendered(tokenizer, chat, chat.messages[:index], add_generation_prompt=True)["input_ids"]) if index else []
            after = list(_rendered(tokenizer, chat, chat.messages[: index + 1])["input_ids"])
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise OptionError(
                    f"{chat.place}: the chat template changes message {index + 1} when others follow, so that its tokens cannot be "
                    "found; use a template with {% generation %} tags, or split the conversation"
                )
            written[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, written


def _rendered(tokenizer: Any, chat: Chat, messages: list[dict[str, Any]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tools=chat.tools, tokenize=True, return_dict=True, **options)
    except Exception as problem:
        # A template is anybody's code, and raises what it likes, such as that roles must alternate.
        reason = str(problem).strip().split("\n")[0] or type(problem).__name__
        raise OptionError(f"{chat.place}: the chat template must accept the messages, but it does not: {reason}") from None
