# SPDX-License-Identifier: Apache-2.0
"""Heads for verl, prime-rl and Megatron-core on `linear_log_prob`, with the signatures of the originals."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import OptionError, linear_log_prob

__all__ = ["FusedLinearForPPO", "FusedOutputLinear", "output_processor"]


class FusedLinearForPPO(nn.Module):
    """verl's head: log-probabilities and entropies, both float32 and both with a gradient.

        FusedLinearForPPO()(hidden_states, vocab_weights, input_ids, temperature=0.7)

    hidden_states  (tokens, H) or (sequences, tokens, H)
    vocab_weights  (V, H)
    input_ids      (tokens,) or (sequences, tokens)   the token after each position: verl shifts before the call
    temperature    a number, or a tensor that broadcasts to input_ids
    chunk_size     not used: the budget of linear_log_prob bounds the memory
    options        other options of linear_log_prob: budget, softcap, logit_scale, logits_dtype, …
    """

    def __init__(self, chunk_size: int = 512, **options: Any) -> None:
        super().__init__()
        self.chunk_size, self.options = chunk_size, options

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        return _log_prob_and_entropy(hidden_states, vocab_weights, input_ids, temperature, self.options)


class FusedOutputLinear(nn.Linear):
    """prime-rl's output layer, which also passes gradients through the entropy.

        layer(hidden_states, labels, temperature) → {"logprobs": (sequences, tokens), "entropy": (sequences, tokens)}

    hidden_states  (sequences, tokens, H)
    labels         (sequences, tokens)   the token after each position
    temperature    (sequences, tokens), or anything that broadcasts to labels
    chunk_size     not used: the budget of linear_log_prob bounds the memory
    options        other options of linear_log_prob: budget, softcap (Gemma), logit_scale, logits_dtype, …
    """

    def __init__(self, in_features: int, out_features: int, chunk_size: int | None = None, **options: Any) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size, self.options = chunk_size, options

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        if labels is None or temperature is None:
            missing = "labels" if labels is None else "temperature"
            raise OptionError(f"FusedOutputLinear needs labels and the temperature of each token, got no {missing}")
        log_prob, entropy = _log_prob_and_entropy(hidden_states, self.weight, labels, temperature, self.options)
        return {"logprobs": log_prob, "entropy": entropy}


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    context: Mapping[str, Any] | None = None,
    config: Any = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, entropies), as `GPTModel.forward(output_processor=…)` of Megatron-core expects them.

        model(ids, positions, mask, labels=labels, output_processor=output_processor,
        output_processor_context={"temperature": 0.7})

    hidden_states  (tokens, sequences, H), as the decoder returns them; with sequence parallelism a rank's tokens
    output_weight  (V, H), the shared embedding, or None for the weight of output_layer; a rank's classes with tensor
                   parallelism
    labels         (sequences, tokens)   the token after each position, -100 where none counts
    context        options of linear_log_prob: temperature (a number, or a tensor that broadcasts to labels), budget,
                   softcap, …
    scale_logits   MuP's scale
    returns        (sequences, tokens) each

    With tensor parallelism every rank gets the results of all tokens, and exchanges a few numbers per token instead of
    logits. Its group is `output_layer.tp_group`, unless the context names one. Rows that Megatron-core pads
    the vocabulary with are classes, as in its own loss.

    Raises OptionError without labels, and without a group if tensor parallelism shards the head.
    """
    if labels is None:
        raise OptionError("output_processor needs the labels of the forward pass, got none; pass labels to the model")
    options = {"temperature": 1.0, "bias": getattr(output_layer, "bias", None), **(context or {})}
    if scale_logits is not None:
        # Megatron-core's scale multiplies by a number.
        options["logit_scale"] = options.get("logit_scale", 1.0) * float(scale_logits(torch.ones(())))
    temperature = options.pop("temperature")
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(labels.shape).t()
    weight = output_layer.weight if output_weight is None else output_weight
    group = options.pop("tp_group", getattr(output_layer, "tp_group", None))
    ranks = getattr(config, "tensor_model_parallel_size", 1)
    if ranks > 1:
        if group is None:
            raise OptionError(
                f"output_processor needs the process group of tensor parallelism (tensor_model_parallel_size={ranks}), "
                "and output_layer has no "
                'tp_group; pass it as output_processor_context={"tp_group": '
                "parallel_state.get_tensor_model_parallel_group()}"
            )
        mesh, of_tokens = _mesh(group, weight.device.type), getattr(config, "sequence_parallel", False)
        hidden_states, weight, options["bias"] = _over_ranks(mesh, hidden_states, weight, options["bias"], of_tokens)
    # Transpose the labels, because transposing the hidden states would copy them.
    log_prob, entropy = _log_prob_and_entropy(hidden_states, weight, labels.t(), temperature, options)
    if hasattr(log_prob, "to_local") and hasattr(entropy, "to_local"):
        log_prob, entropy = log_prob.to_local(), entropy.to_local()
    return log_prob.t(), entropy.t()


@cache
def _mesh(group: Any, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type)


def _over_ranks(
    mesh: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, of_tokens: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each as a DTensor that is sharded over its classes, and hidden over its tokens if they are sharded."""
    from torch.distributed.tensor import DTensor, Shard

    def spread(local: Tensor) -> Tensor:
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    return spread(hidden) if of_tokens else hidden, spread(weight), None if bias is None else spread(bias)


def _log_prob_and_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor | float, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().expand(target.shape)
    log_prob, entropy = linear_log_prob(
        hidden, weight, target.long(), temperature=temperature, return_entropy=True, **options
    )
    return log_prob, entropy
