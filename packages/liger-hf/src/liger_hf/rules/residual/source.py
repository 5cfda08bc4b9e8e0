# SPDX-License-Identifier: Apache-2.0
"""Find sums that a forward passes straight to a norm in its source, and rebuild the forward with one call for each.

    x = a + b                                              y, x = one_call(self.norm, a, b)
    r = x                     (or nothing)      →          r = x
    y = self.norm(x)

    y = self.norm(a + b)                        →          y = one_call(self.norm, a, b)[0]

Only these statements, one directly after the other, with plain names, are rebuilt. If one_call returns
(self.norm(a + b), a + b), every name has the same value afterwards as before.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from liger_hf.source import assign, assignment, call, copy_of, load, once, rebuilt

HELPER = "__liger_add_norm__"


@dataclass(frozen=True)
class SumStep:
    """The statements `first` to `last` of a block, which compute a sum, assign it to `names`, and normalize it."""

    block: list[ast.stmt]
    first: int
    last: int
    norm: ast.Attribute
    left: ast.expr
    right: ast.expr
    names: tuple[str, ...]
    result: str


@once
def norms_of_sums(definition: ast.FunctionDef) -> Iterator[str]:
    """Return the attributes of self that a forward calls with a sum immediately after computing it."""
    return (step.norm.attr for step in _steps(definition))


def with_one_call(function: FunctionType, names: tuple[str, ...], one_call: Callable[..., Any]) -> FunctionType:
    """Rebuild the function with `one_call(self.norm, a, b) -> (normed, sum)` for the named norms; its globals stay."""
    definition = copy_of(function)
    # From the end of each block, so the indices of earlier steps stay valid.
    for step in reversed([step for step in _steps(definition) if step.norm.attr in names]):
        step.block[step.first : step.last + 1] = _one_step(step)
    return rebuilt(function, definition, {HELPER: one_call})


def _steps(definition: ast.FunctionDef) -> Iterator[SumStep]:
    module = definition.args.args[0].arg
    for node in ast.walk(definition):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from _steps_of(block, module)


def _steps_of(block: list[ast.stmt], module: str) -> Iterator[SumStep]:
    for first, statement in enumerate(block):
        match assignment(statement):
            case (
                result,
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id=of)) as norm,
                    args=[ast.BinOp(op=ast.Add(), left=left, right=right)],
                    keywords=[],
                ),
            ) if of == module:
                yield SumStep(block, first, first, norm, left, right, (), result)
            case (total, ast.BinOp(op=ast.Add(), left=left, right=right)):
                copies: list[str] = []
                for last, later in enumerate(block[first + 1 :], first + 1):
                    match assignment(later):
                        case (name, ast.Name(id=source)) if source == total:
                            copies.append(name)
                            continue
                        case (
                            result,
                            ast.Call(
                                func=ast.Attribute(value=ast.Name(id=of)) as norm,
                                args=[ast.Name(id=source)],
                                keywords=[],
                            ),
                        ) if (of, source) == (module, total) and result not in copies:
                            yield SumStep(block, first, last, norm, left, right, (total, *copies), result)
                    break


def _one_step(step: SumStep) -> list[ast.stmt]:
    """Return statements for one step, in which no name holds the normed rows or the sum longer than before."""
    # The norm's result may take the name of the sum, which then lives in its copies, or nowhere.
    holders = [name for name in dict.fromkeys(step.names) if name != step.result]
    at, results = step.block[step.first], call(HELPER, step.norm, step.left, step.right)
    if not holders:
        return [assign(step.result, ast.Subscript(results, ast.Constant(0), ast.Load()), at)]
    copies = [assign(name, load(holders[0]), at) for name in holders[1:]]
    return [assign((step.result, holders[0]), results, at), *copies]
