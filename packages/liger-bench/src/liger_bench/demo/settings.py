# SPDX-License-Identifier: Apache-2.0
"""The settings of one demo run: the model, its data and its precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_hf.presets import LARGE, checked_preset


@dataclass(frozen=True)
class Settings:
    """One demo run; `checkpointing` recomputes activations, as is usual for large models."""

    size: str
    device: torch.device
    dtype: torch.dtype
    steps: int
    batch: int
    sequence: int
    learning_rate: float
    checkpointing: bool
    seed: int = 0


def settings_for(
    size: str, device: torch.device, dtype: torch.dtype, steps: int, batch: int | None, sequence: int | None
) -> Settings:
    """Fill in the defaults: on the CPU few tokens, but enough that their logits outweigh the rest."""
    size = checked_preset("demo", size)
    large = size in LARGE
    if batch is None:
        batch = 4 if device.type == "cpu" else 8
    if sequence is None:
        sequence = 384 if device.type == "cpu" else 1024
    return Settings(size, device, dtype, steps, batch, sequence, 1e-4 if large else 1e-3, checkpointing=large)
