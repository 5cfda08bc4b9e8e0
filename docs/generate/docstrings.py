# SPDX-License-Identifier: Apache-2.0
"""Docstrings as Markdown: the aligned rows *name  meaning* become tables; formulas stay code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

# `name`, or `name, name`, then at least two spaces. A name that is known needs one space only.
NAMES = r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*"
ALIGNED = re.compile(rf"({NAMES}) {{2,}}(\S.*)")
ALONE = re.compile(rf"({NAMES}) {{0,}}")
RETURNS = "returns"


class Entry(NamedTuple):
    """One row: the names, and what the docstring says about them."""

    names: tuple[str, ...]
    text: str


def parts(docstring: str, known: Collection[str] = ()) -> Iterator[str | list[Entry]]:
    """The paragraphs of a docstring in order; a paragraph of aligned rows as a list of entries."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        yield from _split(block, {*known, RETURNS})


def markdown(docstring: str, known: Collection[str] = ()) -> str:
    """The docstring with a table instead of each paragraph of aligned rows."""
    return "\n\n".join(part if isinstance(part, str) else table(part) for part in parts(docstring, known))


def table(entries: list[Entry], head: tuple[str, str] = ("name", "meaning")) -> str:
    rows = [f"| {', '.join(f'`{name}`' for name in entry.names)} | {cell(entry.text)} |" for entry in entries]
    return "\n".join([f"| {head[0]} | {head[1]} |", "| --- | --- |", *rows])


def cell(text: str) -> str:
    """Text for a cell of a Markdown table; columns of the docstring end a clause."""
    text = re.sub(r"(?<=[^\s,;]) {2,}(?=\S)", ", ", text.strip())
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _split(block: str, known: Collection[str]) -> Iterator[str | list[Entry]]:
    """A block of rows may follow text without an empty line."""
    text: list[str] = []
    entries: list[Entry] = []
    lines = block.splitlines()
    for number, line in enumerate(lines):
        entry = _entry(line, known, lines[number + 1] if number + 1 < len(lines) else "")
        if entry is not None:
            entries.append(entry)
        elif entries and line.startswith("  "):
            last = entries.pop()
            entries.append(Entry(last.names, f"{last.text} {line.strip()}".strip()))
        elif entries:
            # Text after rows: another paragraph.
            yield from _paragraphs(text, entries)
            text, entries = [line], []
        else:
            text.append(line)
    yield from _paragraphs(text, entries)


def _paragraphs(text: list[str], entries: list[Entry]) -> Iterator[str | list[Entry]]:
    if text:
        yield "\n".join(text)
    if entries:
        yield entries


def _entry(line: str, known: Collection[str], after: str) -> Entry | None:
    aligned = ALIGNED.match(line)
    if aligned is not None:
        return Entry(tuple(aligned[1].split(", ")), aligned[2])
    names = re.match(NAMES, line)
    if names is None or not set(names[0].split(", ")) <= set(known):
        return None
    rest = line[names.end() :]
    if rest.strip():
        # `returns (…)`; a sentence that begins with the name of an argument is none.
        return Entry(tuple(names[0].split(", ")), rest.strip()) if rest.startswith(" (") else None
    return Entry(tuple(names[0].split(", ")), "") if after.startswith("  ") else None
