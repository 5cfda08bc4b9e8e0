# SPDX-License-Identifier: Apache-2.0
"""Compute linear layers with adapters that read the same input, such as q, k and v, by one call of lora_linears.

Every call checks which adapters are active. Layers with hooks, dropout or DoRA run separately.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from liger_core import lora_linears
from liger_hf.passing import has_hooks
from liger_hf.patch import Patch, installed_in, replacement, slot
from liger_hf.rebinding import unwrapped
from liger_hf.rules.lora.rule import ADAPTED, Adapter, brings_weight, computed, drops, fits, weight_of
from liger_hf.rules.lora.source import TAKE, TOGETHER, with_shared_inputs
from liger_hf.unread import unread

NOTE = "In {count} module{s}, linear layers with adapters that read the same input read it once."
MOST = 3
SUFFIXES = ("", "_2", "_3")


def together(modules: Sequence[nn.Module], x: Any) -> list[Any]:
    """Return the output of each module for x."""
    shared = _shared(modules, x)
    outputs = _computed([modules[index] for index in shared], [*shared.values()], x) if shared else None
    if outputs is None:
        return [module(x) for module in modules]
    results = dict(zip(shared, outputs, strict=True))
    return [results[index] if index in results else module(x) for index, module in enumerate(modules)]


def patches(model: nn.Module, installed: Iterable[Patch]) -> Iterator[Patch]:
    """Rebuild forwards that call several layers with adapters, as attention does, to call the layers together.

    installed  patches whose forwards may be rebuilt, too; any other replaced forward stays
    """
    ours = {id(patch.value) for patch in installed}
    for module in model.modules():
        names = _adapted_in(module)
        current = module.__dict__.get(slot(module))
        if len(names) > 1 and (current is None or id(current) in ours):
            function = unwrapped(type(module).forward) if current is None else installed_in(current.__func__)
            rebuilt = function.__dict__.setdefault("__together__", {})
            if names not in rebuilt:
                # One function for all modules of a kind, which torch.compile compiles once.
                rebuilt[names] = with_shared_inputs(function, names, {TOGETHER: together, TAKE: _take})
            if rebuilt[names] is not None:
                yield replacement(module, rebuilt[names], function)


def unread_forwards(model: nn.Module) -> Iterator[str]:
    """Return a sentence for each class of modules whose forward calls several such layers but cannot be read."""
    sentences = (
        unread(module, names, "", "its linear layers with adapters read the same input one after the other")
        for module in model.modules()
        if len(names := _adapted_in(module)) > 1
    )
    return (f"{sentence}." for sentence in dict.fromkeys(sentences) if sentence is not None)


def _adapted_in(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module._modules.items() if child is not None and is_adapted(child))


def _take(outputs: list[Any], index: int) -> Any:
    """Return a result and drop the reference to it, so the rest of the forward does not keep it in memory."""
    output, outputs[index] = outputs[index], None
    return output


def is_adapted(module: nn.Module) -> bool:
    """Whether the module's forward is the one that `apply` installs in layers with adapters."""
    return hasattr(module.__dict__.get("forward"), ADAPTED)


def _shared(modules: Sequence[nn.Module], x: Any) -> dict[int, Adapter]:
    """Return the indices and adapters of the first two or three modules that one call can compute."""
    groups: dict[Any, dict[int, Adapter]] = {}
    for index, module in enumerate(modules):
        adapter = _adapter(module, x)
        if adapter is not None:
            group = groups.setdefault((adapter.scale, adapter.a.weight.dtype, brings_weight(module.base_layer, x)), {})
            if len(group) < MOST:
                group[index] = adapter
    return next((group for group in groups.values() if len(group) > 1), {})


def _adapter(module: Any, x: Any) -> Adapter | None:
    """Return the active adapter for x if it is LoRA without dropout and the module has no hooks, else None."""
    adapter = None if not is_adapted(module) or has_hooks(module) else computed(module, x)
    return None if adapter is None or adapter.magnitude is not None or drops(adapter) else adapter


def _computed(modules: Sequence[Any], adapters: Sequence[Adapter], x: Tensor) -> tuple[Tensor, ...] | None:
    """Compute the outputs of the modules in one call; None if an adapter cannot be added to its layer's output."""
    layers = [module.base_layer for module in modules]
    sources: list[tuple[Any, ...]]
    if brings_weight(layers[0], x):
        sources = [(weight_of(layer), layer.bias, None) for layer in layers]
    else:
        outputs = [layer(x) for layer in layers]
        if not all(fits(y, x) for y in outputs) or len({y.dtype for y in outputs}) > 1:
            return None
        sources = [(None, None, y) for y in outputs]
    tensors: dict[str, Any] = {}
    for suffix, (weight, bias, base), adapter in zip(SUFFIXES, sources, adapters, strict=False):
        of_layer = {"weight": weight, "a": adapter.a.weight, "b": adapter.b.weight, "bias": bias, "base": base}
        tensors |= {f"{name}{suffix}": value for name, value in of_layer.items()}
    return lora_linears(x, scale=adapters[0].scale, **tensors)
