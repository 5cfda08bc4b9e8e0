# SPDX-License-Identifier: Apache-2.0
"""The backend: a named table op → implementation for some device types."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from liger_core.errors import PluginError, nearest
from liger_core.op import Op

# The device types of the reference; tensors on any other device also get the reference.
DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "hpu", "meta")


class Implementation(NamedTuple):
    """A function of a backend, and the size up to which a compiled region gets the reference instead.

    The size is the number of elements of the first tensor. The compiler fuses the reference with its neighbors, and the
    host launches compiled code faster than a custom op.
    """

    function: Callable[..., Any]
    handed_over: int = 0


Implementations = Mapping["Op[..., Any]", Callable[..., Any] | Implementation]


def always() -> str | None:
    """Return None: a backend without requirements is always available."""
    return None


@dataclass(frozen=True)
class Backend:
    """A backend, as a plugin returns it from `liger_backends()`.

    device_types     PyTorch's names of device types, for instance ("cuda",)
    priority         `auto` tries the available backends from the highest priority down to the reference, which has 0
    implementations  op → function or `Implementation`, or a function that returns that table (so that importing the
                     plugin imports no compiler)
    unavailable      returns None, or why this backend cannot run here
    automatic        False if `auto` must never select it, whatever its priority, such as an interpreter for tests
    supports_fake_tensors
                     whether every implementation runs on fake tensors. Custom ops with fakes (`Kernel`) and plain
                     PyTorch operators do; code that reads data pointers, such as a function compiled by
                     `torch.compile`, crashes. Without it the backend never gets a fake tensor, so `explain` cannot
                     predict whether it declines a call
    distribution     filled in when the plugin is loaded: the distribution that it comes from
    """

    name: str
    device_types: tuple[str, ...]
    priority: int
    implementations: Implementations | Callable[[], Implementations]
    unavailable: Callable[[], str | None] = always
    automatic: bool = True
    supports_fake_tensors: bool = False
    distribution: str = ""

    def check(self) -> None:
        """Raise PluginError for mistakes that can be found without loading the implementations."""
        title = f"backend {self.name!r}"
        if self.name == "auto" or not re.fullmatch(r"[\w.-]+", str(self.name)):
            raise PluginError(
                f"{title}: its name must be letters, digits, '_', '-' and '.', and not 'auto', which means the "
                "automatic choice"
            )
        if not isinstance(self.priority, int) or (self.priority <= 0 and self.name != "reference"):
            raise PluginError(
                f"{title}: its priority must be an integer above 0, which the reference has, got {self.priority!r}"
            )
        if not isinstance(self.device_types, tuple) or not self.device_types:
            raise PluginError(f"{title}: device_types must be a tuple such as ('cpu',), got {self.device_types!r}")
        for kind in self.device_types:
            if not _is_device_type(kind):
                meant = " Did you mean 'cuda'?" if kind == "gpu" else nearest(str(kind), DEVICE_TYPES)
                raise PluginError(
                    f"{title}: each of its device_types must be one of PyTorch's, such as 'cpu' or 'cuda', got "
                    f"{kind!r}.{meant}"
                )

    def table(self, known: Mapping[str, Op[..., Any]]) -> dict[str, Implementation]:
        """Return a table op name → implementation, each with the signature of its reference."""
        implementations = self.implementations() if callable(self.implementations) else self.implementations
        table: dict[str, Implementation] = {}
        for op, value in implementations.items():
            implementation = value if isinstance(value, Implementation) else Implementation(value)
            name = op.name if isinstance(op, Op) else str(op)
            if name not in known:
                raise PluginError(
                    f"backend {self.name!r}: every op it implements must be a known op, got {name!r}; "
                    f"known: {', '.join(sorted(known))}.{nearest(name, known)}"
                )
            if drift := _drift(known[name], implementation.function):
                raise PluginError(f"backend {self.name!r}: {name} must have the signature of its reference; {drift}")
            table[name] = implementation
        return table


def _is_device_type(name: object) -> bool:
    """Whether tensors can have this device type, including those registered by out-of-tree devices."""
    try:
        return isinstance(name, str) and torch.device(name).type == name
    except RuntimeError:
        return False


def _drift(op: Op[..., Any], implementation: Callable[..., Any]) -> str:
    """Return the first difference between the signatures of an implementation and its reference, or an empty string."""
    want, got = op.signature.parameters, inspect.signature(implementation).parameters
    for name, parameter in want.items():
        if name not in got:
            return f"{name} is missing"
        if got[name].kind != parameter.kind:
            return f"{name} must be {parameter.kind.description}, got {got[name].kind.description}"
        if got[name].default != parameter.default:
            return f"the default of {name} must be {_default(parameter)}, got {_default(got[name])}"
    if extra := [name for name in got if name not in want]:
        return f"{extra[0]} is not one of its parameters"
    if list(got) != list(want):
        return f"the order must be {', '.join(want)}, got {', '.join(got)}"
    return ""


def _default(parameter: inspect.Parameter) -> str:
    return "absent" if parameter.default is parameter.empty else repr(parameter.default)
