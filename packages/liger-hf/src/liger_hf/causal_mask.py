# SPDX-License-Identifier: Apache-2.0
"""Causal attention without a mask in compiled models.

Without padding, Transformers leaves the mask of sdpa attention away and says is_causal=True, so that the kernel skips the upper
half. Whether there is padding or packing it reads from the values of the masks, which a compiler cannot, so a compiled model
always gets a whole mask, as does a model that is captured in a CUDA graph: on one H200 attention over 1024 tokens (Llama 1B, bf16) takes 2.4 times as long with it. Where neither a mask nor positions
nor a cache were given there is nothing to read, and a patched model leaves the mask away there, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.utils.import_utils import is_cuda_stream_capturing

from liger_hf.patch import Patch, forward_of, replacement
from liger_hf.rebinding import called, rebound

NOTE = (
    "If the model is compiled and called without attention_mask, position_ids and past_key_values, "
    "its attention gets is_causal=True instead of a mask."
)
NAME = create_causal_mask.__name__
# Arguments whose values could require more than a causal mask.
READ = ("attention_mask", "position_ids", "past_key_values")
FORMS = ("or_mask_function", "and_mask_function", "block_sequence_ids")


def patches(model: nn.Module) -> Iterator[Patch]:
    """One for every module that makes a causal mask for sdpa attention."""
    made: dict[Any, Callable[..., Any]] = {}
    for module in model.modules():
        original = forward_of(module)
        if isinstance(original, str) or not _implementation_is_sdpa(module) or not _makes_mask(original):
            continue
        if original not in made:
            made[original] = _forward(original)
        yield replacement(module, made[original], original)


def _forward(original: Any) -> Callable[..., Any]:
    causal = rebound(original, {NAME: _mask})
    names = list(inspect.signature(original).parameters)[1:]
    places = [(name, names.index(name) if name in names else len(names)) for name in READ]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch 2.11 answers is_exporting() with True in every compiled region; this one is False in an export that is not compiled first.
        compiling = torch.compiler.is_dynamo_compiling() or is_cuda_stream_capturing()
        nothing = all(kwargs.get(name) is None and (place >= len(args) or args[place] is None) for name, place in places)
        chosen = causal if compiling and nothing and _implementation_is_sdpa(self) else original
        return chosen(self, *args, **kwargs)

    return forward


def _mask(*args: Any, **options: Any) -> Any:
    """None where Transformers, without compilation, would use a causal flag instead of a mask."""
    config = options.get("config", args[0] if args else None)
    plain = len(args) <= 1 and all(options.get(name) is None for name in FORMS) and options.get("allow_is_causal_skip", True)
    if plain and options.get("attention_mask") is None and getattr(config, "is_causal", True):
        return None
    return create_causal_mask(*args, **options)


def _implementation_is_sdpa(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"


def _makes_mask(function: Any) -> bool:
    return bool(called(function, lambda name, value: name == NAME and value is create_causal_mask))
