# SPDX-License-Identifier: Apache-2.0
"""The operations that a training step cannot avoid, from the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_bench.step.cases import Case

# Forward passes that the backward pass of attention is worth: five matmuls, one of which computes the scores again,
# instead of two.
ATTENTION_BACKWARD = 2.5
# AdamW reads a weight, its gradient and two moments, and writes all but the gradient.
ADAMW_PASSES = 7


@dataclass(frozen=True)
class Arithmetic:
    """Operations of a step, and the bytes that its update moves.

    operations  of forward and backward pass
    recomputed  of the second forward pass of checkpointed layers
    moved       bytes of the update
    """

    operations: float
    recomputed: float
    moved: int = 0

    def seconds(self, rate: float, bandwidth: float, recompute: bool) -> float:
        return (self.operations + (self.recomputed if recompute else 0)) / rate + self.moved / bandwidth


def arithmetic(model: Any, case: Case, tokens: int, sequence: int) -> Arithmetic:
    """The arithmetic of one step. A weight takes 2 operations per token in each pass; a frozen one has no gradient.

    With experts, a token passes through the weights of num_experts_per_tok of them.
    """
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    total = layers = 0.0
    for module in model.modules():
        count, passes = _weights(module, text)
        total += 2 * tokens * count * passes
        layers += 0 if module is head else 2 * tokens * count
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # Scores and their product with the values, of half of the pairs.
    attention = 2 * tokens * sequence * width * text.num_attention_heads * text.num_hidden_layers
    moved = (
        ADAMW_PASSES * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        if case.optimizer
        else 0
    )
    return Arithmetic(total + (1 + ATTENTION_BACKWARD) * attention, layers + attention, moved)


def _weights(module: nn.Module, text: Any) -> tuple[float, int]:
    """The weights of a module that a token is multiplied by, and in how many passes: forward, gradient of the input, of
    the weight."""
    found = [
        weight for name, weight in module.named_parameters(recurse=False) if weight.dim() in (2, 3) and name != "bias"
    ]
    if not found or isinstance(module, nn.Embedding):
        return 0.0, 0
    experts = found[0].dim() == 3
    share = text.num_experts_per_tok / found[0].shape[0] if experts else 1.0
    return share * sum(weight.numel() for weight in found), 2 + found[0].requires_grad
