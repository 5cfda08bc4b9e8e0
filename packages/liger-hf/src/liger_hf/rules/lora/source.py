# SPDX-License-Identifier: Apache-2.0
"""Find children that a forward always calls with the same input in its source, and rebuild the forward.

                                       parts = together((self.q, self.k), x)
    q = self.q(x).view(shape)          q = take(parts, 0).view(shape)
    k = self.k(x).view(shape)    →     k = take(parts, 1).view(shape)

The input is an argument. Besides these calls, the forward only reads its shape, so it is the same in all of them.
"""

import ast
import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

from liger_hf.source import assign, call, copy_of, definition_of, load, rebuilt

TOGETHER, TAKE = "__liger_together__", "__liger_take__"
# Code inside these nodes may run more than once, or never.
CONDITIONAL = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.BoolOp, ast.Lambda, ast.comprehension)
# Statements in which a call runs after the statements before them, and once.
SIMPLE = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)


def sharing(forward: Callable[..., Any]) -> dict[str, list[str]]:
    """Return argument of a forward → the children that it always calls with this argument alone.

    Besides these calls, the forward may only read the shape, dtype and device of the argument.
    """
    definition = definition_of(inspect.unwrap(forward))
    calls = {} if definition is None else _calls(definition)
    return {argument: [_child(each) for each in group] for argument, group in calls.items()}


def with_shared_inputs(
    function: Any, chosen: Collection[str], helpers: Mapping[str, Callable[..., Any]]
) -> FunctionType | None:
    """Rebuild the function with the helpers instead of calls of the chosen children; None if no two share an input."""
    if definition_of(function) is None:
        return None
    definition = copy_of(function)
    groups = list(_groups(definition, chosen))
    for number, (first, argument, calls) in enumerate(groups):
        _rewrite(definition, first, argument, calls, f"__liger_parts_{number}__")
    return rebuilt(function, definition, helpers) if groups else None


def _calls(function: ast.FunctionDef) -> dict[str, list[ast.Call]]:
    calls: dict[str, list[ast.Call]] = {argument.arg: [] for argument in function.args.args[1:]}
    sometimes = {id(child) for node in ast.walk(function) if isinstance(node, CONDITIONAL) for child in ast.walk(node)}
    allowed: set[int] = set()
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name() as value, attr="shape" | "dtype" | "device"):
                allowed.add(id(value))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self")), args=[ast.Name() as argument], keywords=[]):
                if argument.id in calls and id(node) not in sometimes:
                    calls[argument.id].append(node)
                    allowed.add(id(argument))
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and id(node) not in allowed}
    return {
        name: group
        for name, group in calls.items()
        if name not in used and len({*map(_child, group)}) == len(group) > 1
    }


def _child(node: ast.Call) -> str:
    assert isinstance(node.func, ast.Attribute)
    return node.func.attr


def _groups(definition: ast.FunctionDef, chosen: Collection[str]) -> Iterator[tuple[ast.stmt, str, list[ast.Call]]]:
    """Yield, for each group of calls to rewrite, the first statement with a call, the argument, and the calls."""
    statement_of = {id(node): s for s in definition.body if isinstance(s, SIMPLE) for node in ast.walk(s)}
    for argument, calls in _calls(definition).items():
        group = [each for each in calls if _child(each) in chosen and id(each) in statement_of]
        # In running order, which random numbers and hooks depend on.
        group.sort(key=lambda each: (each.lineno, each.col_offset))
        if len(group) > 1:
            yield min((statement_of[id(each)] for each in group), key=definition.body.index), argument, group


def _rewrite(definition: ast.FunctionDef, first: ast.stmt, argument: str, calls: list[ast.Call], parts: str) -> None:
    children = ast.Tuple([copy.deepcopy(each.func) for each in calls], ast.Load())
    definition.body.insert(definition.body.index(first), assign(parts, call(TOGETHER, children, load(argument)), first))
    for index, taken in enumerate(calls):
        taken.func, taken.args = load(TAKE), [load(parts), ast.Constant(index)]
