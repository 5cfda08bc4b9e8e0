# SPDX-License-Identifier: Apache-2.0
"""The models that are measured: presets with random weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from liger_bench.checkpointing import checkpoint_layers
from liger_bench.demo.settings import Settings
from liger_hf.presets import preset


def build(settings: Settings, *, attention: str = "sdpa") -> PreTrainedModel:
    """The model of these settings, the same weights for the same seed."""
    return _build(settings, settings.device, attention)


def random_model(
    size: str,
    device: torch.device,
    dtype: torch.dtype,
    sequence: int,
    *,
    checkpointing: bool,
    attention: str = "sdpa",
    seed: int = 0,
) -> PreTrainedModel:
    """A preset for sequences of that length, made on the device in that dtype and ready to train."""
    config = preset(size, sequence)
    torch.manual_seed(seed)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if checkpointing:
        checkpoint_layers(model)
    model.train()
    return model


def twin(model: PreTrainedModel, settings: Settings) -> PreTrainedModel:
    """Another model of the same class that shares all parameters, so that two variants can alternate in one run."""
    other = _build(settings, torch.device("meta"), "sdpa")
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        theirs._parameters.update(mine._parameters)
        theirs._buffers.update(mine._buffers)
    return other


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _build(settings: Settings, device: torch.device, attention: str) -> PreTrainedModel:
    shape = (settings.size, device, settings.dtype, settings.sequence)
    return random_model(*shape, checkpointing=settings.checkpointing, attention=attention, seed=settings.seed)
