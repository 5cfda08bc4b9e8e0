# SPDX-License-Identifier: Apache-2.0
"""Record the children, functions and settings that a replacement ignores, and only the module's own forward uses."""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch import nn

from liger_core.private_torch import has_global_hook
from liger_hf.patch import MARK, Patch, replacement, slot
from liger_hf.private_transformers import OFFLOADED
from liger_hf.rebinding import names_in, same_forward

# The attribute of a patched module that holds name → what `passed_over` returns; a child comes with its class.
PASSED = "liger_passed_over"


def passing(
    module: nn.Module, function: Callable[..., Any], original: Callable[..., Any], called: tuple[str, ...] = ()
) -> list[Patch]:
    """Return the patches of a replacement that uses only these children and settings itself."""
    return [Patch(module, PASSED, passed_over(module, called)), replacement(module, function, original)]


def passed_over(module: nn.Module, called: tuple[str, ...]) -> dict[str, Any]:
    """Return the children, functions and settings of a module, except those that the replacement uses itself.

    Settings are numbers, flags and strings that the methods of its class read.
    """
    children = {
        n: (child, type(child)) for n, child in module._modules.items() if child is not None and n not in called
    }
    forwards = (slot(module), "forward")
    functions = {n: value for n, value in vars(module).items() if inspect.isroutine(value) and n not in forwards}
    kind: Any = type(module)
    read = _names_read(kind) - {"training"}
    settings = {
        name: value
        for name, value in vars(module).items()
        if name in read and name not in called and isinstance(value, (bool, int, float, str, type(None)))
    }
    return {**children, **functions, **settings}


@cache
def _names_read(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names read by the methods that a class and its bases add to nn.Module, except __init__."""
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    methods = [value for base in bases for name, value in vars(base).items() if name != "__init__"]
    functions = [inspect.unwrap(method) for method in methods if inspect.isfunction(method)]
    return frozenset(name for function in functions for name in names_in(function.__code__))


def may_pass(module: nn.Module) -> bool:
    """Return whether all that the replacement ignores is unchanged since `apply` checked it, and has no hooks."""
    for name, known in module.__dict__.get(PASSED, {}).items():
        if isinstance(known, tuple):
            child: nn.Module = known[0]
            if module._modules.get(name) is not child or hooked(child) or has_global_hook():
                return False
            if not same_forward(type(child), known[1]):
                return False
        elif module.__dict__.get(name) != known:
            return False
    return True


def skipping(children: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Return why a fused op may not skip these children, or None if it may."""
    name = next((name for name, child in children if hooked(child)), None)
    return name and f"the fused op would skip {name}, which has a hook or its own forward; remove it before `apply`"


def hooked(module: nn.Module) -> bool:
    """Return whether calling the module does more than its class defines.

    Hooks of accelerate and ZeRO-3 do not count, because they only move tensors and gather parameters. A forward that
    `apply` installed does not count either, because it computes the same as its class.
    """
    for m in module.modules() if module._modules else (module,):
        for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks):
            if hooks and not all(getattr(hook, "__module__", "").startswith("deepspeed.") for hook in hooks.values()):
                return True
        forward = m.__dict__.get("forward")
        if forward is not None and OFFLOADED not in m.__dict__ and not hasattr(forward, MARK):
            return True
    return False


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module itself has hooks of any kind."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
