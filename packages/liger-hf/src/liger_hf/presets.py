# SPDX-License-Identifier: Apache-2.0
"""The models that every command knows by name, as configs that need neither a network nor weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from liger_core.errors import OptionError, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The maximum size of the demo's tokenizer.
VOCABULARY = 32_000


def _fields(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, tied: bool, **others: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
        **others,
    }


def _base(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# Name → the model type of Transformers, and the fields that differ from the defaults of its config.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    # Enough to run every path, in a second.
    "tiny": ("llama", _fields(VOCABULARY, 64, 128, 2, 4, 2, True)),
    "small": ("llama", _fields(VOCABULARY, 256, 688, 4, 4, 2, True)),
    "llama-3.2-1b": (
        "llama",
        _fields(128_256, 2048, 8192, 16, 32, 8, True, head_dim=64, rope_parameters=_base(500_000.0)),
    ),
    "llama-3-8b": (
        "llama",
        _fields(128_256, 4096, 14_336, 32, 32, 8, False, head_dim=128, rope_parameters=_base(500_000.0)),
    ),
    "qwen2-7b": (
        "qwen2",
        _fields(152_064, 3584, 18_944, 28, 28, 4, False, rms_norm_eps=1e-6, rope_parameters=_base(1_000_000.0)),
    ),
    "gemma-7b": ("gemma", _fields(256_000, 3072, 24_576, 28, 16, 16, True, head_dim=256)),
    "mistral-7b": ("mistral", _fields(32_000, 4096, 14_336, 32, 32, 8, False, sliding_window=4096)),
    "qwen3-4b": (
        "qwen3",
        _fields(151_936, 2560, 9728, 36, 32, 8, True, head_dim=128, rope_parameters=_base(1_000_000.0)),
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _fields(
            *(151_936, 2048, 6144, 48, 32, 4, False),
            head_dim=128,
            rope_parameters=_base(1_000_000.0),
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    "gemma-3-1b": ("gemma3_text", _fields(262_144, 1152, 6912, 26, 4, 1, True, head_dim=256, sliding_window=512)),
    "phi-3-mini": ("phi3", _fields(32_064, 3072, 8192, 32, 32, 32, False, pad_token_id=32_000)),
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
