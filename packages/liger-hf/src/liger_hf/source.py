# SPDX-License-Identifier: Apache-2.0
"""Read the source of a forward, and rebuild the function with other statements."""

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
# Keyed by code, which a rebound function shares. Equal codes are one key, so it must outlive the first of them.
_rebuilt: dict[CodeType, ast.FunctionDef] = {}


def definition_of(function: Any) -> ast.FunctionDef | None:
    """Return the definition of a function without its decorators; a rebuilt function has the rebuilt definition.

    Returns None if the source is missing or does not match the running code.
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
    """Compile a changed definition of the function, which may call the helpers by name, and reapply its decorators.

    The function keeps its globals, and the helpers of an earlier rebuild.
    """
    outer, function = function, innermost(function)
    captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    helpers = {name: cell.cell_contents for name, cell in captured} | {**helpers}
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


def load(name: str) -> ast.expr:
    """Return the expression that reads a name."""
    return ast.Name(name, ast.Load())


def call(function: str, *args: ast.expr) -> ast.expr:
    """Return the call of a helper by its name."""
    return ast.Call(load(function), [*args], [])


def assign(name: str | tuple[str, ...], value: ast.expr, at: ast.AST) -> ast.stmt:
    """Return the assignment to a name, or to several, as if it were written in place of a node."""
    names: list[ast.expr] = [ast.Name(n, ast.Store()) for n in ([name] if isinstance(name, str) else name)]
    target = names[0] if isinstance(name, str) else ast.Tuple(names, ast.Store())
    return ast.copy_location(ast.Assign([target], value), at)


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        # From the code object, because inspect follows `__wrapped__` of a function.
        lines, start = inspect.getsourcelines(function.__code__)
        # In a block, because less indentation would change multiline strings.
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
    filename = function.__code__.co_filename
    imports = [ast.alias(name) for name in _imported(filename)]
    module = ast.fix_missing_locations(ast.Module([*([ast.Import(imports)] if imports else []), outer], []))
    code = compile(module, filename, "exec", flags, dont_inherit=True)
    for name in ("outer", definition.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code


@cache
def _imported(filename: str) -> tuple[str, ...]:
    """Return the names that a file imports, because Python compiles calls of their methods to other instructions."""
    names: list[str] = []
    try:
        pending: list[ast.AST] = [*ast.parse("".join(linecache.getlines(filename))).body]
    except SyntaxError:
        return ()
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(alias.asname or alias.name).partition(".")[0] for alias in node.names if alias.name != "*"]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))
            ]
    return tuple(dict.fromkeys(names))


def _alike(left: CodeType, right: CodeType) -> bool:
    """Return whether both codes have the same instructions, regardless of file and line numbers."""
    attributes = ("co_code", "co_names", "co_varnames", "co_freevars")
    if any(getattr(left, attribute) != getattr(right, attribute) for attribute in attributes):
        return False
    pairs = zip(left.co_consts, right.co_consts, strict=False)
    return len(left.co_consts) == len(right.co_consts) and all(
        _alike(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in pairs
    )
