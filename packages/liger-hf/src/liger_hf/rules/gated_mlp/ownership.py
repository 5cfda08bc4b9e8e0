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
    matter: without gradients there is no backward pass, and in compiled code the compiler decides what is written to. Nor under a transform
    of torch.func, whose tensors have no memory of their own.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not COUNTED:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for place in range(len(tensors)):
        kind = type(tensors[place])
        known = _fresh.get(kind)
        if known is None:
            known = _fresh[kind] = _of_a_fresh_one(tensors[place])
        if _holders(tensors, place) not in known:
            return False
    return True


def _holders(tensors: tuple[Any, ...], place: int) -> Holders:
    """The references to the Python object, to the tensor behind it and to its memory; for a view the first two of its base, too.

    The tensor has no name here and is not passed to Python code: a debugger holds variables, and a frame evaluator, which a failed
    torch.compile leaves behind, arguments.
    """
    counts = (
        sys.getrefcount(tensors[place]),
        tensors[place]._use_count(),
        torch._C._storage_Use_Count(tensors[place].untyped_storage()._cdata),
    )
    if tensors[place]._base is None:
        return counts
    return *counts, sys.getrefcount(tensors[place]._base), tensors[place]._base._use_count()


def _of_a_fresh_one(like: Tensor) -> frozenset[Holders]:
    """The counts of a new tensor that only a tuple holds, and of a view of one; they depend on the version of Python."""
    # A mode may hold what is made under it, as that of make_fx does, or expect it again, as that of checkpointing does.
    with torch._C.DisableTorchFunction(), _disable_current_modes(), getattr(like, "fake_mode", nullcontext()):
        new = (like.new_empty(1), like.new_empty(1).view(1))
    return frozenset(_holders(new, place) for place in range(len(new)))
