# SPDX-License-Identifier: Apache-2.0
"""Whether anything else can still read a tensor, so that the backward pass may write to its memory."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Holders = tuple[int, ...]
# Private to torch; without it nothing is known to be unshared.
COUNTED = hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
_fresh: dict[Any, frozenset[Holders]] = {}


def unshared(tensors: tuple[Tensor, ...]) -> bool:
    """Only this tuple holds these tensors and their memory: no other Python object, no autograd node, no view.

    Autograd nodes hold what their derivative needs: tanh, relu and exp their output, a square its input. False where it does not
    matter: without gradients there is no backward pass, and in compiled code the compiler decides what is written to.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not COUNTED:
        return False
    for tensor in tensors:
        known = _fresh.get(type(tensor))
        if known is None:
            known = _fresh[type(tensor)] = _of_a_fresh_one(tensor)
        if _holders(tensor) not in known:
            return False
    return True


def _holders(tensor: Any) -> Holders:
    """The references to the Python object, to the tensor behind it and to its memory; for a view the first two of its base, too."""
    base = tensor._base
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    if base is None:
        return sys.getrefcount(tensor), tensor._use_count(), memory
    return sys.getrefcount(tensor), tensor._use_count(), memory, sys.getrefcount(base), base._use_count()


def _of_a_fresh_one(like: Tensor) -> frozenset[Holders]:
    """The counts of a new tensor that only a tuple holds, and of a view of one; they depend on the version of Python."""
    # A dispatch mode may hold what is made under it, as that of make_fx does, or expect it again, as that of checkpointing does.
    with _disable_current_modes(), getattr(like, "fake_mode", nullcontext()):
        new = ((like.new_empty(1),), (like.new_empty(1).view(1),))
    return frozenset(_holders(tensor) for tensors in new for tensor in tensors)
