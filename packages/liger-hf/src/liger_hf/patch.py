# SPDX-License-Identifier: Apache-2.0
"""Replace one attribute of one instance, and restore it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Self

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from liger_hf.private_transformers import AUTOCAST_FORWARD, OFFLOADED, OFFLOADED_FORWARD
from liger_hf.rebinding import checkpointed, same_forward, unwrapped

MARK = "__liger__"
EARLIER = "already replaced by an earlier apply"
# Attributes of a function (class → its forward for modules of that class), and of such a forward (the function).
OF_CLASSES, INSTALLED = "__liger_of_classes__", "__liger_installed__"


class Missing:
    """A marker for an attribute that the instance did not have: the class itself, whose identity copying preserves."""


@dataclass(eq=False)
class Patch:
    """Set `owner.attribute` to `value` until `undo`, in the instance's own dictionary only."""

    owner: Any
    attribute: str
    value: Any
    previous: Any = Missing

    def install(self) -> Self:
        self.previous = self.owner.__dict__.get(self.attribute, Missing)
        self.owner.__dict__[self.attribute] = self.value
        return self

    def undo(self) -> bool:
        """Restore the attribute; return False if other code has replaced it since."""
        for attribute in (self.attribute, "forward", OFFLOADED_FORWARD, AUTOCAST_FORWARD):
            if self.owner.__dict__.get(attribute, Missing) is self.value:
                if self.previous is Missing:
                    del self.owner.__dict__[attribute]
                else:
                    self.owner.__dict__[attribute] = self.previous
                return True
        return False


def slot(module: nn.Module) -> str:
    """Return the name of the attribute that holds the module's own forward, which accelerate's hooks move."""
    return OFFLOADED_FORWARD if OFFLOADED in module.__dict__ and OFFLOADED_FORWARD in module.__dict__ else "forward"


def forward_of(module: nn.Module) -> Callable[..., Any] | str:
    """Return the unbound function that computes this module, or the reason why it cannot be replaced.

    A checkpointing wrapper around it stays in place.
    """
    current = module.__dict__.get(slot(module))
    function = getattr(current, "__func__", None)
    # copy.copy keeps the forward that is bound to the original module.
    if current is None or (hasattr(function, MARK) and current.__self__ is not module):
        return unwrapped(type(module).forward)
    if hasattr(function, MARK):
        return EARLIER
    if isinstance(current, MethodType) and current.__self__ is module and current.__func__ is type(module).forward:
        return unwrapped(current.__func__)
    # From its globals: functools.wraps copies the original's __module__.
    space = getattr(function or current, "__globals__", {})
    origin = space.get("__name__") or getattr(current, "__module__", None) or type(current).__name__
    return f"its forward was already replaced on this instance, by code in {origin}"


def replaced_method(module: nn.Module, name: str) -> str | None:
    """Return why a method cannot be replaced, because the instance has its own; None if it has only its class's."""
    if name not in module.__dict__:
        return None
    is_ours = hasattr(getattr(module.__dict__[name], "__func__", None), MARK)
    return EARLIER if is_ours else f"its {name} was already replaced on this instance"


def under_autocast(module: nn.Module) -> Callable[..., Any] | None:
    """Return the unbound forward that accelerate wraps around the model's own for mixed precision, or None."""
    current = module.__dict__.get("forward")
    if not isinstance(current, MethodType) or current.__self__ is not module or AUTOCAST_FORWARD not in module.__dict__:
        return None
    function: Any = current.__func__
    while function is not type(module).forward:
        if hasattr(function, MARK) or not hasattr(function, "__wrapped__"):
            return None
        function = function.__wrapped__
    return current.__func__ if current.__func__ is not function else None


def own_forward(module: nn.Module) -> Callable[..., Any] | str:
    """Return the same as `forward_of`, but without accelerate's autocast, for a check that runs in several dtypes."""
    return forward_of(module) if under_autocast(module) is None else type(module).forward


def replacing(
    original: Callable[..., Any], build: Callable[[], Callable[..., Any]]
) -> Callable[[nn.Module], list[Patch]]:
    """Return an installer that makes the function returned by `build` the forward of a module.

    All modules share one function, which torch.compile therefore compiles once.
    """
    built = cache(build)
    return lambda module: [replacement(module, built(), original)]


def replacement(module: nn.Module, function: Callable[..., Any], original: Callable[..., Any]) -> Patch:
    """Return a patch that makes `function` the forward of this instance, with the signature of the original.

    The forward is a bound method because deep-copying a model rebinds it to the copied module, unlike a closure. Its
    name is `forward` because it then pickles as the forward of its class.
    """
    assert isinstance(function, FunctionType)
    kind = type_before_parametrizations(module)
    # One function for all modules of a class, which torch.compile compiles once.
    forwards = function.__dict__.setdefault(OF_CLASSES, {})
    function = forwards[kind] if kind in forwards else forwards.setdefault(kind, _of_class(kind, function))
    function.__name__ = function.__qualname__ = "forward"
    function.__dict__["__wrapped__"] = original
    function.__dict__[MARK] = True
    return Patch(module, slot(module), MethodType(function, module))


def _of_class(kind: Any, function: FunctionType) -> Any:
    """Wrap the function in a forward that calls it only while the module's class still has the same forward."""
    outermost = kind.forward
    inner = function if unwrapped(outermost) is outermost else checkpointed(function, outermost)

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        if not same_forward(type(self), kind):
            return type(self).forward(self, *args, **named)
        return inner(self, *args, **named)

    forward.__dict__.update(
        {name: value for name, value in function.__dict__.items() if name != OF_CLASSES}, **{INSTALLED: function}
    )
    return forward


def installed_in(forward: Any) -> Any:
    """Return the function that was passed to `replacement` for this forward."""
    return forward.__dict__.get(INSTALLED, forward)
