# SPDX-License-Identifier: Apache-2.0
"""Small configs of the model types of Transformers, for a step that is not random."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from liger_core.errors import OptionError, nearest

# What makes a config small, under every name that Transformers has for it; sizes are multiples of 8 ranks.
TINY: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "sliding_window": 8, "query_pre_attn_scalar": 8,
    "rotary_dim": 8,
    "qk_rope_head_dim": 8, "chunk_size": 8, "mamba_chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# Fields that some classes leave without a value that their models need.
UNSET = ("head_dim", "num_key_value_heads")
# Parameters of a model that one process trains in float64 in a moment.
LARGEST = 2e8
# Of what the config of a model names in this way, the loss is random.
RANDOM = ("drop", "jitter")


def tiny_config(model: str, options: Mapping[str, Any]) -> Any:
    """The config of a model type with the sizes of TINY, as far as it has them."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if model not in CONFIG_MAPPING:
        raise OptionError(
            "verify: model must be a model type of Transformers or a folder, got "
            f"{model!r}.{nearest(model, CONFIG_MAPPING)}"
        )
    default: Any = CONFIG_MAPPING[model]
    try:
        default = AutoConfig.for_model(model)
        return AutoConfig.for_model(model, **{**_tiny(default), "use_cache": False, **options})
    except Exception as error:
        raise _not_tiny(model, error, default) from error


def check_size(model: str, config: Any, **options: Any) -> None:
    """Raise OptionError for a model type that the sizes of TINY do not fit, or do not make small."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, **options).parameters())
    except Exception as error:
        raise _not_tiny(model, error, config) from error
    if size > LARGEST:
        raise _not_tiny(model, f"it has {size / 1e6:,.0f} million parameters", config)


def without_chance(config: Any) -> None:
    """Turn dropout and noise off, also in the configs that are in this one."""
    from transformers import PretrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            without_chance(value)
        elif isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(config, name, 0.0)


def one_line(error: Exception) -> str:
    """The kind of an exception and what it says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _not_tiny(model: str, why: object, config: Any) -> OptionError:
    """Return the error for a model type; where its default config, or the class of that, has none of its parts, they
    are the reason."""
    if isinstance(why, OptionError):
        return why
    if config.sub_configs and all(getattr(config, part, None) is None for part in config.sub_configs):
        why = f"its default config has no {', '.join(config.sub_configs)}"
    return OptionError(
        f"verify: {model} could not be made tiny: {' '.join(str(why).split())}; pass a folder with a small checkpoint"
    )


def _tiny(default: Any) -> dict[str, Any]:
    """The sizes of TINY that a config has, also in the configs that are in it, and a layer of each kind."""
    from transformers import PretrainedConfig

    found = {name: value for name, value in TINY.items() if _field(default, name) is not None}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            found[name] = {"model_type": value.model_type, **_tiny(value)}
    if kinds := list(dict.fromkeys(_field(default, "layer_types") or ())):
        found["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        found["num_hidden_layers"] = len(found["layer_types"])
    return found


def _field(config: Any, name: str) -> Any:
    """The value of a field that can be set, or None; where a model needs a value that its config has not, True."""
    kind = getattr(type(config), config.attribute_map.get(name, name), None)
    if isinstance(kind, property) and kind.fset is None:
        return None
    # An attribute that differs between layers raises an error.
    with contextlib.suppress(AttributeError, ValueError):
        value = getattr(config, name)
        return True if value is None and name in UNSET else value
    return None
