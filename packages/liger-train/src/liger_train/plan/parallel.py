# SPDX-License-Identifier: Apache-2.0
"""The shards of a rank under tensor and context parallelism, and the tensors that it gathers."""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from liger_core import VocabShard
from liger_core.errors import OptionError
from liger_core.private_names import replacing
from liger_hf.private_transformers import TP_PLAN
from liger_hf.rules.head.causal_loss import SHARD
from liger_train.setup import Setup

# Style in a tensor-parallel plan of Transformers → the dimension in which it shards weights, or None.
STYLES: dict[str, int | None] = {
    "colwise": 0,
    "colwise_rep": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_rep": 1,
    "embedding_rowwise": 0,
    "replicated_with_grad_allreduce": None,
}


def shard(model: Any, setup: Setup) -> None:
    """Replace the weights of a model by a rank's shards, by the plan of Transformers.

    Raises OptionError for a model without a plan, and for a plan that shards other than linear layers.
    """
    plan: dict[str, str] = getattr(model, TP_PLAN, None) or {}
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown or not plan:
        styles = f"the styles {', '.join(unknown)}" if unknown else "none"
        raise OptionError(
            f"plan: --tp needs a model whose tp_plan shards linear layers alone, got {styles} for {setup.model}"
        )
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, module in model.named_modules():
        for pattern, style in plan.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
                _shard(module, STYLES[style], setup.tp)
    if tied:
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
    _set_classes(model, model.get_output_embeddings().weight.shape[0])


def share_vocabulary(model: Any, setup: Setup, classes: int, fused: bool) -> None:
    """Set up a fused loss over the shards of the vocabulary; for another loss, gather the logits of all ranks."""
    head = model.get_output_embeddings()
    if fused:
        setattr(head, SHARD, VocabShard("tp", 0, classes, ranks=setup.tp))
        return
    head.register_forward_hook(lambda module, inputs, output: _Gathered.apply(output, -1, setup.tp))
    _set_classes(model, classes)


def attention_of_ranks(setup: Setup) -> AbstractContextManager[None]:
    """Return a context in which attention is that of a rank's queries to all keys, which --cp gathers."""
    if setup.cp == 1:
        return nullcontext()
    attention = functional.scaled_dot_product_attention

    def over_all_keys(
        query: Tensor, key: Tensor, value: Tensor, *, attn_mask: None = None, is_causal: bool, **options: Any
    ) -> Tensor:
        key, value = (_Gathered.apply(shard, 2, setup.cp) for shard in (key, value))
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool) if setup.device == "cpu" else None
        return attention(query, key, value, attn_mask=mask, is_causal=is_causal and mask is None, **options)

    return replacing(functional, "scaled_dot_product_attention", over_all_keys)


def _set_classes(model: Any, classes: int) -> None:
    for owner in (model, model.config.get_text_config()):
        if getattr(owner, "vocab_size", None) is not None:
            owner.vocab_size = classes


def _shard(module: nn.Module, dimension: int | None, ranks: int) -> None:
    """Replace the weights of a module by the shards of the first rank, which are the largest."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if dimension is not None and dimension < weight.dim():
            size = list(weight.shape)
            size[dimension] = -(-size[dimension] // ranks)
            setattr(module, name, nn.Parameter(weight.new_empty(size), weight.requires_grad))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


class _Gathered(torch.autograd.Function):
    """Gathers the shards of all ranks along a dimension; the gradient is that of this rank's shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dimension: int, ranks: int) -> Tensor:
        ctx.dimension, ctx.size = dimension, shard.shape[dimension]
        size = list(shard.shape)
        size[dimension] *= ranks
        return shard.new_empty(size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.dimension, 0, ctx.size).clone(), None, None
