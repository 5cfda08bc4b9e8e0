# SPDX-License-Identifier: Apache-2.0
"""Weights whose gradient Transformers adds up over tensor-parallel ranks: each rank has the part of its own heads.

Transformers (5.17 to 5.23) adds up `.grad` after each backward pass, and so what earlier micro-batches have left there, which is a sum already.
Divided by the number of ranks before a gradient is added, that comes out of the next sum as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_hf.patch import Patch
from liger_hf.private_transformers import ALL_REDUCE_GRAD, PARTIAL_GRADIENTS

NOTE = "Gradients of {count} norms over the heads of a rank stay right when they are accumulated, which Transformers would add up several times."
# The names in its code; where they are others, Transformers may have mended it, and dividing would be wrong.
CALLED = {"dist", "all_reduce", "grad", "get_group"}


def patches(model: nn.Module) -> Iterator[Patch]:
    """One for every module with such weights."""
    for module in model.modules():
        ranks = _ranks(module)
        if ranks > 1 and not any(_is(hook, _watch) for hook in module._forward_pre_hooks.values()):
            yield Watch(module, "_forward_pre_hooks", partial(_watch, ranks))


@dataclass(eq=False)
class Watch(Patch):
    """Of the weights of a module, also of those that FSDP gathers for its forward."""

    handle: RemovableHandle | None = None

    def install(self) -> Patch:
        self.handle = self.owner.register_forward_pre_hook(self.value)
        self.value(self.owner, ())
        return self

    def undo(self) -> bool:
        if self.handle is not None:
            self.handle.remove()
        for weight in self.owner.parameters(recurse=False):
            hooks = weight._backward_hooks or {}
            for key in [key for key, hook in hooks.items() if _is(hook, _divide)]:
                del hooks[key]
        return True


def _watch(ranks: int, module: nn.Module, _: Any) -> None:
    # A compiled forward would put the hook there with each call.
    if torch.compiler.is_compiling():
        return
    for weight in module.parameters(recurse=False):
        if weight.requires_grad and not any(_is(hook, _divide) for hook in (weight._backward_hooks or {}).values()):
            weight.register_hook(partial(_divide, ranks, weight))


def _divide(ranks: int, weight: Tensor, _: Tensor) -> None:
    """Before a gradient is added to the sum."""
    if weight.grad is not None:
        weight.grad.div_(ranks)


def _is(hook: Any, function: Any) -> bool:
    return isinstance(hook, partial) and hook.func is function


def _ranks(module: nn.Module) -> int:
    """How many Transformers adds up the gradients of; 0 if it does not, or by code that is not known here."""
    for function in (*module._backward_hooks.values(), module.__dict__.get("forward")):
        if (
            not inspect.isfunction(function)
            or not function.__module__.startswith("transformers.")
            or not function.__qualname__.startswith(f"{PARTIAL_GRADIENTS}.")
        ):
            continue
        # In 5.17 this is the hook on the module; later a forward that puts one on each weight.
        adds_up = inspect.getclosurevars(function).nonlocals.get(ALL_REDUCE_GRAD, function)
        mesh = inspect.getclosurevars(adds_up).nonlocals.get("mesh")
        if mesh is not None and {*adds_up.__code__.co_names} - {"parameters"} == CALLED:
            return int(mesh.size())
    return 0
