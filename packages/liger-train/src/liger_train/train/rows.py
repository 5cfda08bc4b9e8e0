# SPDX-License-Identifier: Apache-2.0
"""Rows of a file or a saved dataset: conversations, prompts and completions, or texts."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_core.errors import OptionError

# The columns that are trained on: the first of these that a table has.
TEXT = ("text",)
PAIRS = ("prompt", "completion")
SHAPES = (("messages",), ("conversations",), PAIRS, TEXT)
WANTED = "messages, conversations, prompt and completion, or text"
FILES_OF_ROWS = (".json", ".jsonl", ".parquet", ".csv")
# Further columns, which go to the chat template.
OPTIONS = ("tools", "chat_template_kwargs")
ASSISTANT = "assistant"
# The roles of ShareGPT, which TRL leaves as they are.
ROLES = {"human": "user", "gpt": ASSISTANT}
NAMED = 60


@dataclass(frozen=True)
class Rows:
    """Rows, each with its place in the source for errors, and the names of the columns that are trained on and that are not."""

    source: str
    columns: tuple[str, ...]
    unused: list[str]
    placed: Iterator[tuple[str, dict[str, Any]]]

    def described(self) -> str:
        """A sentence that says what is read."""
        columns = f"the column{'s' if len(self.columns) > 1 else ''} {' and '.join(self.columns)}"
        return f"Training on {columns} of {self.source}" + (f"; not used: {', '.join(self.unused)}." if self.unused else ".")

    def texts(self) -> Iterator[str]:
        """The texts of a table with a column of them."""
        for place, row in self.placed:
            text = row["text"]
            if not isinstance(text, str | None):
                raise OptionError(f"{place}: text must be a string, got {shortened(text)}")
            if text:
                yield text


def open_rows(source: str, notes: list[str]) -> Rows | None:
    """The rows of a file of JSON, Parquet or CSV or of a dataset written by `save_to_disk`; None for any other source, which is text."""
    path = Path(source).expanduser()
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        placed = _numbered(source, _saved(path, notes))
    elif path.is_file() and path.suffix in FILES_OF_ROWS[:2]:
        placed = _json(path, f"train: --data {source}")
    elif path.is_file() and path.suffix in FILES_OF_ROWS:
        kind = library("datasets", source).Dataset
        placed = _numbered(source, (kind.from_parquet if path.suffix == ".parquet" else kind.from_csv)(str(path)))
    else:
        return None
    first = next(placed, None)
    if first is None:
        raise OptionError(f"train: --data must have rows, got {source}, which has none")
    place, row = first
    columns = next((shape for shape in SHAPES if isinstance(row, dict) and row.keys() >= {*shape}), None)
    if columns is None:
        there = f"the columns {', '.join(row)}" if isinstance(row, dict) else shortened(row)
        raise OptionError(f"{place}: a row must have {WANTED}, got {there}; rename a column, or give text as a .txt file")
    used = {*columns, *(OPTIONS if columns != TEXT else ())}
    return Rows(source, columns, [name for name in row if name not in used], _alike(first, placed, columns))


def library(name: str, source: str) -> Any:
    """A library that reads rows."""
    if importlib.util.find_spec(name) is None:
        raise OptionError(f"train: --data {source} needs {name}, not installed here; pip install 'liger-train[{name}]'")
    return importlib.import_module(name)


def shortened(value: Any) -> str:
    """The beginning of a value, for errors."""
    words = json.dumps(value, ensure_ascii=False, default=str)
    return words if len(words) <= NAMED else words[:NAMED] + "…"


def _saved(folder: Path, notes: list[str]) -> Any:
    """A dataset in a folder; of several splits, `train`."""
    found = library("datasets", str(folder)).load_from_disk(str(folder))
    if isinstance(found, dict):
        split = "train" if "train" in found else next(iter(found))
        notes.append(f"Training on the split {split!r} of the dataset {folder}.")
        found = found[split]
    return found


def _numbered(source: str, table: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(table, start=1):
        yield f"train: --data {source}, row {number}", row


def _json(path: Path, place: str) -> Iterator[tuple[str, Any]]:
    """The rows of a file of JSON lines, or of one array."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        if first.lstrip().startswith("["):
            for number, row in enumerate(_parsed(file.read(), place, 1), start=1):
                yield f"{place}, row {number}", row
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{place}, line {number}", _parsed(line, place, number)


def _parsed(words: str, place: str, line: int) -> Any:
    try:
        return json.loads(words)
    except json.JSONDecodeError as problem:
        bad = words.split("\n")[problem.lineno - 1].strip()[:NAMED]
        raise OptionError(
            f"{place}, line {line + problem.lineno - 1}: must be JSON, a row on each line or an array of rows, got {bad!r} "
            f"({problem.msg}); to train on the text of the file as it is, give it another suffix"
        ) from None


def _alike(first: tuple[str, Any], others: Iterator[tuple[str, Any]], columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows, all with the columns of the first one."""
    yield first
    for place, row in others:
        if not isinstance(row, dict) or not row.keys() >= {*columns}:
            there = ", ".join(row) if isinstance(row, dict) else shortened(row)
            raise OptionError(f"{place}: must have {' and '.join(columns)}, as the rows before, got {there}")
        yield place, row


def conversations(rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with messages, or with prompt and completion, that were checked, in the names that TRL reads."""
    convert = library("trl", rows.source).maybe_convert_to_chatml
    kinds: set[type] = set()
    for place, row in rows.placed:
        example = {name: row[name] for name in (*rows.columns, *OPTIONS) if row.get(name) is not None}
        kinds |= {type(example.get(name)) for name in rows.columns}
        if len(kinds) > 1 or not kinds <= ({str, list} if rows.columns == PAIRS else {list}):
            wanted = "strings or lists of messages, the same in every row" if rows.columns == PAIRS else "a list of messages"
            raise OptionError(f"{place}: {' and '.join(rows.columns)} must be {wanted}, got {shortened(row)}")
        if kinds == {list}:
            example = convert(example)
            for name in example.keys() - {*OPTIONS}:
                _check_messages(example[name], f"{place}: {name}")
            roles = list(dict.fromkeys(message["role"] for message in example["completion" if rows.columns == PAIRS else "messages"]))
            if ASSISTANT not in roles:
                raise OptionError(f"{place}: must have a message of the role assistant, on which to train, got {', '.join(roles)}")
            if rows.columns == PAIRS and len(roles) > 1:
                raise OptionError(
                    f"{place}: completion must have messages of the assistant alone, since all of it is trained on, got {', '.join(roles)}; "
                    "give the conversation as messages"
                )
        yield place, example


def _check_messages(messages: list[Any], place: str) -> None:
    if not messages:
        raise OptionError(f"{place} must have messages, got none")
    for index, message in enumerate(messages, start=1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not ("content" in message or "tool_calls" in message)
        ):
            raise OptionError(f"{place}: message {index} must have a role and content, got {shortened(message)}")
        message["role"] = ROLES.get(message["role"], message["role"])
