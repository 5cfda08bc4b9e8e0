# SPDX-License-Identifier: Apache-2.0
"""The registry of plugins: loads their entry points once, and collects their ops and backends."""

import importlib.metadata
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import pluggy

from liger_core import hookspecs
from liger_core.backend import Backend
from liger_core.errors import PluginError, nearest
from liger_core.op import Op
from liger_core.versions import warn_if_untested

GROUP = "liger"
CORE = "core"
REFERENCE = "reference"
DISABLE = "LIGER_DISABLE_PLUGINS"
# The distributions of this project. A plugin of another one cannot take a name that these use.
PROJECT = ("liger-core", "liger-triton", "liger-inductor", "liger-hf", "liger-bench", "liger-train", "liger-verify")
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Plugin:
    """An entry point, and the distribution that it comes from."""

    name: str
    distribution: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution}"

    @property
    def ours(self) -> bool:
        return self.distribution in PROJECT


OURSELVES = Plugin(CORE, "liger-core")
_own: list[object] = []


def offer(plugin: object) -> None:
    """Set core's own plugin, which this file must not import because it is in a higher layer."""
    _own[:] = [plugin]


@dataclass(eq=False)
class Registry:
    """The ops and backends of all plugins, and the faults of the plugins.

    handed_over  backend → op → number of elements up to which a compiled region gets the reference
    unavailable  backend → why it cannot run here, as the backend reports it
    left_out     backend → the fault for which it was not loaded
    failed       plugin → its faults
    disabled     names in LIGER_DISABLE_PLUGINS
    installed    names of all plugins besides core, disabled or not
    """

    manager: pluggy.PluginManager
    ops: dict[str, Op[..., Any]] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)
    implementations: dict[str, dict[str, Callable[..., Any]]] = field(default_factory=dict)
    handed_over: dict[str, dict[str, int]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    disabled: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    plugins: dict[str, Plugin] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Return the faults of the plugins as sentences."""
        return list(dict.fromkeys(fault for faults in self.failed.values() for fault in faults))

    def hooks(self, name: str) -> Iterator[tuple[Plugin, pluggy.HookImpl]]:
        """Yield the implementations of a hook, core first, then by plugin name."""
        hooks = {self.manager.get_name(hook.plugin): hook for hook in getattr(self.manager.hook, name).get_hookimpls()}
        yield from ((plugin, hooks[name]) for name, plugin in self.plugins.items() if name in hooks)


# Held while plugins are loaded or the selection changes, so that another thread never sees a partial state.
LOCK = threading.RLock()
_registry: Registry | None = None
_loading = False


def registry() -> Registry:
    """Return the ops, backends and faults of the plugins; the first call loads them.

    A fault of a plugin never stops the others: the affected part, for instance a backend, is ignored with a warning and
    listed in `Registry.failed`. `LIGER_DISABLE_PLUGINS=name,…` disables plugins, which are then not even imported.
    """
    global _registry, _loading
    if _registry is None:
        with LOCK:
            if _loading:
                raise PluginError("a plugin must not call an op or select a backend while the plugins are loaded")
            if _registry is None:
                _loading = True
                try:
                    _registry = _load_all()
                finally:
                    _loading = False
    return _registry


def forget() -> None:
    """Load the plugins again at the next use (for tests)."""
    global _registry
    with LOCK:
        _registry = None


@contextmanager
def blaming(registry: Registry, plugins: list[Plugin], ignored: str, *, backend: str = "") -> Iterator[None]:
    """Record a PluginError in this block as a fault of these plugins and warn; the rest of the block is skipped."""
    try:
        yield
    except PluginError as error:
        fault = f"{plugins[0]}: {error}" if len(plugins) == 1 else str(error)
        names = list(dict.fromkeys(plugin.name for plugin in plugins if plugin != OURSELVES))
        for name in names:
            faults = registry.failed.setdefault(name, [])
            if fault not in faults:
                faults.append(fault)
        if backend:
            registry.left_out[backend] = fault
        end, whom = " " if fault[-1] in ".?" else ". ", "the plugin" if len(names) == 1 else "one of them"
        switches = " or ".join(f"{DISABLE}={name}" for name in names)
        warnings.warn(f"{fault}{end}Ignoring {ignored}; set {switches} to disable {whom}", RuntimeWarning, stacklevel=5)


def attempt(what: str, call: Callable[[], T]) -> T:
    """Return the result of plugin code; every exception except KeyboardInterrupt becomes a PluginError."""
    try:
        return call()
    except (PluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(f"{what} failed: {type(error).__name__}: {error}") from error


def _load_all() -> Registry:
    warn_if_untested("liger-core")
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    for plugin in _own:
        manager.register(plugin, CORE)
    registry = Registry(manager, disabled=tuple(filter(None, os.environ.get(DISABLE, "").replace(" ", "").split(","))))
    registry.plugins[CORE] = OURSELVES
    # Sorted by name, so that the order of installation does not matter.
    entries = sorted((_plugin(entry), entry.value, entry) for entry in importlib.metadata.entry_points(group=GROUP))
    registry.installed = tuple(dict.fromkeys(plugin.name for plugin, _, _ in entries))
    candidates = [(plugin, plugin.name, entry) for plugin, _, entry in entries if plugin.name not in registry.disabled]
    for plugin, entry in one_of_each(registry, "plugin", [(OURSELVES, CORE, None), *candidates]):
        if entry:
            with blaming(registry, [plugin], "the plugin"):
                _load(registry, plugin, entry)
    for _, op in one_of_each(registry, "op", offers(registry, "liger_ops", Op)):
        registry.ops[op.name] = op
    for plugin, backend in one_of_each(registry, "backend", offers(registry, "liger_backends", Backend)):
        with blaming(registry, [plugin], f"backend {backend.name!r}", backend=backend.name):
            _add_backend(registry, plugin, backend)
    registry.implementations[REFERENCE] = {name: op.reference for name, op in registry.ops.items()}
    return registry


def _plugin(entry: importlib.metadata.EntryPoint) -> Plugin:
    # Damaged metadata has no name.
    return Plugin(entry.name, (entry.dist and entry.dist.name) or "an unknown distribution")


def _load(registry: Registry, plugin: Plugin, entry: importlib.metadata.EntryPoint) -> None:
    module = attempt(f"importing {entry.value}", entry.load)
    attempt("looking for its hooks", lambda: _check_hooks(registry.manager, module))
    try:
        attempt("registering its hooks", lambda: registry.manager.register(module, plugin.name))
    except PluginError:
        # pluggy keeps the hooks that it registered before the one it refused.
        if registry.manager.has_plugin(plugin.name):
            registry.manager.unregister(name=plugin.name)
        raise
    registry.plugins[plugin.name] = plugin


def _check_hooks(manager: pluggy.PluginManager, module: object) -> None:
    """Reject functions that look like hooks but that pluggy would never call."""
    known = [hook for hook in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, hook) is not None]
    marked = [hook for hook in dir(module) if manager.parse_hookimpl_opts(module, hook) is not None]
    for hook in marked:
        if hook not in known:
            raise PluginError(f"every hook must be one of {', '.join(known)}, got {hook!r}.{nearest(hook, known)}")
    for hook in known:
        if hook not in marked and hasattr(module, hook):
            raise PluginError(f"the hook {hook} must be marked with @liger_core.hookimpl, it is not")
    if not marked:
        raise PluginError(f"it must have one of the hooks {', '.join(known)}, it has none")


def offers(registry: Registry, hook: str, kind: type[T]) -> Iterator[tuple[Plugin, str, T]]:
    """Yield (plugin, name, item) for every item that the plugins return from a hook."""
    for plugin, implementation in registry.hooks(hook):
        with blaming(registry, [plugin], f"what {hook} returns"):
            items = attempt(f"its hook {hook}", partial(_items, implementation))
            for item in items:
                if not isinstance(item, kind):
                    raise PluginError(
                        f"{hook} must return a list of {kind.__name__}s, got a {type(item).__name__} in it"
                    )
            yield from ((plugin, item.name, item) for item in items)


def _items(implementation: pluggy.HookImpl) -> list[Any]:
    returned: Any = implementation.function()
    return list(returned)


def one_of_each(registry: Registry, kind: str, offered: Iterable[tuple[Plugin, str, T]]) -> list[tuple[Plugin, T]]:
    """Return the offers with unique names. If several share a name, only this project's is kept, if there is one."""
    by_name: dict[str, list[tuple[Plugin, T]]] = {}
    for plugin, name, item in offered:
        by_name.setdefault(name, []).append((plugin, item))
    unique: list[tuple[Plugin, T]] = []
    for name, rivals in by_name.items():
        keeps = keeper(
            registry, kind, name, [plugin for plugin, _ in rivals], "" if kind == "plugin" else f"the {kind} of "
        )
        unique += [rival for rival in rivals if rival[0] is keeps][:1]
    return unique


def keeper(registry: Registry, kind: str, name: str, rivals: list[Plugin], ignored: str) -> Plugin | None:
    """Return the plugin that keeps a name: the only one that uses it, or this project's.

    All others are reported, whatever the order in which they were loaded.
    """
    if len(rivals) == 1:
        return rivals[0]
    keeps = next((plugin for plugin in rivals if plugin.ours), None)
    lost = dict.fromkeys(str(plugin) for plugin in rivals if plugin is not keeps)
    left_out = name if kind == "backend" and keeps is None else ""
    with blaming(registry, list(dict.fromkeys(rivals)), f"{ignored}{' and '.join(lost)}", backend=left_out):
        raise PluginError(f"{kind} {name!r} must be offered once, got it from {' and '.join(map(str, rivals))}")
    return keeps


def _add_backend(registry: Registry, plugin: Plugin, backend: Backend) -> None:
    backend.check()
    reason = attempt(f"backend {backend.name!r}: its availability check", backend.unavailable)
    if reason is None:
        table = attempt(f"backend {backend.name!r}: loading it", lambda: backend.table(registry.ops))
        registry.implementations[backend.name] = {op: each.function for op, each in table.items()}
        registry.handed_over[backend.name] = {op: each.handed_over for op, each in table.items()}
    else:
        registry.unavailable[backend.name] = reason
    registry.backends[backend.name] = replace(backend, distribution=plugin.distribution)
