# SPDX-License-Identifier: Apache-2.0
"""Report forwards that a rule would rebuild from their source, but whose source cannot be read."""

import dis
from collections.abc import Collection
from types import FunctionType
from typing import Any

from torch import nn

from liger_hf.rebinding import innermost, names_in, unwrapped, with_closure
from liger_hf.source import definition_of


def unread(module: nn.Module, names: Collection[str], operators: str, left: str) -> str | None:
    """Return why a rule cannot rewrite this forward; None if its source can be read, or if it has nothing to rewrite.

    names, operators  code that the rule rewrites has one of these names, and all of these operators
    left              the consequence, such as "sums before its norms are left alone"
    """
    forward = innermost(unwrapped(type(module).forward))
    if definition_of(forward) is not None:
        return None
    # A function that is not Python's has no code with names, so use its children's names.
    is_python = isinstance(forward, FunctionType)
    code = _names_and_operators(forward) if is_python else {*module._modules, *operators}
    if not {*operators} <= code or code.isdisjoint(names):
        return None
    if not is_python:
        reason = "it is not a Python function"
    elif forward.__closure__:
        reason = "it has a closure, as super() and decorators without functools.wraps make one"
    else:
        reason = "it has no source (defined with exec, or edited after import); define it in a .py file"
    return f"{type(module).__name__}.forward could not be read, so {left}: {reason}"


def _names_and_operators(function: Any) -> set[str]:
    """Return the names and operators in the code of a function and of the functions in its closure."""
    code: set[str] = set()
    for inner in with_closure(function):
        steps = (step for step in dis.get_instructions(inner.__code__) if step.opname == "BINARY_OP")
        code |= {*names_in(inner.__code__), *(step.argrepr.rstrip("=") for step in steps)}
    return code
