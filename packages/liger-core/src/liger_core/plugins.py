# SPDX-License-Identifier: Apache-2.0
"""Finds plugins through entry points and turns what they offer into two dictionaries, once."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pluggy

from liger_core import hookspecs
from liger_core.backend import Backend
from liger_core.errors import PluginError, nearest
from liger_core.op import Op
from liger_core.versions import warn_if_untested

GROUP = "liger"
CORE = "core"
REFERENCE = "reference"
BLOCK = "LIGER_DISABLE_PLUGINS"


@dataclass
class Registry:
    """All that the plugins offer, and which of them failed."""

    manager: pluggy.PluginManager
    ops: dict[str, Op[..., Any]] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)
    implementations: dict[str, dict[str, Callable[..., Any]]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    places: dict[str, str] = field(default_factory=lambda: {CORE: "'core' of liger-core"})


@cache
def registry() -> Registry:
    """Load every plugin and check what it brings.

    Raises PluginError for a hook that does not exist or is not marked, two ops or backends of one name, an unknown op, or a
    signature that differs from the reference. A plugin that fails to run is kept in `failed` with its cause, and warned about.
    `LIGER_DISABLE_PLUGINS=name,…` blocks plugins.
    """
    from liger_core import builtin

    warn_if_untested("liger-core")
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(builtin, CORE)
    found = Registry(manager, blocked=tuple(filter(None, os.environ.get(BLOCK, "").replace(" ", "").split(","))))
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name not in found.blocked:
            _load(found, entry)
    _collect_ops(found)
    _collect_backends(found)
    # An op that a plugin defines brings its reference with it.
    found.implementations[REFERENCE] = {name: op.reference for name, op in found.ops.items()}
    return found


def _load(found: Registry, entry: importlib.metadata.EntryPoint) -> None:
    where = _place(entry)
    try:
        plugin = entry.load()
    except Exception as error:
        _leave_out(found, entry.name, where, f"importing {entry.value} failed", error)
        return
    _check_hooks(found.manager, plugin, entry.name, where)
    try:
        found.manager.register(plugin, entry.name)
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"plugin {where}: its hooks must take the arguments that they are specified with, {error}; {_blocking(entry.name)}"
        ) from error
    found.places[entry.name] = where


def _check_hooks(manager: pluggy.PluginManager, plugin: object, name: str, where: str) -> None:
    """A hook that pluggy would never call must not pass for one."""
    known = [hook for hook in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, hook) is not None]
    marked = [hook for hook in dir(plugin) if manager.parse_hookimpl_opts(plugin, hook) is not None]
    for hook in marked:
        if hook not in known:
            raise PluginError(
                f"plugin {where}: every hook must be one of {', '.join(known)}, got {hook!r}.{nearest(hook, known)} {_blocking(name)}"
            )
    for hook in known:
        if hook not in marked and hasattr(plugin, hook):
            raise PluginError(f"plugin {where}: the hook {hook} must be marked with @liger_core.hookimpl, it is not; {_blocking(name)}")
    if not marked:
        raise PluginError(f"plugin {where}: it must have one of the hooks {', '.join(known)}, it has none; {_blocking(name)}")


def _leave_out(found: Registry, name: str, where: str, what: str, error: Exception) -> None:
    """A plugin that fails to run does not break the others, and does not disappear silently."""
    found.failed[name] = f"{where}: {what}: {type(error).__name__}: {error}"
    warnings.warn(f"plugin {found.failed[name]}. It is left out; {_blocking(name)}", RuntimeWarning, stacklevel=4)


def _blocking(name: str) -> str:
    return f"{BLOCK}={name} leaves the plugin out"


def _place(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.name!r} of {entry.dist.name if entry.dist else 'an unknown distribution'}"


def _offers(found: Registry, hook: str) -> Iterator[tuple[str, str, Any]]:
    """(plugin, where it comes from, item) for every item that the plugins return from a hook."""
    for implementation in getattr(found.manager.hook, hook).get_hookimpls():
        name = found.manager.get_name(implementation.plugin) or ""
        where = found.places.get(name, repr(name))
        try:
            items = list(implementation.function())
        except Exception as error:
            _leave_out(found, name, where, f"its hook {hook} failed", error)
            continue
        yield from ((name, where, item) for item in items)


def _collect_ops(found: Registry) -> None:
    origin: dict[str, str] = {}
    for name, where, op in _offers(found, "liger_ops"):
        if not isinstance(op, Op):
            raise PluginError(f"plugin {where}: liger_ops must return ops, got {type(op).__name__}; {_blocking(name)}")
        if op.name in origin:
            raise PluginError(f"op {op.name!r}: one plugin must define it, got {origin[op.name]} and {where}; {_blocking(name)}")
        origin[op.name] = where
        found.ops[op.name] = op


def _collect_backends(found: Registry) -> None:
    for name, where, backend in _offers(found, "liger_backends"):
        if not isinstance(backend, Backend):
            raise PluginError(f"plugin {where}: liger_backends must return backends, got {type(backend).__name__}; {_blocking(name)}")
        if backend.name == "auto":
            raise PluginError(
                f"plugin {where}: a backend must not be named 'auto', which is the word for the automatic choice; {_blocking(name)}"
            )
        if backend.name in found.backends:
            other = found.backends[backend.name].distribution
            raise PluginError(f"backend {backend.name!r}: one plugin must bring it, got {other} and {where}; {_blocking(name)}")
        found.backends[backend.name] = backend = replace(backend, distribution=where)
        reason = _probe(backend)
        if reason is None:
            try:
                found.implementations[backend.name] = backend.table(found.ops)
            except PluginError as error:
                raise PluginError(f"{error}{' ' if str(error)[-1] in '.?' else '; '}{_blocking(name)}") from error
            except Exception as error:
                reason = f"loading it failed: {type(error).__name__}: {error}"
        if reason is not None:
            found.unavailable[backend.name] = reason


def _probe(backend: Backend) -> str | None:
    try:
        return backend.unavailable()
    except Exception as error:
        return f"its availability check failed: {type(error).__name__}: {error}"
