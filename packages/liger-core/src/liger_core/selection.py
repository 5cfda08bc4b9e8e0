# SPDX-License-Identifier: Apache-2.0
"""Which implementation a call gets: `with use(…)`, `use(…)`, LIGER_BACKEND, else the automatic choice."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from liger_core.backend import Backend
from liger_core.errors import BackendError, Unsupported, nearest
from liger_core.op import Choice, Op
from liger_core.plugins import Registry, registry

AUTO = "auto"
VARIABLE = "LIGER_BACKEND"
_log = logging.getLogger("liger")


@dataclass(frozen=True)
class _Layer:
    """One `use` or the environment variable: a backend for every op, and exceptions by op."""

    source: str
    default: str | None
    by_op: dict[str, str]


_layers: list[_Layer] = []
_settled: dict[str, tuple[str, str]] = {}
_reported: set[tuple[str, str, str]] = set()


class use:
    """Select a backend: `use("triton")` for the process, `with use("reference", only=[rms_norm]):` for a block.

    backend  a name, or a specification as in LIGER_BACKEND: "triton,rope=reference"; "auto" is the automatic choice
    only     ops (or their names) that the selection is for; all of them by default

    Raises BackendError for an unknown or unavailable backend, an unknown op, or an op that the named backend lacks.
    An op that the backend does not implement keeps the automatic choice unless it was named.
    """

    def __init__(self, backend: str, *, only: Iterable[Op[..., Any] | str] | None = None) -> None:
        found = registry()
        layer = _parse(found, backend, f"use({backend!r})", None if only is None else [o.name if isinstance(o, Op) else o for o in only])
        self._layer = layer
        _environment()
        _layers.append(layer)
        _apply(found)

    def __enter__(self) -> use:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Take this selection back."""
        for index, layer in enumerate(_layers):
            if layer is self._layer:
                del _layers[index]
                break
        _apply(registry())


@contextmanager
def standing_in(device: str, place: str) -> Iterator[list[str]]:
    """Tensors on `place` get what the automatic choice would give tensors on `device`, whether or not that can run here.

    For fake tensors, of which nothing is computed: so the memory of a GPU is planned where there is none. Gives the names of the backends
    that could be loaded and support fake tensors, the last one over the others.
    """
    settle()
    found = registry()
    before = {op: op.choice for op in found.ops.values()}
    loaded: list[str] = []
    # A negative priority keeps a backend from running where it would be slow, and here nothing runs.
    for backend in sorted(found.backends.values(), key=lambda backend: abs(backend.priority)):
        if device in backend.device_types and backend.supports_fake_tensors:
            with suppress(Exception):
                for name, implementation in backend.table(found.ops).items():
                    op = found.ops[name]
                    if op.choice:
                        op.choice = replace(op.choice, table={**op.choice.table, place: implementation})
                loaded.append(backend.name)
    try:
        yield loaded
    finally:
        for op, choice in before.items():
            op.choice = choice


def settle() -> None:
    """Resolve the selection of every op, once; ops call this at their first use."""
    if not _settled:
        _environment()
        _apply(registry())


def reset() -> None:
    """Forget every selection and every loaded plugin, and read the environment again at the next use (for tests)."""
    if registry.cache_info().currsize:
        for op in registry().ops.values():
            op.choice = None
    registry.cache_clear()
    _layers.clear()
    _settled.clear()
    _reported.clear()


def selected(op: Op[..., Any]) -> tuple[str, str]:
    """The backend name that is selected for an op and what selected it."""
    settle()
    return _settled[op.name]


def _environment() -> None:
    """Put the environment variable under everything else, once."""
    if _settled or _layers:
        return
    text = os.environ.get(VARIABLE, "").strip()
    if text:
        _layers.append(_parse(registry(), text, f"{VARIABLE}={text}", None))


