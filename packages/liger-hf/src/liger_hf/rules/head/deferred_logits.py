# SPDX-License-Identifier: Apache-2.0
"""Logits of an evaluation: they look like a tensor, and are computed when first used.

A Trainer keeps only tensors of a model's outputs, and drops the logits if only the loss is wanted. Without gradients
and outside compiled code, a tensor subclass can take the place of `LazyLogits`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from liger_hf.rules.head.lazy_logits import LazyLogits

# Attributes that need no logits; a cast by accelerate is recorded below.
PROPERTIES: tuple[Any, ...] = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.requires_grad)
KNOWN = {*(attribute.__get__ for attribute in PROPERTIES), Tensor.size, Tensor.dim}


class DeferredLogits(Tensor):
    """A tensor without storage. Every operation runs on the real logits and returns an ordinary tensor."""

    lazy: LazyLogits

    @staticmethod
    def __new__(cls, lazy: LazyLogits) -> "DeferredLogits":
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
    # As in the forward pass, even if gradients are enabled when the logits are read.
    with torch.no_grad():
        return value.lazy.materialize()
