# SPDX-License-Identifier: Apache-2.0
"""op → implementation: one line per op, whose function is in the file of its name."""

import importlib
from typing import Any

import liger_core
from liger_core import Implementation, Op

# In small compiled models, the host takes longer to launch a custom op than Inductor's kernels: with 1 × 1024 tokens, a
# Llama of 1B reaches 0.77 of the throughput on one H200. The gated activations read tensors four times as wide.
SMALL = 2048 * 2048
# Op → number of elements of its first tensor up to which a compiled region gets the reference.
HANDED_OVER = {
    "rms_norm": SMALL,
    "add_rms_norm": SMALL,
    "layer_norm": SMALL,
    "add_layer_norm": SMALL,
    "dyt": SMALL,
    "softmax": SMALL,
    "gated_rms_norm": SMALL,
    "modulated_rms_norm": SMALL,
    "modulated_layer_norm": SMALL,
    "poly_norm": SMALL,
    "sparsemax": SMALL,
    "group_norm": SMALL,
    "sinkhorn": 0,
    "project_streams": 0,
    "mix_streams": SMALL,
    "merge_streams": SMALL,
    "attention_residual": SMALL,
    "rope": SMALL,
    "qk_norm_rope": SMALL,
    "swiglu": 4 * SMALL,
    "geglu": 4 * SMALL,
    "relu_squared": 4 * SMALL,
    "embedding": 0,
    "lora_linear": 0,
    "lora_linears": 0,
    "cross_entropy": 0,
    "linear_cross_entropy": 0,
    "linear_log_prob": 0,
    "linear_divergence": 0,
    "kl_div": 0,
    "jsd": 0,
    "total_variation": 0,
    "experts": 0,
}

TABLE: dict[Op[..., Any], Implementation] = {
    getattr(liger_core, name): Implementation(getattr(importlib.import_module(f"liger_triton.{name}"), name), elements)
    for name, elements in HANDED_OVER.items()
}
