# SPDX-License-Identifier: Apache-2.0
"""op → implementation: one line per op, whose function is in the file of its name, or composed of row passes."""

import importlib
from collections.abc import Callable
from typing import Any

import liger_core
from liger_core import Implementation, Op
from liger_triton import _divergence, _softmax_loss, lora_linear
from liger_triton.launch import TritonKernel, supported

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
    "experts": 0,
}

# Op of liger_core that calls row passes for the logits or adapters → the passes. Compiled regions call it at all sizes.
COMPOSED: dict[str, Any] = {
    "lora_linears": lora_linear.PASSES,
    **dict.fromkeys(("cross_entropy", "linear_cross_entropy", "linear_log_prob"), _softmax_loss.PASSES),
    **dict.fromkeys(("kl_div", "jsd", "total_variation", "linear_divergence"), _divergence.PASSES),
}


def _function(name: str) -> Callable[..., Any]:
    """Return the Triton implementation of the op of this name."""
    if name in COMPOSED:
        return getattr(liger_core, name).implementation(COMPOSED[name], TritonKernel, supported)
    return getattr(importlib.import_module(f"liger_triton.{name}"), name)


TABLE: dict[Op[..., Any], Implementation] = {
    getattr(liger_core, name): Implementation(_function(name), elements)
    for name, elements in {**HANDED_OVER, **dict.fromkeys(COMPOSED, 0)}.items()
}
