# SPDX-License-Identifier: Apache-2.0
"""The rows of a file or a saved dataset: conversations, prompts and completions, or texts."""

import importlib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_core.errors import OptionError
from liger_train.errors import SetupError

# The sets of columns to train on; the first that a table has is used.
TEXT, PAIRS = ("text",), ("prompt", "completion")
SHAPES = (("messages",), ("conversations",), PAIRS, TEXT)
FILES_OF_ROWS = (".json", ".jsonl", ".parquet", ".csv")
# More columns, which are passed to the chat template.
OPTIONS = ("tools", "chat_template_kwargs")
ASSISTANT = "assistant"
# Roles of ShareGPT, which TRL does not convert.
ROLES = {"human": "user", "gpt": ASSISTANT}
# The maximum length of a value in an error.
LONGEST = 60

# (location in the source, for errors; the row)
Row = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """Rows with their locations, and the columns to train on."""

    source: str
    columns: tuple[str, ...]
    located: Iterator[Row]

    def texts(self) -> Iterator[str]:
        """Yield the texts of a table with a column `text`."""
        for location, row in self.located:
            if not isinstance(row["text"], str | None):
                raise OptionError(f"{location}: text must be a string, got {shortened(row['text'])}")
            if row["text"]:
                yield row["text"]


def open_rows(source: str, notes: list[str]) -> Rows | None:
    """Return the rows of a JSON, Parquet or CSV file, or of a dataset saved by `save_to_disk`; None for a text.

    Raises OptionError if there are no rows, or no columns to train on.
    """
    path, location = Path(source).expanduser(), f"train: --data {source}"
    located: Iterator[tuple[str, Any]]
    if path.is_file() and path.suffix in FILES_OF_ROWS[:2]:
        located = _json(path, location)
    elif (path.is_file() and path.suffix in FILES_OF_ROWS) or any(
        (path / name).exists() for name in ("dataset_dict.json", "state.json")
    ):
        located = ((f"{location}, row {number}", row) for number, row in enumerate(_table(path, notes), start=1))
    else:
        return None
    first = next(located, None)
    if first is None:
        raise SetupError(f"--data must have rows, got {source}, which has none")
    columns = next((shape for shape in SHAPES if _has(first[1], shape)), None)
    if columns is None:
        raise OptionError(
            f"{first[0]}: a row must have messages, conversations, prompt and completion, or text, got "
            f"{'the columns ' * isinstance(first[1], dict)}{_names(first[1])}; rename a column, or give text as a .txt "
            "file"
        )
    unused = [name for name in first[1] if name not in (*columns, *(() if columns == TEXT else OPTIONS))]
    trained = f"the column{'s' if len(columns) > 1 else ''} {' and '.join(columns)}"
    notes.append(f"Training on {trained} of {source}" + (f"; not used: {', '.join(unused)}." if unused else "."))
    return Rows(source, columns, _check_columns(itertools.chain([first], located), columns))


def library(name: str, source: str) -> Any:
    """Import a library that reads rows.

    Raises OptionError if it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise SetupError(f"--data {source} needs {name}, not installed here; pip install 'liger-train[{name}]'")
    return importlib.import_module(name)


def shortened(value: Any) -> str:
    """Return the beginning of a value, for errors."""
    words = json.dumps(value, ensure_ascii=False, default=str)
    return words if len(words) <= LONGEST else words[:LONGEST] + "…"


def _table(path: Path, notes: list[str]) -> Any:
    """Return the table that datasets reads; of several splits, the one named train, or the first."""
    datasets = library("datasets", str(path))
    if path.is_file():
        return (datasets.Dataset.from_parquet if path.suffix == ".parquet" else datasets.Dataset.from_csv)(str(path))
    table = datasets.load_from_disk(str(path))
    if isinstance(table, dict):
        split = "train" if "train" in table else next(iter(table))
        notes.append(f"Training on the split {split!r} of the dataset {path}.")
        return table[split]
    return table


def _json(path: Path, location: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file of JSON lines, or of one array."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        is_array = next(filter(str.strip, file), "").lstrip().startswith("[")
        file.seek(0)
        for number, words in enumerate([file.read()] if is_array else file, start=1):
            if not words.strip():
                continue
            try:
                parsed = json.loads(words)
            except json.JSONDecodeError as problem:
                bad = words.split("\n")[problem.lineno - 1].strip()[:LONGEST]
                raise OptionError(
                    f"{location}, line {number + problem.lineno - 1}: must be JSON, a row on each line or an array of "
                    f"rows, got {bad!r} "
                    f"({problem.msg}); to train on the text of the file as it is, give it another suffix"
                ) from None
            kind, numbered = ("row", enumerate(parsed, 1)) if is_array else ("line", [(number, parsed)])
            yield from ((f"{location}, {kind} {index}", row) for index, row in numbered)


def _has(row: Any, columns: tuple[str, ...]) -> bool:
    return isinstance(row, dict) and row.keys() >= {*columns}


def _names(row: Any) -> str:
    return ", ".join(row) if isinstance(row, dict) else shortened(row)


def _check_columns(located: Iterable[tuple[str, Any]], columns: tuple[str, ...]) -> Iterator[Row]:
    for location, row in located:
        if not _has(row, columns):
            raise OptionError(f"{location}: must have {' and '.join(columns)}, as the rows before, got {_names(row)}")
        yield location, row


def conversations(rows: Rows) -> Iterator[Row]:
    """Yield checked rows with messages, or with prompt and completion, in the format of TRL."""
    convert = library("trl", rows.source).maybe_convert_to_chatml
    kinds: set[type] = set()
    for location, row in rows.located:
        example = {name: row[name] for name in (*rows.columns, *OPTIONS) if row.get(name) is not None}
        kinds |= {type(example.get(name)) for name in rows.columns}
        if len(kinds) > 1 or not kinds <= ({str, list} if rows.columns == PAIRS else {list}):
            expected = (
                "strings or lists of messages, the same in every row" if rows.columns == PAIRS else "a list of messages"
            )
            raise OptionError(f"{location}: {' and '.join(rows.columns)} must be {expected}, got {shortened(row)}")
        if kinds == {list}:
            _check_messages(convert(example), location)
        yield location, example


def _check_messages(example: dict[str, Any], location: str) -> None:
    for name in example.keys() - {*OPTIONS}:
        if not example[name]:
            raise OptionError(f"{location}: {name} must have messages, got none")
        for index, message in enumerate(example[name], start=1):
            if (
                not _has(message, ("role",))
                or not isinstance(message["role"], str)
                or not message.keys() & {"content", "tool_calls"}
            ):
                raise OptionError(
                    f"{location}: {name}: message {index} must have a role and content, got {shortened(message)}"
                )
            message["role"] = ROLES.get(message["role"], message["role"])
    roles = list(dict.fromkeys(message["role"] for message in example.get("completion") or example["messages"]))
    if ASSISTANT not in roles:
        raise OptionError(f"{location}: must have a message of the assistant to train on, got {', '.join(roles)}")
    if "completion" in example and len(roles) > 1:
        raise OptionError(
            f"{location}: completion must have messages of the assistant alone, since all of it is trained on, got "
            f"{', '.join(roles)}; give the conversation as messages"
        )
