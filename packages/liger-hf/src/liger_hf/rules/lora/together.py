# SPDX-License-Identifier: Apache-2.0
"""Compute linear layers with adapters that read the same input, such as q, k and v, by one call of lora_linears.

Every call checks which adapters are active. Layers with hooks, dropout or DoRA run separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from liger_core import lora_linears
from liger_hf.patch import Patch, installed_in, replacement, slot
from liger_hf.rebinding import unwrapped
from liger_hf.rules.lora.rule import ADAPTED, Adapter, brings_weight, computed, drops, fits
from liger_hf.rules.lora.source import TAKE, TOGETHER, with_shared_inputs
from liger_hf.unread import unread

NOTE = "In {count} modules, linear layers with adapters that read the same input read it once."
MOST = 3
SUFFIXES = ("", "_2", "_3")


def together(modules: Sequence[nn.Module], x: Any) -> list[Any]:
    """Return the output of each module for x."""
    shared = _shared(modules, x)
    made = _computed([modules[place] for place in shared], [*shared.values()], x) if shared else None
    if made is None:
        return [module(x) for module in modules]
    results = dict(zip(shared, made, strict=True))
    return [results[place] if place in results else module(x) for place, module in enumerate(modules)]


def patches(model: nn.Module, installed: Iterable[Patch]) -> Iterator[Patch]:
    """Rebuild forwards that call several layers with adapters, as attention does, to call the layers together.

    installed  patches whose forwards may be rebuilt, too; others that differ from those of their class are left alone
    """
    ours = {id(patch.value) for patch in installed}
    for module in model.modules():
        names = _adapted_in(module)
        own = module.__dict__.get(slot(module))
        if len(names) > 1 and (own is None or id(own) in ours):
            function = unwrapped(type(module).forward) if own is None else installed_in(own.__func__)
            made = function.__dict__.setdefault("__together__", {})
            if names not in made:
                # One for all modules of a kind, which torch.compile then compiles once.
                made[names] = with_shared_inputs(function, names, {TOGETHER: together, TAKE: _take})
            if made[names] is not None:
                yield replacement(module, made[names], function)


def unread_forwards(model: nn.Module) -> Iterator[str]:
    """Return a sentence for each class of modules whose forward may do so but has no readable source."""
    sentences = (
        unread(module, names, "", "its linear layers with adapters read the same input one after the other")
        for module in model.modules()
        if len(names := _adapted_in(module)) > 1
    )
    return (f"{sentence}." for sentence in dict.fromkeys(sentences) if sentence is not None)


def _adapted_in(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module._modules.items() if child is not None and is_adapted(child))


def _take(parts: list[Any], place: int) -> Any:
    """Return a result and drop the reference to it, so the rest of the forward does not keep it in memory."""
    found, parts[place] = parts[place], None
    return found


def is_adapted(module: nn.Module) -> bool:
    """Whether the module's forward is the one that `apply` installs in layers with adapters."""
    return hasattr(module.__dict__.get("forward"), ADAPTED)


def _shared(modules: Sequence[nn.Module], x: Any) -> dict[int, Adapter]:
    """Return the indices and adapters of the first two or three modules that one call can compute."""
    groups: dict[Any, dict[int, Adapter]] = {}
    for place, module in enumerate(modules):
        adapter = _adapter(module, x)
        if adapter is not None:
            group = groups.setdefault((adapter.scale, adapter.a.weight.dtype, brings_weight(module.base_layer, x)), {})
            if len(group) < MOST:
                group[place] = adapter
    return next((group for group in groups.values() if len(group) > 1), {})


def _adapter(module: Any, x: Any) -> Adapter | None:
    """Return the active adapter for x if it is LoRA without dropout and the module has no hooks, else None."""
    if (
        not is_adapted(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return None
    adapter = computed(module, x)
    return None if adapter is None or adapter.magnitude is not None or drops(adapter) else adapter


def _computed(modules: Sequence[Any], adapters: Sequence[Adapter], x: Tensor) -> tuple[Tensor, ...] | None:
    """Compute the outputs of the modules in one call; None if an adapter cannot be added to its layer's output."""
    layers = [module.base_layer for module in modules]
    if brings_weight(layers[0], x):
        given = [(layer.weight, layer.bias, None) for layer in layers]
    else:
        made = [layer(x) for layer in layers]
        if not all(fits(y, x) for y in made) or len({y.dtype for y in made}) > 1:
            return None
        given = [(None, None, y) for y in made]
    return lora_linears(x, scale=adapters[0].scale, **dict(_named(given, adapters)))


def _named(given: Sequence[Any], adapters: Sequence[Adapter]) -> Iterator[tuple[str, Any]]:
    for suffix, (weight, bias, base), adapter in zip(SUFFIXES, given, adapters, strict=False):
        tensors = {"weight": weight, "a": adapter.a.weight, "b": adapter.b.weight, "bias": bias, "base": base}
        yield from ((f"{name}{suffix}", value) for name, value in tensors.items())
