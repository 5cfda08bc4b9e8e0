# SPDX-License-Identifier: Apache-2.0
"""Causal attention without a mask in compiled models.

Without padding, Transformers passes is_causal=True to sdpa attention instead of a mask, and the kernel skips the upper
half. To find padding or packing, it reads the values of masks. A compiler and a CUDA graph cannot read them, so the
model then always makes a whole mask: on one H200, attention over 1024 tokens (Llama 1B, bf16) takes 2.4 times as long
with it. A patched model also omits the mask there, if none of its arguments can require another mask (PLAIN).
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_hf.patch import Patch, forward_of, replacement
from liger_hf.private_transformers import attention_implementation, create_causal_mask, is_cuda_stream_capturing
from liger_hf.rebinding import called, rebound

NOTE = (
    "When compiled and called without attention_mask, position_ids or a cache, attention uses is_causal=True, which is "
    "faster than a mask."
)
NAME = create_causal_mask.__name__
# The arguments of a model that never change its mask. With any other argument, the model makes its own mask.
PLAIN = {
    "input_ids", "inputs_embeds", "labels", "logits_to_keep", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
}  # fmt: skip
# The arguments of `create_causal_mask` in a model that is called with those of PLAIN.
PLAIN_MASK = {
    "config", "inputs_embeds", "attention_mask", "cache", "past_key_values", "cache_position", "position_ids",
    "allow_is_causal_skip",
}  # fmt: skip


def patches(model: nn.Module) -> Iterator[Patch]:
    """Yield a patch for each module that makes a causal mask for sdpa attention."""
    forwards: dict[Any, Callable[..., Any]] = {}
    for module in model.modules():
        original = forward_of(module)
        if isinstance(original, str) or not _implementation_is_sdpa(module):
            continue
        if not called(original, lambda name, value: name == NAME and value is create_causal_mask):
            continue
        if original not in forwards:
            forwards[original] = _forward(original)
        yield replacement(module, forwards[original], original)


def _forward(original: Any) -> Callable[..., Any]:
    causal = rebound(original, {NAME: _mask})
    parameters = inspect.signature(original).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD][1:]
    others = [i for i, name in enumerate(names) if name not in PLAIN]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not is_exporting(), which torch 2.11 answers with True in every compiled region.
        compiling = torch.compiler.is_dynamo_compiling() or is_cuda_stream_capturing()
        plain = len(args) <= len(names) and all(args[i] is None for i in others if i < len(args))
        plain = plain and all(value is None for name, value in kwargs.items() if name not in PLAIN)
        chosen = causal if compiling and plain and _implementation_is_sdpa(self) else original
        return chosen(self, *args, **kwargs)

    return forward


def _mask(*args: Any, **options: Any) -> Any:
    """Return the causal mask; None where Transformers, without compilation, would pass is_causal=True instead."""
    config = options.get("config", args[0] if args else None)
    has_options = any(value is not None for name, value in options.items() if name not in PLAIN_MASK)
    plain = len(args) <= 1 and not has_options and options.get("allow_is_causal_skip", True)
    if plain and options.get("attention_mask") is None and getattr(config, "is_causal", True):
        return None
    return create_causal_mask(*args, **options)


def _implementation_is_sdpa(module: nn.Module) -> bool:
    return attention_implementation(module) == "sdpa"
