# SPDX-License-Identifier: Apache-2.0
"""Small configs of Transformers' model types, without randomness."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from liger_core.errors import OptionError, nearest

# The sizes of a small config, by every name in Transformers; they are multiples of 8 ranks.
TINY: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "sliding_window": 8, "query_pre_attn_scalar": 8,
    "rotary_dim": 8,
    "qk_rope_head_dim": 8, "chunk_size": 8, "mamba_chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# What other model types need to be made tiny, or to have a layer of each kind.
KINDS = ["linear_attention", "hybrid"] * 2
HYBRID = {"layer_types": KINDS, "layers_block_type": KINDS, "num_hidden_layers": 4}
FITTING: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 16}, "zamba": {**HYBRID, "attention_head_dim": 16}, "zamba2": HYBRID,
}  # fmt: skip
# Fields that some configs leave empty although their models need them.
UNSET = ("head_dim", "num_key_value_heads")
# The most parameters of a model that one process trains quickly in float64.
LARGEST = 2e8
# Parts of the names of config fields that make the loss random.
RANDOM = ("drop", "jitter")


def tiny_config(model: str, options: Mapping[str, Any]) -> Any:
    """Return the config of a model type with the sizes in TINY that it has."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if model not in CONFIG_MAPPING:
        raise OptionError(
            "verify: model must be a model type of Transformers or a folder, got "
            f"{model!r}.{nearest(model, CONFIG_MAPPING)}"
        )
    default: Any = CONFIG_MAPPING[model]
    try:
        default = AutoConfig.for_model(model)
        return AutoConfig.for_model(
            model, **{**_tiny(default), **FITTING.get(model, {}), "use_cache": False, **options}
        )
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
    """Turn dropout and noise off, also in nested configs."""
    from transformers import PretrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            without_chance(value)
        elif isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(config, name, 0.0)


def one_line(error: Exception) -> str:
    """Return the class and the message of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _not_tiny(model: str, why: object, config: Any) -> OptionError:
    """Return the error for a model type; if its default config has none of its sub-configs, that is the reason."""
    if isinstance(why, OptionError):
        return why
    if config.sub_configs and all(getattr(config, name, None) is None for name in config.sub_configs):
        why = f"its default config has no {', '.join(config.sub_configs)}"
    return OptionError(
        f"verify: {model} could not be made tiny: {' '.join(str(why).split())}; pass a folder with a small checkpoint"
    )


def _tiny(default: Any) -> dict[str, Any]:
    """Return the sizes in TINY that a config and its nested configs have, and a layer of each kind."""
    from transformers import PretrainedConfig

    fields = {name: value for name, value in TINY.items() if _field(default, name) is not None}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            fields[name] = {"model_type": value.model_type, **_tiny(value)}
    if kinds := list(dict.fromkeys(_field(default, "layer_types") or ())):
        fields["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        fields["num_hidden_layers"] = len(fields["layer_types"])
    return fields


def _field(config: Any, name: str) -> Any:
    """Return the value of a field that can be set, or None; True for a missing value that the model needs."""
    kind = getattr(type(config), config.attribute_map.get(name, name), None)
    if isinstance(kind, property) and kind.fset is None:
        return None
    # An attribute that differs between layers raises an error.
    with contextlib.suppress(AttributeError, ValueError):
        value = getattr(config, name)
        return True if value is None and name in UNSET else value
    return None
