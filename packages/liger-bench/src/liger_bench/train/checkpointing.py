# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model keep only their input and are computed again in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from liger_core.errors import OptionError


def enable(model: Any, checkpoint: str) -> None:
    """Make the model recompute as a setup's `checkpoint` says; "auto" begins like "full".

    Raises OptionError if it has fewer layers than shall be checkpointed.
    """
    if checkpoint == "none":
        return
    # Non-reentrant: inputs need no gradient, as below adapters, and layers may differ.
    model.gradient_checkpointing_enable({"use_reentrant": False}, **({"offload": True} if checkpoint == "offload" else {}))
    if checkpoint.isdecimal():
        every, count = layers(model), int(checkpoint)
        if count > len(every):
            raise OptionError(f"train: --checkpoint must be at most the number of layers, {len(every)}, got {count}")
        for layer in every[count:]:
            layer.gradient_checkpointing = False


def layers(model: nn.Module) -> list[Any]:
    """The layers that can be checkpointed, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpointed_layers(model: nn.Module) -> int:
    """How many layers are computed twice."""
    return sum(bool(layer.gradient_checkpointing) for layer in layers(model))
