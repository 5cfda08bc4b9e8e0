# SPDX-License-Identifier: Apache-2.0
"""What one demo run is: the shape of the model, its data and its precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from liger_core.errors import OptionError

# The tokenizer has as many tokens at most; a model may have room for more.
VOCABULARY = 32_000
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# The shape of Llama 3.2 1B.
ONE_BILLION: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": True,
}
SIZES = {"small": SMALL, "1b": ONE_BILLION}


@dataclass(frozen=True)
class Settings:
    """One demo run; `checkpointing` recomputes activations, as trainings of large models do."""

    size: str
    device: torch.device
    dtype: torch.dtype
    steps: int
    batch: int
    sequence: int
    learning_rate: float
    checkpointing: bool
    seed: int = 0

    @property
    def shape(self) -> dict[str, Any]:
        return SIZES[self.size]


def settings_for(size: str, device: torch.device, dtype: torch.dtype, steps: int, batch: int | None, sequence: int | None) -> Settings:
    """Fill in what was not given: on the CPU few tokens, but enough that their logits outweigh the rest."""
    if size not in SIZES:
        raise OptionError(f"demo: --model must be one of {', '.join(SIZES)}, got {size!r}")
    large = size != "small"
    if batch is None:
        batch = 4 if device.type == "cpu" else 8
    if sequence is None:
        sequence = 384 if device.type == "cpu" else 1024
    return Settings(size, device, dtype, steps, batch, sequence, 1e-4 if large else 1e-3, checkpointing=large)
