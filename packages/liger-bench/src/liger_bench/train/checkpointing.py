# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model keeps for the backward pass, and what it computes again."""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from liger_core.errors import OptionError

aten = torch.ops.aten
PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default, aten._grouped_mm.default}
)
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class Keeps(IntEnum):
    """What a layer keeps: its input; also what its products give; everything."""

    INPUT = 0
    PRODUCTS = 1
    ALL = 2


def checkpoint_layers(model: Any, **options: Any) -> None:
    """Make Transformers checkpoint every layer, with these options of its own."""
    # The name since Transformers 5.23, which warns about the one before.
    start = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Non-reentrant: inputs need no gradient, as below adapters, and layers may differ.
    start({"use_reentrant": False}, **options)


def enable(model: Any, how: str) -> None:
    """Make the model recompute as a setup's `checkpoint` says; "auto" begins like "full".

    Raises OptionError if it has fewer layers than shall be checkpointed.
    """
    if how == "none":
        return
    checkpoint_layers(model, **({"offload": True} if how == "offload" else {}))
    if how.isdecimal():
        every, count = layers(model), int(how)
        if count > len(every):
            raise OptionError(f"train: --checkpoint must be at most the number of layers, {len(every)}, got {count}")
        for layer in every[count:]:
            keep(layer, Keeps.ALL)


def layers(model: nn.Module) -> list[Any]:
    """The layers that can be checkpointed, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpointed_layers(model: nn.Module) -> int:
    """How many layers are computed twice, in whole or but for their products."""
    return sum(bool(layer.gradient_checkpointing) for layer in layers(model))


def keep(layer: Any, what: Keeps, products: Products | None = None) -> None:
    """Set what a layer keeps from its next forward pass on; layers alike share `products`."""
    layer.gradient_checkpointing = what is not Keeps.ALL
    contexts: dict[str, Any] = {"context_fn": products or Products()} if what is Keeps.PRODUCTS else {}
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, **contexts)


class Products:
    """For each pass through a layer the contexts in which what products give is kept, and all else is computed again.

    In Llama 3 8B matrix products are nearly all the operations of a layer, and their results half of its activations. Attention is
    worth its bytes in long sequences: per byte of its result it takes as many operations as there are tokens (half of what they are for
    a causal mask, at half the rate), and a matrix product as many as its rows are wide.
    """

    def __init__(self) -> None:
        self.last: int | None = None

    def __call__(self) -> Any:
        last, seen = self.last, Counter[bool]()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in ATTENTION and _is_long(args[0]):
                return CheckpointPolicy.MUST_SAVE
            if op not in PRODUCTS:
                return CheckpointPolicy.PREFER_RECOMPUTE
            index = seen[context.is_recompute]
            seen[context.is_recompute] += 1
            if not context.is_recompute:
                self.last = index
            # The last one, of the pass before, is added to the residual: nothing that the backward pass reads comes after it.
            return CheckpointPolicy.PREFER_RECOMPUTE if index == last else CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)


def _is_long(query: Tensor) -> bool:
    _, heads, tokens, width = query.shape
    return tokens >= heads * width // 2
