# SPDX-License-Identifier: Apache-2.0
"""Checks for the options of every command: a path is not empty, a number is finite."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

# A command with a smaller limit checks it itself.
LARGEST = 2**32 - 1
Command = TypeVar("Command", bound=Callable[..., Any])


def checked(command: Command) -> Command:
    """Make a command reject empty paths and numbers that are not finite or too large."""
    hints = get_type_hints(command, include_extras=True)
    for hint in hints.values():
        kinds = _kinds(hint)
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, ParameterInfo):
                if Path in kinds:
                    info.parser = path
                elif kinds & {int, float}:
                    info.callback = finite
    command.__annotations__ = hints
    return command


def path(value: str | Path) -> Path:
    """Return an option as a path; an empty one is an error, since Path("") would mean the current folder."""
    if not str(value).strip():
        raise typer.BadParameter("must not be empty, as it is when it is a shell variable that is not set")
    return Path(value)


def finite(value: float | list[float] | None) -> float | list[float] | None:
    """Return the value of an option, or the values of a repeatable one, if every number is finite and not too large."""
    for number in value if isinstance(value, list) else [] if value is None else [value]:
        if not abs(number) <= LARGEST:
            bound = f"must be at most {LARGEST}" if math.isfinite(number) else "must be a finite number"
            raise typer.BadParameter(f"{bound}, got {number}")
    return value


def _kinds(hint: Any) -> set[Any]:
    """Return the types within an annotation: Annotated[list[Path] | None, …] has Path."""
    inside = [kind for kind in get_args(hint) if isinstance(kind, type) or get_args(kind)]
    return {kind for each in inside for kind in _kinds(each)} | {kind for kind in inside if isinstance(kind, type)}
