# SPDX-License-Identifier: Apache-2.0
"""The models that every command knows by name, as configs that need neither a network nor weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from liger_core.errors import OptionError, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The maximum size of the demo's tokenizer.
VOCABULARY = 32_000
# Name → the model type of Transformers, and the fields that differ from the defaults of its config.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    # Enough to run every path, in a second.
    "tiny": (
        "llama",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "small": (
        "llama",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "tie_word_embeddings": True,
        },
    ),
    "llama-3-8b": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "tie_word_embeddings": False,
        },
    ),
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
# Earlier names, which old results contain.
ALIASES = {"1b": "llama-3.2-1b", "8b": "llama-3-8b"}
NAMES = ", ".join(PRESETS)
# Presets for training on one GPU or many.
LARGE = tuple(name for name, (_, fields) in PRESETS.items() if fields["hidden_size"] >= 2048)
# The defaults of a config may lie outside its vocabulary; the text has none of these tokens.
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def preset_name(name: str) -> str:
    """Return the name of a model in results: canonical for a preset, anything else unchanged."""
    return ALIASES.get(name, name)


def checked_preset(command: str, name: str) -> str:
    """Return the canonical name of a preset.

    Raises OptionError for an unknown name.
    """
    if preset_name(name) not in PRESETS:
        raise OptionError(f"{command}: --model must be one of {NAMES}, got {name!r}.{did_you_mean(name)}")
    return preset_name(name)


def preset(name: str, sequence: int = 0) -> PretrainedConfig:
    """Return the config of a preset, with at least `sequence` positions."""
    from transformers import AutoConfig

    kind, fields = PRESETS[preset_name(name)]
    config = AutoConfig.for_model(kind, **(NO_TOKENS | fields), use_cache=False)
    config.max_position_embeddings = max(sequence, config.max_position_embeddings)
    return config


def did_you_mean(name: str) -> str:
    """Return a sentence with the presets that begin like this, or else the most similar one; or an empty string."""
    beginning = [preset for preset in PRESETS if name and preset.startswith(name.lower())]
    if beginning:
        return f" Did you mean {' or '.join(map(repr, beginning))}?"
    return nearest(name.lower(), [*PRESETS, *ALIASES])
