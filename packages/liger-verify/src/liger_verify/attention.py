# SPDX-License-Identifier: Apache-2.0
"""Attention for context parallelism: each rank has the queries of its tokens, and gathers the keys and values of all.

It is a plain formula, because only the training step around it is verified. Masks come from the documents of a batch,
not from the model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from liger_core.errors import OptionError
from liger_verify.batches import Batch

NAME = "liger_verify"
# Arguments that do not change the output here: the batch defines the mask, and the loss has its own arguments.
HARMLESS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "num_items_in_batch", "shift_labels", "deterministic",
}  # fmt: skip


class _AttentionContext:
    """The batch that is running on all ranks of the mesh, and the tokens of this rank.

    calls     how often attention ran
    separate  whether tokens do not see other documents
    """

    whole: Batch
    columns: slice
    mesh: Any = None
    calls: int = 0
    separate: bool = True


_now = _AttentionContext()


def set_batch(whole: Batch, columns: slice, mesh: Any) -> None:
    """Set the batch and this rank's tokens for the next forward pass; mesh is None if the rank has all tokens."""
    _now.whole, _now.columns, _now.mesh, _now.calls = whole, columns, mesh, 0


def calls() -> int:
    """Return how many layers called the attention in the last forward pass."""
    return _now.calls


def register(separate: bool = True) -> str:
    """Register the attention in Transformers and return its name; `separate` keeps documents apart."""
    _now.separate = separate
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute softmax(scaling · q kᵀ) v over the tokens of the same document up to each one.

    query, key, value  (rows, heads, tokens, width)
    s_aux              (heads,) the scores of one more column, a sink that has no value
    """
    others |= {"attention_mask": attention_mask, "dropout": dropout or None}
    unknown = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if unknown:
        raise OptionError(
            f"verify: with cp, attention must have no {unknown[0]}, {type(module).__name__} passes one; leave out cp"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise OptionError(
            f"verify: with cp, attention must be causal, that of {type(module).__name__} is not; leave out cp"
        )
    _now.calls += 1
    if _now.mesh is not None:
        from torch.distributed.tensor import DTensor, Partial, Shard

        # The gradient of each shard is the sum of those of all ranks.
        shards = [DTensor.from_local(shard, _now.mesh, [Shard(2)], run_check=False) for shard in (key, value)]
        key, value = (shard.full_tensor(grad_placements=[Partial()]) for shard in shards)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    column = torch.arange(key.shape[2], device=key.device)
    distance = column[_now.columns][:, None] - column
    documents = _now.whole.documents
    seen = (distance >= 0) & ((documents[:, _now.columns, None] == documents[:, None, :]) | (not _now.separate))
    if sliding_window is not None:
        seen = seen & (distance < sliding_window)
    scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None
