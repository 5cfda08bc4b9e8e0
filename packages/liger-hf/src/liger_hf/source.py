# SPDX-License-Identifier: Apache-2.0
"""The source of a forward, and functions rebuilt from it with other statements."""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import linecache
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from liger_hf.rebinding import innermost, redecorated, twin

_definitions: WeakKeyDictionary[FunctionType, ast.FunctionDef | None] = WeakKeyDictionary()
# By their code: a function that is rebound has the same one.
_rebuilt: WeakKeyDictionary[CodeType, ast.FunctionDef] = WeakKeyDictionary()


def definition_of(function: Any) -> ast.FunctionDef | None:
    """Return the source of a function without its decorators, also of one that was rebuilt.

    None if the source cannot be found, or if the file has changed and it is the source of something else.
    """
    function = innermost(function)
    if isinstance(function, FunctionType) and function.__code__ in _rebuilt:
        return _rebuilt[function.__code__]
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    if function not in _definitions:
        _definitions[function] = _parsed(function)
    return _definitions[function]


def once(find: Callable[[ast.FunctionDef], Iterable[str]]) -> Callable[[Any], tuple[str, ...]]:
    """Cache the distinct names that `find` returns for a function's definition; without a source there are none."""
    known: WeakKeyDictionary[ast.FunctionDef, tuple[str, ...]] = WeakKeyDictionary()

    def names(function: Any) -> tuple[str, ...]:
        definition = definition_of(function)
        if definition is None:
            return ()
        if definition not in known:
            known[definition] = tuple(dict.fromkeys(find(definition)))
        return known[definition]

    return names


def copy_of(function: FunctionType) -> ast.FunctionDef:
    """Return a copy of the definition of a function, which must have a source, to be modified."""
    definition = copy.deepcopy(definition_of(function))
    assert definition is not None
    return definition


def rebuilt(
    function: FunctionType, definition: ast.FunctionDef, helpers: Mapping[str, Callable[..., Any]]
) -> FunctionType:
    """Return the function, in its decorators, with a changed definition that may call the helpers by their names.

    Its globals stay its own, and so do helpers that it already has.
    """
    outer, function = function, innermost(function)
    own = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    helpers = {name: cell.cell_contents for name, cell in own} | {**helpers}
    code = _compiled(function, definition, tuple(helpers))
    _rebuilt[code] = definition
    return redecorated(
        twin(function, code, function.__globals__, tuple(CellType(helpers[name]) for name in code.co_freevars)), outer
    )


def assignment(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the name and the value of a statement `name = value`; None for any other statement."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, value
    return None


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
    """Compile the definition with these names as free variables, without running decorators or defaults."""
    outer = ast.parse(f"def outer({', '.join(free)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition]
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    body = [
        *(
            [ast.Import([ast.alias(name) for name in imported])]
            if (imported := _imported(function.__code__.co_filename))
            else []
        ),
        outer,
    ]
    code = compile(
        ast.fix_missing_locations(ast.Module(body, [])), function.__code__.co_filename, "exec", flags, dont_inherit=True
    )
    for name in ("outer", definition.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code


@cache
def _imported(filename: str) -> tuple[str, ...]:
    """Return the names that a file imports, because Python compiles calls of their methods to other instructions."""
    names: list[str] = []
    try:
        inside: list[ast.AST] = [*ast.parse("".join(linecache.getlines(filename))).body]
    except SyntaxError:
        return ()
    while inside:
        node = inside.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(alias.asname or alias.name).partition(".")[0] for alias in node.names if alias.name != "*"]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))
            ]
    return tuple(dict.fromkeys(names))


def _alike(one: CodeType, other: CodeType) -> bool:
    """Whether both codes have the same instructions, regardless of file and line numbers."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars")
    if any(getattr(one, part) != getattr(other, part) for part in parts):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=False)
    return len(one.co_consts) == len(other.co_consts) and all(
        _alike(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in pairs
    )
