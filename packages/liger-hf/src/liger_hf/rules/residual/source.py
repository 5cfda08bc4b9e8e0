# SPDX-License-Identifier: Apache-2.0
"""Sums that a forward hands straight to a norm, found in its source, and the forward rebuilt with each such pair as one call.

    x = a + b                                              y, x = one_call(self.norm, a, b)
    r = x                     (or nothing)      →          r = x
    y = self.norm(x)

Only these statements, one behind the other, of plain names. Whatever the pair is called and whatever a and b are, the new
statements leave every name what the old ones do, if one_call returns (self.norm(a + b), a + b).
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from liger_hf.rebinding import twin

HELPER = "__liger_add_norm__"
_definitions: WeakKeyDictionary[FunctionType, ast.FunctionDef | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Step:
    """Statements `first` to `last` of a block: the sum, its copies, and the norm of it."""

    block: list[ast.stmt]
    first: int
    last: int
    norm: ast.Attribute
    left: ast.expr
    right: ast.expr
    total: str
    copies: tuple[str, ...]
    result: str


def norms_of_sums(function: Any) -> tuple[str, ...]:
    """The attributes of self that a forward calls with a sum right after it was added."""
    definition = _definition(function)
    return () if definition is None else tuple(dict.fromkeys(step.norm.attr for step in _steps(definition)))


def with_one_call(function: FunctionType, names: tuple[str, ...], one_call: Callable[..., Any]) -> FunctionType:
    """The function with `one_call(self.norm, a, b) -> (normed, sum)` for the norms of these names; its globals stay its own."""
    definition = copy.deepcopy(_definition(function))
    assert definition is not None
    # From the end of each block: places of the steps before stay what they are.
    for step in reversed([step for step in _steps(definition) if step.norm.attr in names]):
        step.block[step.first : step.last + 1] = _one_step(step)
    return twin(function, _compiled(function, definition, (HELPER,)), function.__globals__, (CellType(one_call),))


# -- source


def _definition(function: Any) -> ast.FunctionDef | None:
    """The source of a function; None if it cannot be found, or if it now is the source of something else."""
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    if function not in _definitions:
        _definitions[function] = _parsed(function)
    return _definitions[function]


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        # The source of the code: that of the function would be the source of the function that it wraps.
        lines, start = inspect.getsourcelines(function.__code__)
        # A block around it instead of less indentation, which would change strings of several lines.
        (whole,) = ast.parse("".join(("if True:\n" if lines[0][:1].isspace() else "\n", *lines))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    definition = whole.body[0] if isinstance(whole, ast.If) else whole
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return None
    ast.increment_lineno(definition, start - 2)
    return definition if _alike(_compiled(function, definition, ()), function.__code__) else None


def _compiled(function: FunctionType, definition: ast.FunctionDef, free: tuple[str, ...]) -> CodeType:
    """The code of the definition, with these names free. Nothing is run: decorators, defaults and annotations stay behind."""
    outer = ast.parse(f"def outer({', '.join(free)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition]
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(ast.Module([outer], []), function.__code__.co_filename, "exec", flags, dont_inherit=True)
    for name in ("outer", definition.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code


def _alike(one: CodeType, other: CodeType) -> bool:
    """The same instructions, wherever they were written."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars")
    if any(getattr(one, part) != getattr(other, part) for part in parts):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=False)
    return len(one.co_consts) == len(other.co_consts) and all(
        _alike(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b for a, b in pairs
    )


# -- statements


def _steps(definition: ast.FunctionDef) -> Iterator[Step]:
    module = definition.args.args[0].arg
    for node in ast.walk(definition):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from _steps_of(block, module)


def _steps_of(block: list[ast.stmt], module: str) -> Iterator[Step]:
    for first, statement in enumerate(block):
        match _assignment(statement):
            case (total, ast.BinOp(op=ast.Add(), left=left, right=right)):
                copies: list[str] = []
                for last, later in enumerate(block[first + 1 :], first + 1):
                    match _assignment(later):
                        case (name, ast.Name(id=source)) if source == total:
                            copies.append(name)
                            continue
                        case (
                            result,
                            ast.Call(func=ast.Attribute(value=ast.Name(id=of)) as norm, args=[ast.Name(id=source)], keywords=[]),
                        ) if (of, source) == (module, total) and result not in copies:
                            yield Step(block, first, last, norm, left, right, total, tuple(copies), result)
                    break


def _assignment(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, value
    return None


def _one_step(step: Step) -> list[ast.stmt]:
    """No name holds the normed rows or the sum longer than before."""
    # The norm's result may take the name of the sum, which then lives in its copies, or nowhere.
    holders = [name for name in dict.fromkeys((step.total, *step.copies)) if name != step.result]
    call = ast.Call(ast.Name(HELPER, ast.Load()), [step.norm, step.left, step.right], [])
    if not holders:
        value = ast.Subscript(call, ast.Constant(0), ast.Load())
        statements: list[ast.stmt] = [ast.Assign([ast.Name(step.result, ast.Store())], value)]
    else:
        pair = ast.Tuple([ast.Name(name, ast.Store()) for name in (step.result, holders[0])], ast.Store())
        statements = [ast.Assign([pair], call)]
        statements += [ast.Assign([ast.Name(name, ast.Store())], ast.Name(holders[0], ast.Load())) for name in holders[1:]]
    for statement in statements:
        ast.copy_location(statement, step.block[step.first])
        ast.fix_missing_locations(statement)
    return statements
