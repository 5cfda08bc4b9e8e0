# SPDX-License-Identifier: Apache-2.0
"""Docstrings as Markdown: the aligned rows *name  meaning* become tables; formulas stay code."""

from __future__ import annotations

import re
from collections.abc import Collection

from liger_core.docstrings import Entry, parts


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
