# SPDX-License-Identifier: Apache-2.0
"""A bug that is planted in the syntax tree of a function, so that comments, layout and most names may change."""

import ast
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

# Stand for any expression in a pattern, and for the same one in what replaces it.
WILDCARD = re.compile(r"_\d")


@dataclass(frozen=True)
class Mutant:
    """Replace the code `old` in one function by `new`; the test must then fail.

    where   module, or module:function, or module:Class.function
    old     an expression or a statement that occurs once there; `_1`, `_2`, … match any expression
    new     an expression for an expression, or statements
    test    file::test
    cases   selects cases of the test, as pytest's -k does
    seen    what the output must have; by default the name of the test, which must have failed
    triton  run the test on the Triton backend, with its interpreter
    """

    name: str
    where: str
    old: str
    new: str
    test: str
    cases: str = ""
    seen: str = ""
    triton: bool = False

    @property
    def file(self) -> str:
        return self.where.partition(":")[0].replace(".", "/") + ".py"

    def planted(self, source: str) -> str:
        """Return the source with the bug."""
        tree = ast.parse(source)
        (old,), new = ast.parse(self.old).body, ast.parse(self.new).body
        pattern: Any = old
        if isinstance(old, ast.Expr) and isinstance(new[0], ast.Expr):
            pattern, new = old.value, [new[0].value]  # type: ignore[list-item]
        matches = [(node, names) for node in ast.walk(self._scope(tree)) if matched(pattern, node, names := {})]
        if len(matches) != 1:
            raise LookupError(
                f"mutant {self.name!r}: {self.old!r} must occur once in {self.where}, it occurs {len(matches)} times"
            )
        target, names = matches[0]
        filled = [Replace(lambda n: names.get(getattr(n, "id", ""))).visit(deepcopy(statement)) for statement in new]
        inserted = filled if isinstance(target, ast.stmt) else filled[0]
        return ast.unparse(Replace(lambda n: inserted if n is target else None).visit(tree))

    def _scope(self, tree: Any) -> ast.AST:
        for name in filter(None, re.split(r"[:.]", self.where.partition(":")[2])):
            named = [node for node in tree.body if getattr(node, "name", None) == name]
            named = named or [node for node in ast.walk(tree) if getattr(node, "name", None) == name]
            if len(named) != 1:
                raise LookupError(f"mutant {self.name!r}: {self.where} must name one function, it names {len(named)}")
            tree = named[0]
        return tree  # type: ignore[no-any-return]


def matched(pattern: Any, node: Any, names: dict[str, ast.AST]) -> bool:
    """Whether a node is what the pattern says; fills in what its wildcards stand for."""
    if isinstance(pattern, ast.Name) and WILDCARD.fullmatch(pattern.id):
        return isinstance(node, ast.expr) and ast.dump(names.setdefault(pattern.id, node)) == ast.dump(node)
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(matched(*pair, names) for pair in zip(pattern, node, strict=True))
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    fields = [name for name in pattern._fields if name not in ("ctx", "type_comment")]
    return type(pattern) is type(node) and all(matched(getattr(pattern, f), getattr(node, f), names) for f in fields)


class Replace(ast.NodeTransformer):
    """Replace each node for which `by` returns another one, or statements."""

    def __init__(self, by: Callable[[ast.AST], Any]) -> None:
        self.by = by

    def visit(self, node: ast.AST) -> Any:
        other = self.by(node)
        return self.generic_visit(node) if other is None else other