def _parse(found: Registry, text: str, source: str, only: list[str] | None) -> _Layer:
    default: str | None = None
    by_op: dict[str, str] = {}
    for part in (p.strip() for p in text.split(",")):
        name, equals, value = part.partition("=")
        if equals:
            _known_op(found, name.strip(), source)
            by_op[name.strip()] = _known_backend(found, value.strip(), source)
        elif default is not None:
            raise BackendError(
                f"{source}: one backend for all ops must be given, got {default!r} and {part!r}; write op=backend for one op"
            )
        else:
            default = _known_backend(found, part, source)
    if only is not None:
        for name in only:
            _known_op(found, name, source)
            if default is not None:
                by_op.setdefault(name, default)
        default = None
    for name, backend in by_op.items():
        if backend != AUTO and name not in found.implementations[backend]:
            able = [b for b, table in found.implementations.items() if name in table]
            raise BackendError(
                f"{source}: backend {backend!r} must implement {name}, it does not; {name} is implemented by: {', '.join(able)}"
            )
    return _Layer(source, default, by_op)


def _known_op(found: Registry, name: str, source: str) -> None:
    if name not in found.ops:
        raise BackendError(f"{source}: no op named {name!r}; known: {', '.join(sorted(found.ops))}.{nearest(name, found.ops)}")


def _known_backend(found: Registry, name: str, source: str) -> str:
    if name == AUTO:
        return name
    if name not in found.backends:
        broken = "".join(f" Plugin {why}." for why in found.failed.values())
        raise BackendError(
            f"no backend named {name!r}; installed: {', '.join(sorted(found.backends))}.{nearest(name, found.backends)}{broken}"
        )
    if name in found.unavailable:
        raise BackendError(f"{source}: backend {name!r} must be available, it is not: {found.unavailable[name]}")
    return name


def _choose(found: Registry, op: Op[..., Any]) -> tuple[str, str]:
    """(backend or auto, what selected it) for one op, strongest layer first."""
    for layer in reversed(_layers):
        name = layer.by_op.get(op.name, layer.default)
        if name is None:
            continue
        if name == AUTO or op.name in found.implementations[name]:
            return name, layer.source
        return AUTO, f"{layer.source}, but {name!r} does not implement {op.name}"
    return AUTO, "the default"


def automatic(found: Registry, op: Op[..., Any]) -> dict[str, str]:
    """Device type → available backend of the highest priority that implements the op; the reference has priority 0."""
    best: dict[str, Backend] = {}
    for name, table in found.implementations.items():
        backend = found.backends[name]
        if op.name not in table or backend.priority < 0:
            continue
        for device in backend.device_types:
            if device not in best or backend.priority > best[device].priority:
                best[device] = backend
    return {device: backend.name for device, backend in best.items() if backend.priority > 0}


def _apply(found: Registry) -> None:
    for op in found.ops.values():
        name, source = _choose(found, op)
        _settled[op.name] = (name, source)
        if name == AUTO:
            chosen = automatic(found, op)
            op.choice = Choice(
                {device: found.implementations[backend][op.name] for device, backend in chosen.items()},
                {device: _traced(found, op, backend) for device, backend in chosen.items()},
                op.reference,
                _fall_back(op),
            )
        elif name == "reference":
            op.choice = Choice({}, {}, op.reference, _fall_back(op))
        else:
            backend = found.backends[name]
            op.choice = Choice(
                dict.fromkeys(backend.device_types, found.implementations[name][op.name]),
                dict.fromkeys(backend.device_types, _traced(found, op, name)),
                _wrong_device(op, backend, source),
                _refuse(op, name, source),
            )


