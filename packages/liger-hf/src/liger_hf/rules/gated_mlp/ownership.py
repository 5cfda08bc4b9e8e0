# SPDX-License-Identifier: Apache-2.0
"""Check whether anything else can still read a tensor, because the backward pass may then not overwrite it."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from liger_core.private_torch import COUNTS_HOLDERS, DisableTorchFunction, holders, interpreter_stack, without_modes

Holders = tuple[int, ...]
_fresh: dict[Any, frozenset[Holders]] = {}


def unshared(tensors: tuple[Tensor, ...]) -> bool:
    """Return whether only this tuple holds these tensors and their memory: no other object, autograd node or view.

    Autograd nodes hold the tensors that their derivative needs: tanh, relu and exp their output, a square its input.
    The result is False where it does not matter: without gradients there is no backward pass, and in compiled code the
    compiler decides. It is also False under a transform of torch.func, whose tensors have no memory of their own.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not COUNTS_HOLDERS:
        return False
    if interpreter_stack() is not None:
        return False
    for index in range(len(tensors)):
        kind = type(tensors[index])
        known = _fresh.get(kind)
        if known is None:
            known = _fresh[kind] = _counts_of_a_new_one(tensors[index])
        if holders(tensors, index) not in known:
            return False
    return True


def _counts_of_a_new_one(like: Tensor) -> frozenset[Holders]:
    """Return the reference counts of a new tensor and of a new view in a tuple; they depend on the Python version."""
    # Modes may hold a new tensor, as make_fx does, or expect it again, as checkpointing does.
    with DisableTorchFunction(), without_modes(), getattr(like, "fake_mode", nullcontext()):
        new = (like.new_empty(1), like.new_empty(1).view(1))
    return frozenset(holders(new, index) for index in range(len(new)))
