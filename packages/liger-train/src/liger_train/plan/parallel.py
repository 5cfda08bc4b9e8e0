# SPDX-License-Identifier: Apache-2.0
"""The model of one rank under tensor and context parallelism: its shards, and what it gathers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from liger_core import VocabShard
from liger_core.errors import OptionError
from liger_core.private_names import replacing
from liger_hf.private_transformers import tensor_parallel_plan
from liger_hf.rules.head.causal_loss import SHARD
from liger_train.setup import Setup

# Style of a tensor-parallel plan of Transformers → the dimension of a weight that it shards; None: of no weight.
STYLES = {
    "colwise": 0,
    "colwise_rep": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_rep": 1,
    "embedding_rowwise": 0,
    "replicated_with_grad_allreduce": None,
}


def shard(model: Any, setup: Setup) -> None:
    """Give every module the weights that the plan of Transformers leaves to a rank.

    Raises OptionError for a plan of a mixture of experts, and for a model without a plan.
    """
    plan = tensor_parallel_plan(model)
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown or not plan:
        what = f"the styles {', '.join(unknown)}" if unknown else "none"
        raise OptionError(
            f"plan: --tp needs a model whose tensor-parallel plan shards linear layers alone, got {what} for "
            f"{setup.model}"
        )
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, module in model.named_modules():
        for style in (
            style for pattern, style in plan.items() if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name)
        ):
            _shard(module, STYLES[style], setup.tp)
    if tied:
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
    _set_classes(model, model.get_output_embeddings().weight.shape[0])


def share_vocabulary(model: Any, setup: Setup, classes: int, fused: bool) -> None:
    """Let a fused loss exchange what ranks exchange, and let the head gather the logits of all ranks for another."""
    if fused:
        setattr(model.get_output_embeddings(), SHARD, VocabShard("tp", 0, classes, ranks=setup.tp))
        return
    model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: _Gathered.apply(output, -1, setup.tp)
    )
    _set_classes(model, classes)


def attention_of_ranks(setup: Setup) -> AbstractContextManager[None]:
    """Within this context, attention takes what it takes together with the other ranks."""
    if setup.cp == 1:
        return nullcontext()
    attention = functional.scaled_dot_product_attention
    return replacing(functional, "scaled_dot_product_attention", _over_all_keys(attention, setup))


def _set_classes(model: Any, classes: int) -> None:
    for owner in (model, model.config.get_text_config()):
        if getattr(owner, "vocab_size", None) is not None:
            owner.vocab_size = classes


def _shard(module: nn.Module, dimension: int | None, ranks: int) -> None:
    """The shard of the first rank, which is never the smallest."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if dimension is not None and dimension < weight.dim():
            size = list(weight.shape)
            size[dimension] = -(-size[dimension] // ranks)
            setattr(module, name, nn.Parameter(weight.new_empty(size), weight.requires_grad))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


def _over_all_keys(attention: Callable[..., Tensor], setup: Setup) -> Callable[..., Tensor]:
    """Attention of a part of the queries to the keys and values of all parts, which accelerate gathers."""

    def over_all_keys(
        query: Tensor, key: Tensor, value: Tensor, *, attn_mask: None = None, is_causal: bool, **options: Any
    ) -> Tensor:
        key, value = (_Gathered.apply(shard, 2, setup.cp) for shard in (key, value))
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool) if setup.device == "cpu" else None
        return attention(query, key, value, attn_mask=mask, is_causal=is_causal and mask is None, **options)

    return over_all_keys


class _Gathered(torch.autograd.Function):
    """The parts of all ranks along a dimension; the gradient is that of the own part."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dimension: int, ranks: int) -> Tensor:
        ctx.dimension, ctx.size = dimension, shard.shape[dimension]
        size = list(shard.shape)
        size[dimension] *= ranks
        return shard.new_empty(size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.dimension, 0, ctx.size).clone(), None, None
