# SPDX-License-Identifier: Apache-2.0
"""Docstrings of generated modules, made from those of their ops: what goes to the constructor, what to the call, which parameters there are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from liger_core import losses, ops
from liger_core.docstrings import RETURNS, Entry, parts
from liger_core.op import Op

# How a docstring says that another one describes an argument.
ELSEWHERE = re.compile(r"\b(?:as in|those of) (\w+)")
CONSTRUCTOR = "The constructor takes these arguments, and raises OptionError for values that no call could take:"


class Section(NamedTuple):
    """A sentence, and the rows that it announces."""

    title: str
    rows: list[Entry]


def docstring(function: Any, sections: Iterable[Section]) -> str:
    """What the function computes, then a section for each side of the module."""
    shown = [*_beginning(function), f"This is `{_name(function)}` as a module."]
    for title, rows in sections:
        column = 2 + max((len(", ".join(row.names)) for row in rows), default=0)
        shown += [title, *(["\n".join(row.aligned(column) for row in rows)] if rows else [])]
    return "\n\n".join(shown) + "\n"


def of_options(function: Any, names: Iterable[str]) -> Section:
    names = list(names)
    if not names:
        return Section("The constructor takes no arguments.", [])
    return Section(CONSTRUCTOR, rows_of(function, names))


def of_call(function: Any, names: Iterable[str]) -> Section:
    return Section("The call takes:", rows_of(function, [*names, RETURNS]))


def rows_of(function: Any, names: Iterable[str]) -> list[Entry]:
    """A row for each name; names that a docstring describes together stay together."""
    rows: list[Entry] = []
    for name in names:
        lines = _lines(function, name) or (f"an argument of `{_name(function)}`",)
        if rows and rows[-1].lines == lines:
            rows[-1] = Entry((*rows[-1].names, name), lines)
        else:
            rows.append(Entry((name,), lines))
    return rows


def _name(function: Any) -> str:
    """A partial has none."""
    return str(getattr(function, "__name__", type(function).__name__))


def _beginning(function: Any) -> list[str]:
    """The summary and the formula: what stands before the rows."""
    shown = []
    for part in _parts(function):
        if not isinstance(part, str):
            break
        shown.append(part)
    return shown[:1] + [part for part in shown[1:] if part.startswith(" ")]


def _lines(function: Any, name: str, seen: tuple[Any, ...] = ()) -> tuple[str, ...] | None:
    """What a docstring says about an argument, or the first that it refers to; of an op, any op that has such an option."""
    own = next((row for part in _parts(function) if isinstance(part, list) for row in part if name in row.names), None)
    if own is not None and not re.fullmatch(ELSEWHERE, own.text):
        return own.lines
    others = [_functions()[other] for other in ELSEWHERE.findall(own.text if own else function.__doc__ or "") if other in _functions()]
    if isinstance(function, Op) and not seen:
        others += [other for other in vars(ops).values() if isinstance(other, Op)]
    seen = (*seen, function)
    found = (_lines(other, name, seen) for other in others if other not in seen)
    return next((lines for lines in found if lines is not None), None)


@cache
def _functions() -> Mapping[str, Any]:
    found = {**vars(losses), **vars(ops)}
    return {name: value for name, value in found.items() if isinstance(value, Op) or inspect.isfunction(value)}


@cache
def _parts(function: Callable[..., Any]) -> list[str | list[Entry]]:
    # Without it under python -OO.
    return list(parts(function.__doc__ or ""))
