# SPDX-License-Identifier: Apache-2.0
"""Find norms whose results a forward only transposes and passes to a rotary function, and rebuild the forward.

                                                       held = may(self.q_norm, self.k_norm)
    q = self.q_norm(a).transpose(1, 2)                 q = norm(held, self.q_norm, a).transpose(1, 2)
    k = self.k_norm(b).transpose(1, 2)          →      k = norm(held, self.k_norm, b).transpose(1, 2)
    …                                                  …
    q, k = apply_rotary(q, k, cos, sin)                q, k = rotate(held, (self.q_norm, self.k_norm), q, k, cos, sin)

While they are held, q and k have not been normalized, and no statement but a transpose sees them. Norms may be in a
branch (then held is False before it), and the rotary function too (then the other branch catches up on them). A
function of one tensor is treated alike.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from liger_hf.source import assign, assignment, call, copy_of, definition_of, load, rebuilt

MAY, NORM, ROTATE, CATCH_UP = "__liger_may__", "__liger_norm__", "__liger_rotate__", "__liger_catch_up__"


@dataclass(frozen=True)
class RotarySite:
    """Norms and the rotary call after them.

    names     the names that are normalized and rotated
    calls     the calls of their norms; `before` is the first statement with one, in the list `inner`
    branch    the block and the statement before which `held` must be False, if the norms are in a branch
    skipped   the statements that run instead of the rotary call, if it is in a branch
    """

    names: tuple[str, ...]
    calls: tuple[ast.Call, ...]
    rotary: ast.Call
    inner: list[ast.stmt]
    before: ast.stmt
    branch: tuple[list[ast.stmt], ast.stmt] | None
    skipped: list[ast.stmt] | None

    @property
    def norms(self) -> tuple[str, ...]:
        """The attributes of self that hold the norms."""
        return tuple(call.func.attr for call in self.calls)  # type: ignore[attr-defined]

    @property
    def function(self) -> str:
        return self.rotary.func.id  # type: ignore[attr-defined]


def norms_before_rotary(function: Any, prefix: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rotary function and the norms of every site in a forward."""
    definition = definition_of(function)
    return [] if definition is None else [(site.function, site.norms) for site in _sites(definition, prefix)]


def with_held_norms(
    function: FunctionType,
    prefix: str,
    chosen: Callable[[str, tuple[str, ...]], bool],
    helpers: Mapping[str, Callable[..., Any]],
) -> FunctionType:
    """Rebuild the function with the helpers may, norm, rotate and catch_up at the chosen sites; its globals stay."""
    definition = copy_of(function)
    for number, site in enumerate([s for s in _sites(definition, prefix) if chosen(s.function, s.norms)]):
        _rewrite(site, f"__liger_held_{number}__")
    return rebuilt(function, definition, helpers)


