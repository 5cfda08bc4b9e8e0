# SPDX-License-Identifier: Apache-2.0
"""Finds plugins through entry points and turns what they offer into two dictionaries, once."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import pluggy

from liger_core import hookspecs
from liger_core.backend import Backend
from liger_core.errors import PluginError
from liger_core.op import Op

GROUP = "liger"


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


@cache
def registry() -> Registry:
    """Load every plugin and check what it brings.

    Raises PluginError for a hook that does not exist, two ops or backends of one name, an unknown op, or a signature that
    differs from the reference. A plugin that fails to import is kept in `failed` with its cause, and warned about.
    `LIGER_DISABLE_PLUGINS=name,…` blocks plugins.
    """
    from liger_core import builtin

    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(builtin, "core")
    found = Registry(manager, blocked=tuple(filter(None, os.environ.get("LIGER_DISABLE_PLUGINS", "").replace(" ", "").split(","))))
    for entry in importlib.metadata.entry_points(group=GROUP):
        _load(found, entry)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"plugin {_origin(manager, error.plugin)}: every hook must be one of liger_ops, liger_backends, liger_commands; {error}"
        ) from error
    _collect_ops(found)
    _collect_backends(found)
    return found


def _load(found: Registry, entry: importlib.metadata.EntryPoint) -> None:
    if entry.name in found.blocked:
        return
    try:
        plugin = entry.load()
    except Exception as error:
        distribution = entry.dist.name if entry.dist else "an unknown distribution"
        found.failed[entry.name] = f"{distribution}: importing {entry.value} failed: {type(error).__name__}: {error}"
        warnings.warn(
            f"plugin {entry.name!r} of {found.failed[entry.name]}. It is left out; block it with LIGER_DISABLE_PLUGINS={entry.name}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    try:
        found.manager.register(plugin, entry.name)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {entry.name!r} of {_distribution(entry)}: its hooks must match their specification; {error}") from error


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown distribution"


def _origin(manager: pluggy.PluginManager, plugin: object) -> str:
    name = manager.get_name(plugin)
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            return f"{name!r} of {_distribution(entry)}"
    return repr(name)


def _collect_ops(found: Registry) -> None:
    origin: dict[str, str] = {}
    for implementation in found.manager.hook.liger_ops.get_hookimpls():
        where = _origin(found.manager, implementation.plugin)
        for op in cast("Iterable[Op[..., Any]]", implementation.function()):
            if op.name in origin:
                raise PluginError(f"op {op.name!r}: one plugin must define it, got {origin[op.name]} and {where}")
            origin[op.name] = where
            found.ops[op.name] = op


def _collect_backends(found: Registry) -> None:
    origin: dict[str, str] = {}
    for implementation in found.manager.hook.liger_backends.get_hookimpls():
        where = _origin(found.manager, implementation.plugin)
        for backend in cast("Iterable[Backend]", implementation.function()):
            if backend.name in origin:
                raise PluginError(f"backend {backend.name!r}: one plugin must bring it, got {origin[backend.name]} and {where}")
            if backend.name == "auto":
                raise PluginError(f"plugin {where}: a backend must not be named 'auto', which is the word for the automatic choice")
            origin[backend.name] = where
            object.__setattr__(backend, "distribution", where)
            found.backends[backend.name] = backend
            reason = _probe(backend)
            if reason is None:
                try:
                    found.implementations[backend.name] = backend.table(found.ops)
                except PluginError:
                    raise
                except Exception as error:
                    reason = f"loading it failed: {type(error).__name__}: {error}"
            if reason is not None:
                found.unavailable[backend.name] = reason


def _probe(backend: Backend) -> str | None:
    try:
        return backend.unavailable()
    except Exception as error:
        return f"its availability check failed: {type(error).__name__}: {error}"
