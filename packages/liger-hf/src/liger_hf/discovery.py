# SPDX-License-Identifier: Apache-2.0
"""Collect the rules of this package and of plugins; a faulty rule of a plugin does not affect the others."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from torch import nn

from liger_core.plugins import Plugin, Registry, attempt, blaming, offers, one_of_each, registry
from liger_hf.rule import Found, Rule
from liger_hf.rules import RULES

BUILT_IN = Plugin("hf", "liger-hf")


def rules() -> tuple[Rule, ...]:
    """Return the rules of this package, then the rules that plugins return from `liger_rules()`."""
    return _load_rules(registry())


def replaceable_ops(on_request: bool = True) -> tuple[str, ...]:
    """Return the names of the ops that rules can insert into models.

    on_request  include the ops that are inserted only if only= names them
    """
    return tuple(dict.fromkeys(op for rule in rules() if on_request or not rule.on_request for op in rule.ops))


@lru_cache(maxsize=1)
def _load_rules(registry: Registry) -> tuple[Rule, ...]:
    built_in = [(BUILT_IN, rule.name, rule) for rule in RULES]
    loaded: list[Rule] = []
    for plugin, rule in one_of_each(registry, "rule", [*built_in, *offers(registry, "liger_rules", Rule)]):
        if plugin == BUILT_IN:
            loaded.append(rule)
            continue
        with blaming(registry, [plugin], f"rule {rule.name!r}"):
            rule.check(registry.ops)
            loaded.append(replace(rule, look=_guarded(registry, plugin, rule)))
    return tuple(loaded)


def _guarded(registry: Registry, plugin: Plugin, rule: Rule) -> Callable[[nn.Module], Found | None]:
    def look(module: nn.Module) -> Found | None:
        with blaming(registry, [plugin], f"what rule {rule.name!r} makes of {type(module).__name__}"):
            return attempt(f"rule {rule.name!r}: looking at {type(module).__name__}", lambda: rule.look(module))
        return None

    return look
