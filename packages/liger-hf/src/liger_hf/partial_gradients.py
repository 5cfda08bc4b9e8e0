# SPDX-License-Identifier: Apache-2.0
"""Correct tensor-parallel gradients under gradient accumulation.

A norm over the heads of one rank has only part of its gradient, and Transformers (5.17 to 5.23) sums `weight.grad` over
the ranks after every backward pass. From the second micro-batch on, `weight.grad` already contains such a sum, which
the next one would count once per rank. A hook therefore divides it by the number of ranks before a gradient is added.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_hf.patch import Patch
from liger_hf.private_transformers import ALL_REDUCE_GRAD, PARTIAL_GRADIENTS

NOTE = (
    "Gradients of {count} norm{s} over the heads of a rank stay right when they are accumulated, which Transformers "
    "would add up several times."
)
# The names in the summing code. Different names mean different code, for which dividing may be wrong.
NAMES_IN_SUMMING_CODE = {"dist", "all_reduce", "grad", "get_group"}


def patches(model: nn.Module) -> Iterator[Patch]:
    """Yield a patch for each module whose gradients Transformers sums over ranks."""
    for module in model.modules():
        ranks = _ranks_summed_over(module)
        if ranks > 1 and not any(_is(hook, _register_on_weights) for hook in module._forward_pre_hooks.values()):
            yield GradientCorrection(module, "_forward_pre_hooks", partial(_register_on_weights, ranks))


@dataclass(eq=False)
class GradientCorrection(Patch):
    """Register the correction on a module's weights before each forward, which includes weights that FSDP gathers."""

    handle: RemovableHandle | None = None

    def install(self) -> Self:
        self.handle = self.owner.register_forward_pre_hook(self.value)
        self.value(self.owner, ())
        return self

    def undo(self) -> bool:
        if self.handle is not None:
            self.handle.remove()
        for weight in self.owner.parameters(recurse=False):
            hooks = weight._backward_hooks or {}
            for key in [key for key, hook in hooks.items() if _is(hook, _divide_accumulated)]:
                del hooks[key]
        return True


def _register_on_weights(ranks: int, module: nn.Module, _: Any) -> None:
    # A compiled forward would register another hook in each call.
    if torch.compiler.is_compiling():
        return
    for weight in module.parameters(recurse=False):
        hooks = (weight._backward_hooks or {}).values()
        if weight.requires_grad and not any(_is(hook, _divide_accumulated) for hook in hooks):
            weight.register_hook(partial(_divide_accumulated, ranks, weight))


def _divide_accumulated(ranks: int, weight: Tensor, _: Tensor) -> None:
    """Divide the gradient accumulated so far by the number of ranks."""
    if weight.grad is not None:
        weight.grad.div_(ranks)


def _is(hook: Any, function: Any) -> bool:
    return isinstance(hook, partial) and hook.func is function


def _ranks_summed_over(module: nn.Module) -> int:
    """Return the number of ranks that Transformers sums a module's gradients over, or 0 if not by known code."""
    for function in (*module._backward_hooks.values(), module.__dict__.get("forward")):
        if (
            not inspect.isfunction(function)
            or not function.__module__.startswith("transformers.")
            or not function.__qualname__.startswith(f"{PARTIAL_GRADIENTS}.")
        ):
            continue
        # In 5.17 this is a hook on the module, later a forward that puts a hook on each weight.
        adds_up = inspect.getclosurevars(function).nonlocals.get(ALL_REDUCE_GRAD, function)
        mesh = inspect.getclosurevars(adds_up).nonlocals.get("mesh")
        if mesh is not None and {*adds_up.__code__.co_names} - {"parameters"} == NAMES_IN_SUMMING_CODE:
            return int(mesh.size())
    return 0
