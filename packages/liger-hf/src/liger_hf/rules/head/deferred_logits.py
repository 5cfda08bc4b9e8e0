# SPDX-License-Identifier: Apache-2.0
"""Logits of an evaluation: they look like a tensor, and are computed when first used.

A Trainer that evaluates takes the logits from the outputs, and drops them if only the loss is wanted; it keeps nothing
but tensors. Without gradients and outside compiled code a tensor subclass can do that, instead of `LazyLogits`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from liger_hf.rules.head.lazy_logits import LazyLogits

# What is answered, or remembered, without computing them: accelerate casts what a model returns.
PROPERTIES: tuple[Any, ...] = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.requires_grad)
KNOWN = {*(attribute.__get__ for attribute in PROPERTIES), Tensor.size, Tensor.dim}


class DeferredLogits(Tensor):
    """Has no storage; every operation gets the real logits in its place, and what it returns is an ordinary tensor."""

    lazy: LazyLogits

    @staticmethod
    def __new__(cls, lazy: LazyLogits) -> DeferredLogits:
        deferred = Tensor._make_wrapper_subclass(cls, lazy.shape, dtype=lazy.dtype, device=lazy.device)
        deferred.lazy = lazy
        return deferred

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in KNOWN:
            return super().__torch_function__(function, types, args, kwargs or {})
        if function is Tensor.float and args[0].lazy.real is None:
            return cls(args[0].lazy.float())
        return function(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*tree_map(_real, args), **tree_map(_real, kwargs or {}))


def _real(value: Any) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    # As in the forward pass, also if gradients are on by the time they are read.
    with torch.no_grad():
        return value.lazy.materialize()
