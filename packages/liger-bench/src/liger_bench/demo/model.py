# SPDX-License-Identifier: Apache-2.0
"""The models that are measured: presets with random weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from liger_bench.checkpointing import checkpoint_layers
from liger_hf.presets import preset


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


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
