# SPDX-License-Identifier: Apache-2.0
"""The selection of implementations: `with use(…)`, `use(…)`, LIGER_BACKEND, else the automatic choice."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Self

import torch

from liger_core.backend import Backend, Implementation
from liger_core.errors import BackendError, Unsupported, nearest
from liger_core.op import Choice, Op, before_first_call
from liger_core.plugins import LOCK, Registry, forget, registry

AUTO = "auto"
VARIABLE = "LIGER_BACKEND"
_log = logging.getLogger("liger")


@dataclass(frozen=True, eq=False)
class _Layer:
    """One `use` or the environment variable: a backend for every op, and exceptions by op."""

    source: str
    default: str | None
    by_op: dict[str, str]


_layers: list[_Layer] = []
_settled: dict[str, tuple[str, str]] = {}
_reported: set[tuple[str, str, str]] = set()
# The `with use(…)` blocks that are open, the innermost last, and the innermost one that this thread or task is inside
# of. Only `use` reads the context variable: what a call runs must be a plain attribute, which torch.compile can guard.
_blocks: list[_Layer] = []
_inside: ContextVar[_Layer | None] = ContextVar("liger_use", default=None)


class use:
    """Select a backend: `use("triton")` until `undo()`, `with use("reference", only=[rms_norm]):` for a block.

    backend  a name, or a specification as in LIGER_BACKEND: "triton,rope=reference"; "auto" is the automatic choice
    only     ops (or their names) that the selection is for; all of them by default

    The selection belongs to the process: it also holds in every other thread and asyncio task, including the threads in
    which autograd runs a backward pass. Blocks must therefore nest. While one is open, only code that runs inside it
    may select a backend.

    An op that the backend does not implement keeps the automatic choice unless it was named.

    Raises BackendError for an unknown or unavailable backend, an unknown op, an op that the named backend lacks, and
    for a selection that overlaps a block of another thread or task.
    """

    def __init__(self, backend: str, *, only: Iterable[Op[..., Any] | str] | None = None) -> None:
        with LOCK:
            if isinstance(only, (str, Op)):
                named = only if isinstance(only, str) else only.name
                raise BackendError(f"use({backend!r}): only must be a list of ops, got {named}; write only=[{named!r}]")
            names = None if only is None else [o.name if isinstance(o, Op) else o for o in only]
            self._layer = _parse(registry(), backend, f"use({backend!r})", names)
            self._outer: _Layer | None = None
            _check_nesting(self._layer)
            _environment()
            self._add()

    def __enter__(self) -> Self:
        with LOCK:
            try:
                _check_nesting(self._layer)
            except BackendError:
                self._remove()
                raise
            if self._layer in _blocks:
                raise BackendError(f"{self._layer.source}: a block must be entered once at a time, it is open already")
            if self._layer not in _layers:
                self._add()
            _blocks.append(self._layer)
            self._outer = _inside.get()
            _inside.set(self._layer)
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        with LOCK:
            inner = _blocks[_blocks.index(self._layer) + 1 :] if self._layer in _blocks else []
            _inside.set(self._outer)
            self._remove()
            if inner and error is None:
                raise BackendError(
                    f"{self._layer.source}: blocks must end in the reverse of the order in which they began, but `with "
                    f"{inner[-1].source}`, which began inside this one, is still open"
                )

    def undo(self) -> None:
        """Take back this selection."""
        with LOCK:
            _check_nesting(self._layer)
            self._remove()

    def _add(self) -> None:
        _layers.append(self._layer)
        _apply(registry())

    def _remove(self) -> None:
        for stack in (_blocks, _layers):
            if self._layer in stack:
                stack.remove(self._layer)
        _apply(registry())


def _check_nesting(layer: _Layer) -> None:
    """Raise BackendError if another thread or task is inside a `with use(…)` block."""
    if _blocks and _inside.get() is not _blocks[-1]:
        raise BackendError(
            f"{layer.source}: the selection of the process must not change while another thread or task is inside "
            f"`with {_blocks[-1].source}`; select one backend for all of them, or run the blocks one after the other"
        )


def settle() -> None:
    """Resolve the selection of every op, once; ops call this at their first use."""
    if not _settled:
        with LOCK:
            if not _settled:
                _environment()
                _apply(registry())


before_first_call(settle)


def reset() -> None:
    """Forget every selection and every loaded plugin, and read the environment again at the next use (for tests)."""
    with LOCK:
        for name in _settled:
            registry().ops[name].choice = None
        forget()
        for state in (_layers, _blocks, _settled, _reported):
            state.clear()


def selected(op: Op[..., Any]) -> tuple[str, str]:
    """Return the name of the backend selected for an op, and what selected it."""
    settle()
    return _settled[op.name]


def _environment() -> None:
    """Add the environment variable as the lowest layer, once."""
    if _settled or _layers:
        return
    text = os.environ.get(VARIABLE, "").strip()
    if text:
        _layers.append(_parse(registry(), text, f"{VARIABLE}={text}", None))


def _parse(registry: Registry, text: str, source: str, only: list[str] | None) -> _Layer:
    default: str | None = None
    by_op: dict[str, str] = {}
    for entry in (p.strip() for p in text.split(",")):
        name, equals, value = entry.partition("=")
        if equals:
            _known_op(registry, name.strip(), source)
            by_op[name.strip()] = _known_backend(registry, value.strip(), source)
        elif default is not None:
            raise BackendError(
                f"{source}: one backend for all ops must be given, got {default!r} and {entry!r}; write op=backend for "
                "one op"
            )
        else:
            default = _known_backend(registry, entry, source)
    if only is not None:
        for name in only:
            _known_op(registry, name, source)
            if default is not None:
                by_op.setdefault(name, default)
        default = None
    for name, backend in by_op.items():
        if backend != AUTO and name not in registry.implementations[backend]:
            able = [b for b, table in registry.implementations.items() if name in table]
            raise BackendError(
                f"{source}: backend {backend!r} must implement {name}, it does not; {name} is implemented by: "
                f"{', '.join(able)}"
            )
    return _Layer(source, default, by_op)


def _known_op(registry: Registry, name: str, source: str) -> None:
    if name not in registry.ops:
        raise BackendError(
            f"{source}: no op named {name!r}; known: {', '.join(sorted(registry.ops))}.{nearest(name, registry.ops)}"
        )


def _known_backend(registry: Registry, name: str, source: str) -> str:
    if name == AUTO:
        return name
    if name in registry.left_out:
        raise BackendError(f"{source}: backend {name!r} must be loaded, it is not: {registry.left_out[name]}")
    if name not in registry.backends:
        faults = "".join(
            f" {fault[0].upper()}{fault[1:]}{'' if fault[-1] in '.?' else '.'}" for fault in registry.faults()
        )
        raise BackendError(
            f"{source}: no backend named {name!r}; installed: "
            f"{', '.join(sorted(registry.backends))}.{nearest(name, registry.backends)}{faults}"
        )
    if name in registry.unavailable:
        raise BackendError(f"{source}: backend {name!r} must be available, it is not: {registry.unavailable[name]}")
    return name


def _choose(registry: Registry, op: Op[..., Any]) -> tuple[str, str]:
    """Return (backend or auto, what selected it) for one op, from the strongest layer that has it."""
    for layer in reversed(_layers):
        name = layer.by_op.get(op.name, layer.default)
        if name is None:
            continue
        if name == AUTO or op.name in registry.implementations[name]:
            return name, layer.source
        return AUTO, f"{layer.source}, but {name!r} does not implement {op.name}"
    return AUTO, "the default"


def ranking(registry: Registry, op: Op[..., Any]) -> dict[str, list[str]]:
    """Return a table device type → the backends that `auto` tries, by descending priority, without the reference."""
    others = {name: backend for name, backend in registry.backends.items() if backend.automatic and name != "reference"}
    able = [backend for name, backend in others.items() if op.name in registry.implementations.get(name, {})]
    ranked: dict[str, list[str]] = {}
    for backend in sorted(able, key=lambda backend: (-backend.priority, backend.name)):
        for device in backend.device_types:
            ranked.setdefault(device, []).append(backend.name)
    return ranked


def automatic(registry: Registry, op: Op[..., Any]) -> dict[str, str]:
    """Return a table device type → the backend that `auto` tries first."""
    return {device: names[0] for device, names in ranking(registry, op).items()}


def _apply(registry: Registry) -> None:
    settled = {}
    for op in registry.ops.values():
        name, source = settled[op.name] = _choose(registry, op)
        if name == AUTO:
            op.choice = in_turn(op, ranked(registry, op))
        elif name == "reference":
            op.choice = in_turn(op, {})
        else:
            backend, link = registry.backends[name], _link(registry, op, name)
            op.choice = Choice(
                dict.fromkeys(backend.device_types, link.implementation),
                dict.fromkeys(backend.device_types, link.traced),
                _wrong_device(op, backend, source),
                _refuse(op, name, source),
            )
    # Last and in one step: code that finds an entry here assumes that all ops are ready.
    _settled.update(settled)


class Link(NamedTuple):
    """One of the backends that are tried in order, with its functions for plain Python and for a compiled region."""

    backend: str
    implementation: Callable[..., Any]
    traced: Callable[..., Any]


def _link(registry: Registry, op: Op[..., Any], name: str) -> Link:
    most = registry.handed_over.get(name, {}).get(op.name, 0)
    return link(op, name, Implementation(registry.implementations[name][op.name], most))


def link(op: Op[..., Any], name: str, implementation: Implementation) -> Link:
    """Return the link of a backend's implementation of an op."""
    return Link(name, implementation.function, _traced(op, *implementation))


