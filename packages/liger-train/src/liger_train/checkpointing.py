# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: what each layer of a model keeps for the backward pass, and what it recomputes."""

import operator
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from liger_core import private_torch
from liger_core.kernels import KERNELS
from liger_hf.tiling import INSIDE
from liger_train.errors import SetupError
from liger_train.offloading import Offloading

# The attribute of a compiled layer with the function that checkpoints it, which its graph contains.
WITHIN = "_liger_checkpoint"

aten = torch.ops.aten
MATMULS = private_torch.MATMULS | {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


class Keeps(IntEnum):
    """The tensors that a layer keeps on the device for its backward pass.

    NOTHING  its input is in host memory
    INPUT    only its input
    MATMULS  its input and the outputs of its matmuls
    ALL      all activations
    """

    NOTHING = -1
    INPUT = 0
    MATMULS = 1
    ALL = 2


def checkpoint_layers(model: Any) -> None:
    """Make Transformers checkpoint every layer."""
    # Renamed in Transformers 5.23, which warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Reentrant checkpointing needs inputs with gradients, which adapters do not give, and layers that are all alike.
    enable({"use_reentrant": False})


def enable(model: Any, value: str) -> None:
    """Enable activation checkpointing by the value of --checkpoint; "auto" starts as "full".

    Raises OptionError if the model has fewer layers than the value, or none that can be checkpointed.
    """
    if value == "none":
        return
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise SetupError(f"--checkpoint must be none, since {type(model).__name__} does not support it, got {value!r}")
    checkpoint_layers(model)
    model_layers = layers(model)
    if value == "offload":
        if not model_layers:
            raise SetupError(f"--checkpoint offload needs layers to checkpoint, got {type(model).__name__}")
        offloading = Offloading()
        for layer in model_layers:
            keep(layer, Keeps.NOTHING, offloading=offloading)
    if value.isdecimal():
        count = int(value)
        if count > len(model_layers):
            raise SetupError(f"--checkpoint must be at most the number of layers, {len(model_layers)}, got {count}")
        for layer in model_layers[count:]:
            keep(layer, Keeps.ALL)


def layers(model: nn.Module) -> list[Any]:
    """Return the layers that can be checkpointed, in order."""
    from liger_hf.private_transformers import GradientCheckpointingLayer

    return [module for module in language_model(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def language_model(model: Any) -> Any:
    """Return the language model inside a vision-language model; any other model itself."""
    return model.get_decoder() if has_other_parts(getattr(model, "config", None)) else model


def has_other_parts(config: Any) -> bool:
    """Return whether a model has parts beside its language model, such as vision; an encoder does not count."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text is not config and not any(getattr(each, "is_encoder_decoder", False) for each in (config, text))


def checkpointed_layers(model: nn.Module) -> int:
    """Return the number of layers that recompute everything, or everything but their matmuls."""
    return sum(bool(layer.gradient_checkpointing) for layer in layers(model))


def keep(
    layer: Any, what: Keeps, selective: "SelectiveCheckpointing | None" = None, offloading: Offloading | None = None
) -> None:
    """Set what a layer keeps from its next forward pass on.

    Layers of the same kind share `selective`; all layers share `offloading`.
    """
    layer.gradient_checkpointing = what is not Keeps.ALL
    if what is Keeps.NOTHING:
        set_checkpoint(layer, offloading or Offloading())
        return
    contexts: dict[str, Any] = (
        {"context_fn": (selective or SelectiveCheckpointing()).contexts} if what is Keeps.MATMULS else {}
    )
    set_checkpoint(layer, partial(checkpoint, use_reentrant=False, **contexts))


def set_checkpoint(layer: Any, function: Callable[..., Any]) -> None:
    """Set the function that checkpoints a layer: inside its graph, if it is compiled so and nothing is offloaded."""
    from liger_hf.private_transformers import CHECKPOINT

    if WITHIN in vars(layer):
        is_within = not isinstance(function, Offloading)
        vars(layer)[WITHIN] = function if is_within else None
        function = operator.call if is_within else function
    setattr(layer, CHECKPOINT, function)


class SelectiveCheckpointing:
    """Contexts for torch's checkpoint, which keep the outputs of matmuls and recompute everything else.

    In Llama 3 8B, matmuls are nearly all operations of a layer, and their outputs are half of its activations. Long
    attention is worth keeping, too: per byte of output, it takes as many operations as there are tokens (half of them
    with a causal mask, at half the throughput), while a matmul takes as many as its rows are wide.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        # torch.compile accepts only a plain function here, not a method.
        self.contexts = lambda: self._contexts()

    def _contexts(self) -> Any:
        last, seen = self.last, Counter[bool]()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if INSIDE.tiles:
                # The backward pass of tiled MLPs recomputes them itself.
                return CheckpointPolicy.PREFER_RECOMPUTE
            if op in private_torch.ATTENTION and _is_long(args[0]):
                return CheckpointPolicy.MUST_SAVE
            if op not in MATMULS and not _is_linear(op):
                return CheckpointPolicy.PREFER_RECOMPUTE
            index = seen[context.is_recompute]
            seen[context.is_recompute] += 1
            if not context.is_recompute:
                self.last = index
            # The output of the last matmul is added to the residual stream, so the backward pass does not need it.
            return CheckpointPolicy.PREFER_RECOMPUTE if index == last else CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)


def _is_linear(op: Any) -> bool:
    """Return whether an op computes a linear layer with its adapter, or several layers with the same input."""
    return op in KERNELS and KERNELS[op].name.endswith(("::lora_linear", "::lora_linears", "::merged_linear"))


def _is_long(query: Tensor) -> bool:
    _, heads, tokens, width = query.shape
    return tokens >= heads * width // 2
