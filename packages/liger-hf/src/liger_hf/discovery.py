# SPDX-License-Identifier: Apache-2.0
"""The rules of this package and of plugins. A faulty rule of a plugin does not affect the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from torch import nn

from liger_core.plugins import Plugin, Registry, attempt, blaming, offers, one_of_each, registry
from liger_hf.rule import Found, Rule
from liger_hf.rules import RULES

OURSELVES = Plugin("hf", "liger-hf")


def rules() -> tuple[Rule, ...]:
    """Return the rules of this package, then those that plugins return from `liger_rules()`."""
    return _rules_of(registry())


def replaceable_ops(on_request: bool = True) -> tuple[str, ...]:
    """Return the names of the ops that rules can insert into models.

    on_request  include the ops that are inserted only if only= names them
    """
    return tuple(dict.fromkeys(op for rule in rules() if on_request or not rule.on_request for op in rule.ops))


@lru_cache(maxsize=1)
def _rules_of(found: Registry) -> tuple[Rule, ...]:
    own = [(OURSELVES, rule.name, rule) for rule in RULES]
    kept: list[Rule] = []
    for plugin, rule in one_of_each(found, "rule", [*own, *offers(found, "liger_rules", Rule)]):
        if plugin == OURSELVES:
            kept.append(rule)
            continue
        with blaming(found, [plugin], f"rule {rule.name!r}"):
            rule.check(found.ops)
            kept.append(replace(rule, look=_guarded(found, plugin, rule)))
    return tuple(kept)


def _guarded(found: Registry, plugin: Plugin, rule: Rule) -> Callable[[nn.Module], Found | None]:
    def look(module: nn.Module) -> Found | None:
        with blaming(found, [plugin], f"what rule {rule.name!r} makes of {type(module).__name__}"):
            return attempt(f"rule {rule.name!r}: looking at {type(module).__name__}", lambda: rule.look(module))
        return None

    return look
