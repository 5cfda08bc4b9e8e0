# SPDX-License-Identifier: Apache-2.0
"""Find the trainable weights that the first optimizer step leaves without a gradient, and why."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from liger_hf.report import pattern

# The name of a weight of an adapter of PEFT: the layer that has it, and the adapter.
ADAPTER = re.compile(r"(.+?)\.lora_\w+\.(\w+)(?:\.|$)")
FROZEN = "they are frozen, while other weights of the adapter are trained"
IDLE = "their module never ran"
DETACHED = "their module ran, but the loss does not depend on them"


class GradientCheck(TrainerCallback):
    """Call `warn` with a sentence for each kind of trainable weights that gets no gradient in the first steps.

    It reads `.grad` once. Only if some weights have none, hooks note in the second step whether their modules run, and
    that step is not compiled. It says nothing if all have none, because DeepSpeed and some optimizers take them away.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self.warn = warn
        self._steps = 0
        self._trained: list[str] = []
        # Weight → why it has no gradient.
        self._without: dict[str, str] = {}
        self._watching = ExitStack()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        self._steps += 1
        if self._steps == 1:
            self._look(model)
        elif self._steps == 2:
            self._report(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self._steps == 1:
            self._report(state)

    def _look(self, model: nn.Module) -> None:
        weights = dict(model.named_parameters())
        if all(weight.grad is None for weight in weights.values()):
            return
        frozen = _frozen_by_mistake(weights)
        # A rank of FSDP1 has no gradient for weights of which it holds nothing.
        idle = [n for n, w in weights.items() if w.requires_grad and w.grad is None and w.numel()]
        self._trained = [name for name, weight in weights.items() if weight.requires_grad or name in frozen]
        self._without = dict.fromkeys(frozen, FROZEN) | dict.fromkeys(idle, IDLE)
        for owner in set(map(_owner, idle)):
            hook = model.get_submodule(owner).register_forward_pre_hook(lambda *_, owner=owner: self._ran(owner))
            self._watching.callback(hook.remove)
        if idle:
            # Code that is compiled already ignores new hooks.
            self._watching.enter_context(torch.compiler.set_stance("force_eager"))

    def _ran(self, owner: str) -> None:
        self._without |= {n: DETACHED for n, why in self._without.items() if why == IDLE and _owner(n) == owner}

    def _report(self, state: Any) -> None:
        self._watching.close()
        if state.is_world_process_zero:
            for sentence in sentences(self._without, self._trained):
                self.warn(sentence)
        self._without = {}


def sentences(without: Mapping[str, str], trained: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each kind of weights without a gradient, given the reason for each.

    A kind is the largest module of which no weight has a gradient, in all layers. Experts that a loop did not call are
    left out if it called others, because each batch chooses its own.
    """
    names = {name: _around(name) for name in trained}
    total = Counter(module for modules in names.values() for module in modules)
    everywhere = Counter(pattern(module) for modules in names.values() for module in modules)
    kinds: Counter[tuple[str, str, str]] = Counter()
    for reason in dict.fromkeys(without.values()):
        chosen = {name: names[name] for name, why in without.items() if why == reason}
        count = Counter(module for modules in chosen.values() for module in modules)
        for name, modules in chosen.items():
            whole = [module for module in modules if count[module] == total[module]]
            smallest = next(module for module in reversed(whole) if count[module] == count[whole[0]])
            kinds[pattern(smallest), "adapter" if ADAPTER.match(name) else "trainable", reason] += 1
    for (kind, what, reason), count_of_kind in kinds.items():
        if reason != IDLE or count_of_kind == everywhere[kind] or "experts" not in kind.split("."):
            where = kind.removesuffix(".weight")
            yield f"{count_of_kind} of {everywhere[kind]} {what} weights of {where} got no gradient: {reason}."


def _owner(name: str) -> str:
    """Return the name of the module that has a weight, or that has the adapter."""
    adapter = ADAPTER.match(name)
    return adapter[1] if adapter else name.rpartition(".")[0]


def _around(name: str) -> list[str]:
    """Return the names of the modules around a weight, the largest first, and its own; without what PEFT inserts."""
    short, owner = (n.removeprefix("base_model.model.").replace(".base_layer", "") for n in (name, _owner(name)))
    parts = owner.split(".")
    return [*(".".join(parts[:end]) for end in range(1, len(parts) + 1)), short]


def _frozen_by_mistake(weights: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the weights of layers in which an adapter is frozen that is trained in other layers."""
    layers = {name: match.groups() for name in weights if (match := ADAPTER.match(name))}
    trained = {layer for name, layer in layers.items() if weights[name].requires_grad}
    adapters = {adapter for _, adapter in trained}
    return {name for name, layer in layers.items() if layer not in trained and layer[1] in adapters}