def _sites(definition: ast.FunctionDef, prefix: str) -> list[RotarySite]:
    module, within = definition.args.args[0].arg, [n for n in ast.walk(definition) if n is not definition]
    # A nested function may read a name at any time.
    scopes = [n for n in within if isinstance(n, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    sites = [site for block in _blocks(definition.body) for site in _sites_of(block, module, prefix)]
    return [site for site in sites if not any(_touches(scope, site.names) for scope in scopes)]


def _blocks(block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield a block and its branches, except loops, which may end between a norm and its rotary call."""
    yield block
    for statement in block:
        if isinstance(statement, ast.If):
            yield from _blocks(statement.body)
            yield from _blocks(statement.orelse)


def _sites_of(block: list[ast.stmt], module: str, prefix: str) -> Iterator[RotarySite]:
    for last, statement in enumerate(block):
        rotary = _rotary(statement, prefix)
        if rotary is not None:
            yield from _site(block[:last], block, *rotary, None, module)
        elif isinstance(statement, ast.If):
            for number, inner in enumerate(statement.body):
                rotary = _rotary(inner, prefix)
                if rotary is not None and not any(
                    _touches(s, rotary[0]) for s in (statement.test, *statement.body[:number])
                ):
                    yield from _site(block[:last], block, *rotary, statement.orelse, module)


def _rotary(statement: ast.stmt, prefix: str) -> tuple[tuple[str, ...], ast.Call] | None:
    """Return the names and the call of `q, k = apply_rotary…(q, k, …)` or `q = apply_rotary…(q, …)`, or None."""
    match statement:
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=function), args=args) as call) if (
            function.startswith(prefix)
        ):
            elements = target.elts if isinstance(target, ast.Tuple) else [target]
            names = tuple(e.id for e in elements if isinstance(e, ast.Name))
            first, rest = args[: len(elements)], [*args[len(elements) :], *call.keywords]
            same = [a.id for a in first if isinstance(a, ast.Name)] == list(names) and len(set(names)) == len(
                elements
            ) in (1, 2)
            if same and not any(_touches(a, names) or isinstance(a, ast.Starred) for a in rest):
                return names, call
    return None


def _site(
    above: list[ast.stmt],
    block: list[ast.stmt],
    names: tuple[str, ...],
    rotary: ast.Call,
    skipped: list[ast.stmt] | None,
    module: str,
) -> Iterator[RotarySite]:
    """Yield the site if the last statements above that use these names are their norms, all in one block."""
    norms = _norms(above, names, module)
    branch = None
    if isinstance(norms, ast.If):
        if any(_touches(s, names) for s in norms.orelse):
            return
        branch, above = (block, norms), norms.body
        norms = _norms(above, names, module)
    if not isinstance(norms, dict):
        return
    order = sorted(names, key=lambda name: above.index(norms[name][0]))
    first, *later = (norms[name] for name in order)
    # The input of a norm must not depend on a name that is held by then.
    if not any(_touches(call.args[0], order[:number]) for number, (_, call) in enumerate(later, 1)):
        inner = block if branch is None else above
        yield RotarySite(names, tuple(norms[name][1] for name in names), rotary, inner, first[0], branch, skipped)


def _norms(
    above: list[ast.stmt], names: tuple[str, ...], module: str
) -> dict[str, tuple[ast.stmt, ast.Call]] | ast.If | None:
    """Return, for each name, the statement that normalizes it, after which it is only transposed.

    If a branch must contain these statements instead, return the branch.
    """
    norms: dict[str, tuple[ast.stmt, ast.Call]] = {}
    for statement in reversed(above):
        # Above its norm, a name may be used.
        missing = [name for name in names if name not in norms]
        norm = _norm(statement, missing, module)
        if norm is not None:
            norms[norm[0]] = statement, norm[1]
            if len(norms) == len(names):
                return norms
        elif _touches(statement, missing) and not _transposes(statement, missing):
            return statement if isinstance(statement, ast.If) and not norms else None
    return None


def _norm(statement: ast.stmt, names: Collection[str], module: str) -> tuple[str, ast.Call] | None:
    """Return the name and the call of `q = self.norm(…)` or `q = self.norm(…).transpose(1, 2)`, or None."""
    match assignment(statement):
        case (name, value) if name in names:
            match _without_transpose(value):
                case ast.Call(func=ast.Attribute(value=ast.Name(id=of)), args=[argument], keywords=[]) as call if (
                    of == module
                ):
                    return None if isinstance(argument, ast.Starred) else (name, call)
    return None


def _transposes(statement: ast.stmt, names: Collection[str]) -> bool:
    match assignment(statement):
        case (name, value) if name in names and _without_transpose(value) is not value:
            inner = _without_transpose(value)
            return isinstance(inner, ast.Name) and inner.id == name
    return False


def _without_transpose(value: ast.expr) -> ast.expr:
    match value:
        case ast.Call(
            func=ast.Attribute(value=inner, attr="transpose"),
            args=[ast.Constant(value=1), ast.Constant(value=2)],
            keywords=[],
        ):
            return inner
    return value


def _touches(node: ast.AST, names: Collection[str]) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def _rewrite(site: RotarySite, held: str) -> None:
    methods: list[Any] = [node.func for node in site.calls]
    norms = [ast.Attribute(method.value, method.attr, ast.Load()) for method in methods]
    pair = ast.Tuple([*norms], ast.Load())
    _insert(site.inner, site.before, held, call(MAY, *norms))
    if site.branch is not None:
        _insert(*site.branch, held, ast.Constant(False))
    for node in site.calls:
        node.args = [load(held), node.func, *node.args]
        node.func = load(NORM)
    site.rotary.args = [load(held), pair, *site.rotary.args]
    site.rotary.func = load(ROTATE)
    if site.skipped is not None:
        values = call(CATCH_UP, load(held), pair, *map(load, site.names))
        caught_up = ast.If(load(held), [assign(site.names, values, site.rotary)], [])
        site.skipped.insert(0, ast.copy_location(caught_up, site.rotary))


def _insert(block: list[ast.stmt], before: ast.stmt, name: str, value: ast.expr) -> None:
    block.insert(next(number for number, each in enumerate(block) if each is before), assign(name, value, before))
