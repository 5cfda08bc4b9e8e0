# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on the CPU, for which PyTorch has no ring attention: each rank gathers the keys and values of the
others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, experimental
from torch.nn import functional

from liger_core.errors import OptionError
from liger_core.private_names import replacing


def install() -> None:
    """Make accelerate use `context_parallel`."""
    vars(experimental)["context_parallel"] = context_parallel


@contextmanager
def context_parallel(
    mesh: DeviceMesh, *, buffers: Sequence[Tensor], buffer_seq_dims: Sequence[int], **more: Any
) -> Iterator[None]:
    """Takes the place of torch.distributed.tensor.experimental.context_parallel, which shards the buffers in place,
    too.

    Shards are in the order of the ranks. As the Trainer asks for, the buffers are not restored.
    """
    for buffer, dimension in zip(buffers, buffer_seq_dims, strict=True):
        shard = buffer.chunk(mesh.size(), dimension)[mesh.get_local_rank()].clone()
        buffer.resize_(shard.shape).copy_(shard)
    original = functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **options: Any
    ) -> Tensor:
        if attn_mask is not None:
            raise OptionError(
                "train: --cp needs attention without a mask, got one, which is of one rank's tokens; leave out --cp"
            )
        first = mesh.get_local_rank() * query.shape[2]
        seen = torch.arange(first, first + query.shape[2])[:, None] >= torch.arange(mesh.size() * key.shape[2])
        return original(
            query, _gathered(key, mesh), _gathered(value, mesh), attn_mask=seen if is_causal else None, **options
        )

    with replacing(functional, "scaled_dot_product_attention", attention):
        yield


def _gathered(shard: Tensor, mesh: DeviceMesh) -> Tensor:
    """The keys or values of the whole sequence, (batch, heads, tokens, width); gradients are summed over the ranks."""
    return (
        DTensor.from_local(shard, mesh, [Shard(2)])
        .redistribute(placements=[Replicate()])
        .to_local(grad_placements=[Partial()])
    )
