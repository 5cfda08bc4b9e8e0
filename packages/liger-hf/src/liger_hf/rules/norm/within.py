# SPDX-License-Identifier: Apache-2.0
"""Norms that become one op together with the code before or after them in the forward of another module."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from liger_core.private_torch import has_global_hook
from liger_hf.passing import may_pass
from liger_hf.patch import MARK, forward_of
from liger_hf.private_transformers import OFFLOADED
from liger_hf.rule import Found
from liger_hf.rules.norm import rule as norms
from liger_hf.stand_in import replica


def norm_in(child: nn.Module, op: str = "rms_norm") -> Found | None:
    """Return the norm rule's findings for an unmodified replica of the child; None if it is not a norm of this op."""
    if norms.eps_of(child) is None:
        return None
    match = norms.look(replica(child))
    return match if match is not None and match.op == op else None


def refusal(child: nn.Module) -> str | None:
    """Return why the norm must be called as a module, or None."""
    if OFFLOADED in child.__dict__ or _hooked(child):
        return "the norm has hooks, which the fused op would skip"
    forward = forward_of(child)
    return forward if isinstance(forward, str) and not hasattr(getattr(child.forward, "__func__", None), MARK) else None


def untouched(child: Any, forward: Callable[..., Any]) -> bool:
    """Return whether calling the module runs only the forward of its class, or the replacement by `apply`."""
    if _hooked(child) or has_global_hook() or not may_pass(child):
        return False
    # Not getattr with a default: Dynamo does not find __func__ in a method by its name, and returns the default.
    function = child.forward.__func__ if isinstance(child.forward, MethodType) else None
    # A replacement is for the class that the module had when it was installed.
    return function is forward or (
        hasattr(function, MARK) and getattr(function, "__wrapped__", None) is type(child).forward is forward
    )


def _hooked(child: nn.Module) -> bool:
    return bool(child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks)
