# SPDX-License-Identifier: Apache-2.0
"""What one demo run is: the shape of the model, its data and its precision; and the shapes that there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from liger_core.errors import OptionError

# The tokenizer has as many tokens at most; a model may have room for more.
VOCABULARY = 32_000
# Enough to run every path, in a second.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
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
# The shape of Llama 3 8B.
EIGHT_BILLION: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}
SIZES = {"tiny": TINY, "small": SMALL, "1b": ONE_BILLION, "8b": EIGHT_BILLION}
LARGE = ("1b", "8b")


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


def settings_for(size: str, device: torch.device, dtype: torch.dtype, steps: int, batch: int | None, sequence: int | None) -> Settings:
    """Fill in what was not given: on the CPU few tokens, but enough that their logits outweigh the rest."""
    if size not in SIZES:
        raise OptionError(f"demo: --model must be one of {', '.join(SIZES)}, got {size!r}")
    large = size in LARGE
    if batch is None:
        batch = 4 if device.type == "cpu" else 8
    if sequence is None:
        sequence = 384 if device.type == "cpu" else 1024
    return Settings(size, device, dtype, steps, batch, sequence, 1e-4 if large else 1e-3, checkpointing=large)