def _traced(found: Registry, op: Op[..., Any], backend: str) -> Callable[..., Any]:
    """What a compiled region gets where this backend is selected."""
    implementation = found.implementations[backend][op.name]
    most = found.backends[backend].handed_over.get(op)
    if most is None:
        return implementation

    def by_size(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs[op.first]
        return op.reference(*args, **kwargs) if first.numel() <= most else implementation(*args, **kwargs)

    return by_size


def _fall_back(op: Op[..., Any]) -> Callable[..., Any]:
    """Under the automatic choice a declined call goes to the reference, and the reason is logged once."""

    def fall_back(reason: Unsupported, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            key = (op.name, AUTO, str(reason))
            if key not in _reported:
                _reported.add(key)
                _log.warning("%s: the reference runs, since the selected backend declined: %s", op.name, reason)
        return op.reference(*args, **kwargs)

    return fall_back


def _refuse(op: Op[..., Any], name: str, source: str) -> Callable[..., Any]:
    def refuse(reason: Unsupported, *args: Any, **kwargs: Any) -> NoReturn:
        raise BackendError(
            f"{op.name}: backend {name!r} must be able to take this call, it declined: {reason}; it was selected by {source}, "
            f"select 'auto' or {op.name}=reference to run the reference instead"
        ) from reason

    return refuse


def _wrong_device(op: Op[..., Any], backend: Backend, source: str) -> Callable[..., Any]:
    def wrong_device(*args: Any, **kwargs: Any) -> NoReturn:
        first = args[0] if args else kwargs[op.first]
        raise BackendError(
            f"{op.name}: backend {backend.name!r} runs on {' and '.join(backend.device_types)} tensors, got a {first.device.type} tensor; "
            f"it was selected by {source}, select 'auto' or {op.name}=reference to run the reference instead"
        )

    return wrong_device


@dataclass(frozen=True)
class Explanation:
    """Which implementation a call gets, and why; `str()` is one line for people."""

    op: str
    backend: str
    reason: str
    candidates: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  {name}: {verdict}" for name, verdict in self.candidates.items())
        return f"{self.op}: {self.backend} ({self.reason}){others}"


def explain(op: Op[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Tell which implementation the call `op(*args, **kwargs)` would get and why, without running it.

    Raises what the call itself would raise for wrong arguments.
    """
    settle()
    op.check(*args, **kwargs)
    found = registry()
    first = args[0] if args else kwargs[op.first]
    device = first.device.type
    name, source = _settled[op.name]
    candidates = {b: _verdict(found, op, b, device, args, kwargs) for b in found.backends}
    if name != AUTO:
        return Explanation(op.name, name, f"selected by {source}; {candidates[name]}{_compiled(found, op, name, first)}", candidates)
    best = automatic(found, op).get(device, "reference")
    if candidates[best].startswith("declines"):
        return Explanation(op.name, "reference", f"auto ({source}); {best!r} {candidates[best]}", candidates)
    return Explanation(
        op.name, best, f"auto ({source}): highest priority on {device} tensors{_compiled(found, op, best, first)}", candidates
    )


def _compiled(found: Registry, op: Op[..., Any], backend: str, first: Any) -> str:
    most = found.backends[backend].handed_over.get(op)
    return f"; a compiled region gets the reference up to {most:,} elements" if most is not None and first.numel() <= most else ""


def _verdict(found: Registry, op: Op[..., Any], name: str, device: str, args: Any, kwargs: Any) -> str:
    backend = found.backends[name]
    if name in found.unavailable:
        return f"unavailable: {found.unavailable[name]}"
    if op.name not in found.implementations[name]:
        return f"does not implement {op.name}"
    if name == "reference":
        return "can run"
    if device not in backend.device_types:
        return f"runs on {' and '.join(backend.device_types)} tensors, got a {device} tensor"
    if not backend.supports_fake_tensors:
        return "can run unless it declines, which only the call itself shows"
    reason = _would_decline(found.implementations[name][op.name], args, kwargs)
    return "can run" if reason is None else f"declines: {reason}"


def _would_decline(implementation: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Call the implementation on fake tensors: it declines before any work, and fakes do none."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (tuple(args), dict(kwargs)))
        try:
            implementation(*fake_args, **fake_kwargs)
        except Unsupported as reason:
            return str(reason)
        except Exception:
            # What cannot run on fakes got past the place where it would have declined.
            return None
    return None
