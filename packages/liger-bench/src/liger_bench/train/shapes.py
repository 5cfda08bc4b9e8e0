# SPDX-License-Identifier: Apache-2.0
"""The models that are trained by name: their configs, built without a network, and without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from liger_bench.demo.settings import EIGHT_BILLION, ONE_BILLION, TINY

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Model type of Transformers, and what differs from the defaults of its config; of the sizes that the seed and its paper train.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", TINY),
    "llama-3.2-1b": ("llama", ONE_BILLION),
    "llama-3-8b": ("llama", EIGHT_BILLION),
    "qwen2-7b": (
        "qwen2",
        {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": False,
        },
    ),
    "gemma-7b": (
        "gemma",
        {
            "vocab_size": 256_000,
            "hidden_size": 3072,
            "intermediate_size": 24_576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-7b": (
        "mistral",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "phi-3-mini": (
        "phi3",
        {
            "vocab_size": 32_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "pad_token_id": 32_000,
            "tie_word_embeddings": False,
        },
    ),
}
# Token ids that a config names must lie in its vocabulary; the text has none of these tokens.
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def shape(name: str, sequence: int) -> PretrainedConfig:
    """The config of a named shape, with positions for that many tokens at least."""
    from transformers import AutoConfig

    kind, fields = SHAPES[name]
    config = AutoConfig.for_model(kind, **(NO_TOKENS | fields), use_cache=False)
    config.max_position_embeddings = max(sequence, config.max_position_embeddings)
    return config
