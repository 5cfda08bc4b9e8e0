# SPDX-License-Identifier: Apache-2.0
"""Record the state of a module in a call, for a backward pass that recomputes it or logits that are read later."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# The attributes of every module, which torch manages; only the mode counts as a setting.
MANAGED = frozenset(vars(nn.Module())) - {"training"}
SCALARS = (bool, int, float, str, type(None))
# The value of a missing attribute.
ABSENT = object()


class Settings:
    """The settings of a module and its descendants in one call.

    These are their children, which parameters require gradients, and attributes that are flags, numbers, strings or
    collections of these, such as PEFT's active adapters and their scales.
    """

    def __init__(self, module: nn.Module) -> None:
        self.states = [(inner, _settings(inner)) for inner in module.modules()]
        self.trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the settings of the call within this context."""
        with ExitStack() as stack:
            for inner, before in self.states:
                now = vars(inner)
                changed = {name: value for name, value in before.items() if now.get(name, ABSENT) != value}
                stack.callback(_put, now, {name: now.get(name, ABSENT) for name in changed})
                _put(now, changed)
            for parameter, trained in self.trained:
                if parameter.requires_grad != trained:
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(trained)
            yield


def settings_of(module: nn.Module) -> Settings | None:
    """Return the settings of a module; None for a linear layer, whose settings do not matter, and in compiled code."""
    return None if type(module) is nn.Linear or torch.compiler.is_compiling() else Settings(module)


def checkpointed(function: Callable[..., Any], *args: Any, settings: Settings | None) -> Any:
    """Return function(*args), which the backward pass recomputes with these settings."""
    options: dict[str, Any] = {} if settings is None else {"context_fn": lambda: (nullcontext(), settings.again())}
    return checkpoint(function, *args, use_reentrant=False, **options)


def _settings(module: nn.Module) -> dict[str, Any]:
    settings = {name: value for name, value in vars(module).items() if name not in MANAGED and is_setting(value)}
    return {**copy.deepcopy(settings), "_modules": dict(module._modules)}


def is_setting(value: Any) -> bool:
    """Return whether a value is a flag, a number, a string or None, or a collection of these."""
    if isinstance(value, dict):
        return all(map(is_setting, [*value, *value.values()]))
    return all(map(is_setting, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, SCALARS)


def _put(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is ABSENT:
            del attributes[name]
        else:
            attributes[name] = value


def draws(module: nn.Module) -> bool:
    """Return whether a call of the module draws random numbers."""
    return any(isinstance(child, nn.Dropout) and child.training and child.p > 0 for child in module.modules())


class RandomState:
    """The state of the random generators, which `again` restores to draw the same numbers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states = (
            torch.get_rng_state(),
            None if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same random numbers again within this context; the current random state is restored on exit."""
        kind = self.device.type
        devices = [] if kind == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind):
            torch.set_rng_state(self.states[0])
            if self.states[1] is not None:
                torch.get_device_module(kind).set_rng_state(self.states[1], self.device)
            yield
