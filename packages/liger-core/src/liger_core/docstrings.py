# SPDX-License-Identifier: Apache-2.0
"""Docstrings as data: their paragraphs, and the aligned rows *name  meaning*."""

import inspect
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

# `name`, or `name, name`, then at least two spaces. After a known name, one space is enough.
NAMES = r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*"
ALIGNED = re.compile(rf"({NAMES}) {{2,}}(\S.*)")


class Entry(NamedTuple):
    """The names of one row, and the lines that describe them."""

    names: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(line.strip() for line in self.lines).strip()


def parts(docstring: str, known: Collection[str] = ()) -> Iterator[str | list[Entry]]:
    """Yield the paragraphs of a docstring in order; a paragraph of aligned rows is a list of entries."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        yield from _split(block, {*known, "returns"})


def _split(block: str, known: Collection[str]) -> Iterator[str | list[Entry]]:
    """Yield the paragraphs of a block: aligned rows may follow text without an empty line."""
    text: list[str] = []
    entries: list[Entry] = []
    lines = block.splitlines()
    for number, line in enumerate(lines):
        entry = _entry(line, known, lines[number + 1] if number + 1 < len(lines) else "")
        if entry is not None:
            entries.append(entry)
        elif entries and line.startswith("  "):
            last = entries.pop()
            entries.append(Entry(last.names, (*last.lines, line)))
        elif entries:
            # Text after rows begins a new paragraph.
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
        return Entry(tuple(aligned[1].split(", ")), (aligned[2],))
    names = re.match(NAMES, line)
    if names is None or not set(names[0].split(", ")) <= set(known):
        return None
    rest = line[names.end() :]
    if rest.strip():
        # This is `returns (…)`, not a sentence that begins with the name of an argument.
        return Entry(tuple(names[0].split(", ")), (rest.strip(),)) if rest.startswith(" (") else None
    return Entry(tuple(names[0].split(", ")), ("",)) if after.startswith("  ") else None
