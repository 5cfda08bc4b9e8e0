# SPDX-License-Identifier: Apache-2.0
"""A token embedding that shares its weight with the LM head adds its gradient to the rows of the tokens alone.

Autograd makes a dense gradient of the whole vocabulary, zeros but for these rows, and adds it to that of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_core.autograd import check_backward
from liger_hf.patch import replacement


def tie(model: Any) -> str:
    """Make the embedding add to the gradient that its weight has from the head; return a sentence, or an empty string.

    This is for runs in which only the optimizer reads gradients, after the whole backward pass.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or type(embedding) is not nn.Embedding or getattr(head, "weight", None) is not embedding.weight:
        return ""
    weight = embedding.weight
    plain = (
        type(weight) is nn.Parameter and weight.is_contiguous() and not weight.is_meta and weight.is_floating_point()
    )
    watched = (
        weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None) or "forward" in vars(embedding)
    )
    if (
        not plain
        or watched
        or not weight.requires_grad
        or embedding.sparse
        or embedding.scale_grad_by_freq
        or embedding.max_norm is not None
    ):
        return ""
    replacement(embedding, _forward, nn.Embedding.forward).install()
    return "The gradient of the tied embedding is added to the rows of its tokens alone."


def _forward(self: nn.Embedding, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or not self.weight.requires_grad:
        return nn.functional.embedding(input, self.weight, self.padding_idx)
    result: Tensor = _Rows.apply(self.weight.new_empty(0).requires_grad_(), self, input)
    return result


class _Rows(torch.autograd.Function):
    """Look up rows, and add their gradients to `weight.grad` directly.

    `anchor` requires the gradient instead of the weight, because otherwise autograd would hold the gradient from the
    head until this one is computed.
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
                # No loss has come through the head.
                ctx.weight.grad = torch.zeros_like(ctx.weight)
            add_rows(ctx.weight.grad, index.reshape(-1), grads[0].reshape(-1, grads[0].shape[-1]), ctx.padding)
        return None, None, None


def add_rows(total: Tensor, index: Tensor, rows: Tensor, padding: int | None) -> None:
    """Compute total[index[i]] += rows[i], summed in float32 in the same order in every run, and rounded once."""
    if not index.numel():
        return
    if padding is not None:
        rows = rows.masked_fill((index == padding)[:, None], 0)
    ordered, order = torch.sort(index, stable=True)
    run = torch.zeros_like(ordered)
    torch.cumsum(ordered[1:] != ordered[:-1], 0, out=run[1:])
    wide = torch.promote_types(total.dtype, torch.float32)
    sums = torch.zeros(rows.shape, dtype=wide, device=rows.device)
    # index_add_ adds in any order on a GPU; this sorts the indices.
    sums.index_put_((run,), rows[order].to(wide), accumulate=True)
    # The occurrences of a token all write the same row.
    total.index_copy_(0, ordered, (total[ordered].to(wide) + sums[run]).to(total.dtype))