def ranked(registry: Registry, op: Op[..., Any]) -> dict[str, list[Link]]:
    return {device: [_link(registry, op, name) for name in names] for device, names in ranking(registry, op).items()}


def in_turn(op: Op[..., Any], links: Mapping[str, list[Link]]) -> Choice:
    """Return a choice that tries a device type's backends in order until one does not decline, then the reference."""
    links = {device: tried for device, tried in links.items() if tried}
    return Choice(
        {device: tried[0].implementation for device, tried in links.items()},
        {device: tried[0].traced for device, tried in links.items()},
        op.reference,
        _fall_back(
            op, {device: [*tried, Link("reference", op.reference, op.reference)] for device, tried in links.items()}
        ),
    )


def _traced(op: Op[..., Any], implementation: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Return the implementation that a compiled region gets: the reference for up to `most` elements."""
    if not most:
        return implementation

    def by_size(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs[op.first]
        return op.reference(*args, **kwargs) if first.numel() <= most else implementation(*args, **kwargs)

    return by_size


def _fall_back(op: Op[..., Any], links: Mapping[str, list[Link]]) -> Callable[..., Any]:
    """Return a function that runs a declined call on the next backends in order; each reason is logged once."""
    steps = {device: list(pairwise(tried)) for device, tried in links.items()}

    def fall_back(reason: Unsupported, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs[op.first]
        compiling = torch.compiler.is_compiling()
        for declined, following in steps.get(first.device.type, ()):
            if not compiling:
                _report(op, declined.backend, str(reason), following.backend)
            try:
                return (following.traced if compiling else following.implementation)(*args, **kwargs)
            except Unsupported as another:
                reason = another
        raise reason

    return fall_back


def _report(op: Op[..., Any], declined: str, reason: str, following: str) -> None:
    if (op.name, declined, reason) not in _reported:
        _reported.add((op.name, declined, reason))
        _log.warning(
            "%s: backend %r declined a call (%s); falling back to %s", op.name, declined, reason, in_words(following)
        )


def in_words(backend: str) -> str:
    return "the reference" if backend == "reference" else f"backend {backend!r}"


def _refuse(op: Op[..., Any], name: str, source: str) -> Callable[..., Any]:
    def refuse(reason: Unsupported, *args: Any, **kwargs: Any) -> NoReturn:
        raise BackendError(
            f"{op.name}: backend {name!r} must be able to take this call, it declined: {reason}; it was selected by "
            f"{source}, select 'auto' or {op.name}=reference to run the reference instead"
        ) from reason

    return refuse


def _wrong_device(op: Op[..., Any], backend: Backend, source: str) -> Callable[..., Any]:
    def wrong_device(*args: Any, **kwargs: Any) -> NoReturn:
        first = args[0] if args else kwargs[op.first]
        raise BackendError(
            f"{op.name}: backend {backend.name!r} runs on {' and '.join(backend.device_types)} tensors, got a "
            f"{first.device.type} tensor; "
            f"it was selected by {source}, select 'auto' or {op.name}=reference to run the reference instead"
        )

    return wrong_device
