# SPDX-License-Identifier: Apache-2.0
"""A small configuration of every causal language model type in Transformers, derived from the defaults of its
configuration class.

Sizes are replaced by the name of their field; layers are chosen so that every kind of layer that the default has
occurs.
"""

import re
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
# Models of several parts: vision-language and encoder-decoder models; "kind:type", where the causal class is another
# one.
COMPOSITES: tuple[str, ...] = tuple(
    f"{kind}:{model_type}"
    for kind, classes in (
        ("vision", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        ("seq2seq", MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    )
    for model_type, name in sorted(classes.items())
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != name
)
VOCABULARY = 300
# Fields that some classes leave without a value that their models need.
UNSET = ("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")

# The first pattern that a field's name matches as a whole gives its value.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(type|task_type|prompt|segment)_vocab_size|num_labels|.*_types", None),
    (r"(.*_)?vocab_size(_.*)?|.*hash_byte_group_vocab|ngram_vocab_size_base", VOCABULARY),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"(.*_)?eos_token_id|sep_token_id", 2),
    (r".*drop(out)?(_prob|_p|_rate|_ratio)?|.*_pdrop|.*layerdrop|.*jitter_noise|mlp_dropout|dropout_p", 0.0),
    (r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads|num_query_groups|num_global_key_value_heads|.*n_kv_heads", 2),
    (r"(.*_)?(num_)?attention_heads|num_heads|n_heads?|(en|de)coder_attention_heads|num_(en|de)coder_attention_heads", 4),
    (r"index_n_heads", 2),
    (r"qk_rope_head_dim|index_rope_head_dim", 8),
    (r"qk_head_dim", 24),
    (r"(.*_)?head_dim|d_head|dim_head|kv_channels|v_head_dim|qk_nope_head_dim|attention_head_size", 16),
    (r"rotary_dim", 8),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 24),
    (r"hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|embedding_size|(in|out)put_embedding_size|word_embed_proj_dim|backbone_hidden_size", 64),
    (r"(moe_|shared_|shared_expert_|moe_shared_expert_|dense_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|(expert_)?ffn_hidden_size", 96),
    (r"dff|dim_ff|n_inner|d_inner|feed_forward_size", 96),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks|depth", 2),
    (r"n_routed_experts|(moe_)?num_(local_)?experts|num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r"n_shared_experts|first_k_dense_replace|num_dense_layers", 1),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(source|target)_positions", 64),
    (r"sliding_window(_size)?|attention_window_size|window_size|attention_chunk_size|keep_window_size", 8),
    (r"index_topk", 8),
    (r"chunk_size", 8),
)  # fmt: skip


def tiny_config(model_type: str, **options: Any) -> PretrainedConfig:
    """The configuration, with `options` over everything else."""
    kind = CONFIG_MAPPING[model_type]
    config = kind(**{**shrunk(kind()), **options})
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def drawn(model: nn.Module, seed: int = 1) -> Any:
    """The model, with weights that are large enough that every part of it matters to the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.2 * noise if parameter.dim() < 2 else 0.1 * noise)
    return model


def shrunk(default: PretrainedConfig) -> dict[str, Any]:
    """The arguments that make a small configuration of the same class."""
    common = PretrainedConfig().to_dict().keys() - {"vocab_size"}
    fields = {name: value for name, value in default.to_dict().items() if name not in common}
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    fields |= {name: getattr(default, name) for name in tokens if hasattr(default, name)}
    small: dict[str, Any] = {}
    for name, value in fields.items():
        inner = vars(default).get(name)
        if isinstance(inner, PretrainedConfig):
            small[name] = {"model_type": inner.model_type, **shrunk(inner)}
        else:
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if size is not None and (type(value) in (int, float) or (value is None and name in UNSET)):
                small[name] = type(value)(size) if value is not None else size
    if "kv_lora_rank" in fields:
        # Multi-head latent attention has a key for every query, and its head_dim is the rotary part.
        small |= {name: size for name, size in (("num_key_value_heads", 4), ("head_dim", 8)) if name in fields}
    if fields.get("is_decoder") is False:
        small["is_decoder"] = True
    return small | _layers(default, fields) | OVERRIDES.get(default.model_type, {})


def _layers(default: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """As many layers as it takes to include every kind, and at least two."""
    count = getattr(default, "num_hidden_layers", None)
    lists = {n: v for n, v in fields.items() if isinstance(v, (list, tuple)) and len(v) == count}
    if not lists or count <= 2:
        return {}
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([v[layer] for v in lists.values()]), layer)
    chosen = sorted(kinds.values())[:4]
    chosen += [layer for layer in range(count) if layer not in chosen][: max(0, 2 - len(chosen))]
    chosen.sort()
    name = default.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return {name: len(chosen), **{n: [v[layer] for layer in chosen] for n, v in lists.items()}}


SLIDING_AND_FULL = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMPASS_ROPE = {"sliding_attention": ROPE | {"mrope_section": [4, 2, 2]}, "full_attention": None}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}
FALCON_H1 = {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "mlp_multipliers": [0.5, 0.25]}
FALCON_H1 |= {"attention_out_multiplier": 0.75, "ssm_multipliers": [0.5, 0.75, 1.5, 0.25, 0.5]}
FALCON_H1 |= {"ssm_in_multiplier": 1.5, "key_multiplier": 0.5, "ssm_out_multiplier": 0.75}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}

# What the rules above cannot know: sizes that depend on each other, and which layers are of which kind where a rule
# computes it.
OVERRIDES: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 6, "<image>": 5}},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {**SLIDING_AND_FULL, "rope_parameters": COMPASS_ROPE},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {**MAMBA, **FALCON_H1, "mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_expand": 2},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text", "glm4v_text", "glm_ocr_text", "qwen2_5_omni_text"), MROPE),
    **dict.fromkeys(("cosmos3_edge_text", "hunyuan_vl_text"), MROPE),
    "deepseek_ocr2_text": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": [96, 48], "rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}},
    "glm4v_moe_text": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0},
    "step3p5": {"sliding_window": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "intermediate_size": [96] * 4, "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {**SLIDING_AND_FULL, "global_head_dim": 16, "hidden_size_per_layer_input": 16},
    "gemma4_unified_text": {**SLIDING_AND_FULL, "global_head_dim": 16},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 96},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, "num_layers": 2, "num_hidden_layers": 4, "zero_expert_num": 2},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"], "hc_lowrank": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "num_buckets": 2},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "qk_dim_factor": 0.5, "num_heads": 4, "autocast_kernel_dtype": "float32"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
