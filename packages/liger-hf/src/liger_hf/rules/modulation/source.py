# SPDX-License-Identifier: Apache-2.0
"""Find norms that a forward scales and shifts in its source, and rebuild the forward with one call for each.

    self.norm(x) * (1 + scale) + shift      →      one_call(self.norm, x, scale, shift)

x, scale and shift are names, perhaps with indices, which may also follow the brackets, as in (1 + scale)[:, None].
Names have no effects, so the value is the same if one_call returns self.norm(x) * (1 + scale) + shift.
"""

import ast
from collections.abc import Callable
from types import FunctionType
from typing import Any

from liger_hf.source import call, copy_of, once, rebuilt

HELPER = "__liger_modulated__"
INDICES = (ast.Name, ast.Subscript, ast.Slice, ast.Tuple, ast.Constant, ast.Load)


@once
def modulated_norms(definition: ast.FunctionDef) -> list[str]:
    """Return the attributes of self whose results a forward scales and shifts."""
    # Without names, the transformer replaces nothing.
    finder = _Calls(definition.args.args[0].arg, ())
    finder.visit(definition)
    return finder.norms


def with_one_call(function: FunctionType, names: tuple[str, ...], one_call: Callable[..., Any]) -> FunctionType:
    """Rebuild the function with `one_call(self.norm, x, scale, shift)` for the named norms; its globals stay."""
    definition = copy_of(function)
    _Calls(definition.args.args[0].arg, names).visit(definition)
    return rebuilt(function, definition, {HELPER: one_call})


class _Calls(ast.NodeTransformer):
    """Find the expressions, and replace each one of a named norm by one call."""

    def __init__(self, module: str, names: tuple[str, ...]) -> None:
        self.module, self.names = module, names
        self.norms: list[str] = []

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.BinOp(
                op=ast.Add(),
                left=ast.BinOp(
                    op=ast.Mult(),
                    left=ast.Call(func=ast.Attribute(value=ast.Name(id=of)) as norm, args=[x], keywords=[]),
                    right=factor,
                ),
                right=shift,
            ) if of == self.module and (scale := _scale(factor)) is not None and all(map(_plain, (x, scale, shift))):
                self.norms.append(norm.attr)
                if norm.attr in self.names:
                    return ast.copy_location(call(HELPER, norm, x, scale, shift), node)
        return node


def _scale(factor: ast.expr) -> ast.expr | None:
    """Return `scale` of `1 + scale`, with the indices after the brackets; None for any other expression."""
    match factor:
        case ast.BinOp(op=ast.Add(), left=ast.Constant(value=1 | 1.0), right=scale):
            return scale
        case ast.Subscript(value=value, slice=index) if (inner := _scale(value)) is not None:
            return ast.Subscript(inner, index, ast.Load())
    return None


def _plain(value: ast.expr) -> bool:
    return all(isinstance(node, INDICES) for node in ast.walk(value))
