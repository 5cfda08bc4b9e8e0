# SPDX-License-Identifier: Apache-2.0
"""Rebuild a function from the same code, with other functions instead of some globals that it calls.

A global of a modeling file is shared by every model of the process, so it is not replaced there. Instead, an instance
gets a forward with a private namespace: a copy of the globals that the code names, in which some are replaced.
"""

from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from liger_hf.private_transformers import CHECKPOINTING

Functions = dict[str, Callable[..., Any]]


def called(function: Any, picked: Callable[[str, Any], bool]) -> Functions:
    """Return the globals of a function that `picked` selects by (name, value), also those of a wrapped function."""
    functions: Functions = {}
    for inner in with_closure(function):
        space = inner.__globals__
        functions |= {n: space[n] for n in names_in(inner.__code__) if n in space and picked(n, space[n])}
    return {name: value for name, value in functions.items() if callable(value)}


def with_closure(function: Any, depth: int = 0) -> Iterator[FunctionType]:
    """Yield a function and those in its closure, such as a function that it wraps."""
    if isinstance(function, FunctionType) and depth <= 4:
        yield function
        for cell in function.__closure__ or ():
            yield from with_closure(_content(cell), depth + 1)


def rebound(function: FunctionType | Any, replaced: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """Return a function with the same code, in which the names in `replaced` refer to other functions."""
    space, cells = function.__globals__, function.__closure__
    names = set(names_in(function.__code__))
    if names & replaced.keys():
        # Without __name__, by which torch.compile would look globals up in the module of that name.
        space = {name: space[name] for name in names - {"__name__"} if name in space}
        space |= {name: replaced[name] for name in names & replaced.keys()}
        space |= {
            "__builtins__": function.__globals__["__builtins__"],
            "__package__": function.__globals__.get("__package__"),
        }
    elif (inner := decorated(function)) is not None:
        return redecorated(rebound(inner, replaced), function)
    else:
        contents = [(cell, _content(cell)) for cell in cells or ()]
        cells = tuple(
            CellType(rebound(f, replaced)) if called(f, lambda name, _: name in replaced) else cell
            for cell, f in contents
        )
    return twin(function, function.__code__, space, cells)


def decorated(function: Any) -> FunctionType | None:
    """Return the function that a decorator has wrapped and calls from its closure; None without such a decorator."""
    inner = function.__dict__.get("__wrapped__") if isinstance(function, FunctionType) else None
    if not isinstance(inner, FunctionType):
        return None
    return inner if any(_content(cell) is inner for cell in function.__closure__ or ()) else None


def innermost(function: Any) -> Any:
    """Return the function itself, without its decorators."""
    while (inner := decorated(function)) is not None:
        function = inner
    return function


def redecorated(inner: FunctionType, function: FunctionType) -> FunctionType:
    """Put the decorators of a function around another one."""
    wrapped = decorated(function)
    if wrapped is None:
        return inner
    inner = redecorated(inner, wrapped)
    cells = tuple(CellType(inner) if _content(cell) is wrapped else cell for cell in function.__closure__ or ())
    outer = twin(function, function.__code__, function.__globals__, cells)
    outer.__dict__["__wrapped__"] = inner
    return outer


def unwrapped(forward: Any) -> Any:
    """Return the forward as its class defines it, without the wrappers that checkpoint it."""
    while isinstance(forward, FunctionType) and forward.__code__ in CHECKPOINTING:
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def same_forward(first: type, second: type) -> bool:
    """Return whether modules of both classes run the same forward.

    FSDP2 and parametrizations change the class of a module, and Transformers wraps the forward of the new class.
    """
    return first is second or _same_unwrapped(first, second)


@torch.compiler.assume_constant_result
def _same_unwrapped(first: Any, second: Any) -> bool:
    return unwrapped(first.forward) is unwrapped(second.forward)


def checkpointed(function: FunctionType, wrapper: FunctionType) -> FunctionType:
    """Put the function into a copy of the wrapper that checkpoints the forward of a class."""
    # A wrapper checkpoints only if it is `type(self).forward`, which must also hold after FSDP2 changes the class.
    outermost = SimpleNamespace(forward=wrapper)
    alone = rebound(wrapper, {"type": lambda module: outermost})
    contents = [(cell, _content(cell)) for cell in wrapper.__closure__ or ()]
    inner = unwrapped(wrapper)
    cells = tuple(
        CellType(function) if unwrapped(content) is inner and content is not wrapper else cell
        for cell, content in contents
    )
    return twin(alone, alone.__code__, alone.__globals__, cells)


def twin(
    function: FunctionType, code: CodeType, space: dict[str, Any], cells: tuple[CellType, ...] | None
) -> FunctionType:
    """Return a function with another one's name, docstring and defaults, but its own code, globals and closure."""
    copied = FunctionType(code, space, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    copied.__doc__, copied.__module__ = function.__doc__, function.__module__
    return copied


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the globals and attributes that the code names, including those in nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
