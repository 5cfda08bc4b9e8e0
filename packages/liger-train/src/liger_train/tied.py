# SPDX-License-Identifier: Apache-2.0
"""Add the gradient of a tied token embedding to the rows of its tokens alone.

Autograd would make a dense gradient over the vocabulary, zero except in these rows, and add it to the LM head's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from liger_core.autograd import check_backward
from liger_hf.patch import replacement


def tie(model: Any) -> str:
    """Make the embedding add to the gradient of the LM head; return a sentence for the user, or an empty string.

    Use it only if nothing but the optimizer reads gradients, after the whole backward pass.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or type(embedding) is not nn.Embedding or getattr(head, "weight", None) is not embedding.weight:
        return ""
    weight = embedding.weight
    is_plain = type(weight) is nn.Parameter and weight.is_contiguous() and not weight.is_meta
    has_hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    has_options = embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm is not None
    is_trained = weight.requires_grad and "forward" not in vars(embedding)
    if not is_plain or has_hooks or has_options or not is_trained:
        return ""
    replacement(embedding, _forward, nn.Embedding.forward).install()
    return "The gradient of the tied embedding is added to the rows of its tokens alone."


def _forward(self: nn.Embedding, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or not self.weight.requires_grad:
        return nn.functional.embedding(input, self.weight, self.padding_idx)
    return _RowLookup.apply(self.weight.new_empty(0).requires_grad_(), self, input)


class _RowLookup(torch.autograd.Function):
    """Look up rows, and add their gradients to `weight.grad` in place.

    `anchor` requires a gradient instead of the weight, since otherwise autograd would hold the LM head's gradient until
    this one is computed.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embedding: nn.Embedding, index: Tensor) -> Tensor:
        ctx.weight, ctx.padding = embedding.weight, embedding.padding_idx
        ctx.save_for_backward(index)
        return nn.functional.embedding(index, ctx.weight.detach(), ctx.padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        check_backward("liger train: the tied embedding", *grads)
        (index,) = ctx.saved_tensors
        with torch.no_grad():
            if ctx.weight.grad is None:
                # The loss did not use the LM head.
                ctx.weight.grad = torch.zeros_like(ctx.weight)
            add_rows(ctx.weight.grad, index.reshape(-1), grads[0].reshape(-1, grads[0].shape[-1]), ctx.padding)
        return None, None, None


def add_rows(total: Tensor, index: Tensor, rows: Tensor, padding: int | None) -> None:
    """Compute total[index[i]] += rows[i]: summed in float32, in the same order in every run, and rounded once."""
    if not index.numel():
        return
    if padding is not None:
        rows = rows.masked_fill((index == padding)[:, None], 0)
    ordered, order = torch.sort(index, stable=True)
    group = torch.zeros_like(ordered)
    torch.cumsum(ordered[1:] != ordered[:-1], 0, out=group[1:])
    wide = torch.promote_types(total.dtype, torch.float32)
    sums = torch.zeros(rows.shape, dtype=wide, device=rows.device)
    # On a GPU, index_add_ sums in arbitrary order, while index_put_ sorts the indices.
    sums.index_put_((group,), rows[order].to(wide), accumulate=True)
    # All occurrences of a token write the same row.
    total.index_copy_(0, ordered, (total[ordered].to(wide) + sums[group]).to(total.dtype))
