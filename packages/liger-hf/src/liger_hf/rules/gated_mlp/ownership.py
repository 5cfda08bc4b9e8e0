# SPDX-License-Identifier: Apache-2.0
"""Whether anything else can still read a tensor, so that the backward pass may write to its memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from liger_core.private_torch import COUNTS_HOLDERS, DisableTorchFunction, holders, interpreter_stack, without_modes

Holders = tuple[int, ...]
_fresh: dict[Any, frozenset[Holders]] = {}


def unshared(tensors: tuple[Tensor, ...]) -> bool:
    """Whether only this tuple holds these tensors and their memory: no other Python object, autograd node or view.

    Autograd nodes hold what their derivative needs: tanh, relu and exp their output, a square its input. The result is
    False where it does not matter: without gradients there is no backward pass, and in compiled code the compiler
    decides what is written to. It is also False under a transform of torch.func, whose tensors have no own memory.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not COUNTS_HOLDERS:
        return False
    if interpreter_stack() is not None:
        return False
    for place in range(len(tensors)):
        kind = type(tensors[place])
        known = _fresh.get(kind)
        if known is None:
            known = _fresh[kind] = _of_a_fresh_one(tensors[place])
        if holders(tensors, place) not in known:
            return False
    return True


def _of_a_fresh_one(like: Tensor) -> frozenset[Holders]:
    """Return the reference counts of a new tensor in a tuple, and of a view, which depend on the Python version."""
    # A mode may hold what is made under it, as that of make_fx does, or expect it again, as that of checkpointing does.
    with DisableTorchFunction(), without_modes(), getattr(like, "fake_mode", nullcontext()):
        new = (like.new_empty(1), like.new_empty(1).view(1))
    return frozenset(holders(new, place) for place in range(len(new)))
