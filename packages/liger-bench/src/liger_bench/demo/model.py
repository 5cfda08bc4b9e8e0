# SPDX-License-Identifier: Apache-2.0
"""The model that the demo trains: a Llama with random weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from liger_bench.demo.settings import Settings


def build(settings: Settings, *, attention: str = "sdpa") -> PreTrainedModel:
    """The model of these settings, the same weights for the same seed."""
    return _build(settings, settings.device, attention)


def twin(model: PreTrainedModel, settings: Settings) -> PreTrainedModel:
    """Another model of the same class on the very same parameters, so that two variants can take turns in one training."""
    other = _build(settings, torch.device("meta"), "sdpa")
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        theirs._parameters.update(mine._parameters)
        theirs._buffers.update(mine._buffers)
    return other


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _build(settings: Settings, device: torch.device, attention: str) -> PreTrainedModel:
    config = LlamaConfig(**settings.shape, max_position_embeddings=settings.sequence, use_cache=False)
    torch.manual_seed(settings.seed)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=settings.dtype, attn_implementation=attention)
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model
