# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on the CPU, where PyTorch has no ring attention: each rank gathers all keys and values."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, experimental
from torch.nn import functional

from liger_core.private_names import replacing
from liger_train.errors import SetupError


def install() -> None:
    """Make accelerate use this module's `context_parallel`."""
    vars(experimental)["context_parallel"] = context_parallel


@contextmanager
def context_parallel(
    mesh: DeviceMesh, *, buffers: Sequence[Tensor], buffer_seq_dims: Sequence[int], **more: Any
) -> Iterator[None]:
    """Shard the buffers in place, like torch.distributed.tensor.experimental.context_parallel, and replace attention.

    Shards are in the order of the ranks. The buffers are not restored, which the Trainer does not need.
    """
    for buffer, dimension in zip(buffers, buffer_seq_dims, strict=True):
        shard = buffer.chunk(mesh.size(), dimension)[mesh.get_local_rank()].clone()
        buffer.resize_(shard.shape).copy_(shard)
    original = functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **options: Any
    ) -> Tensor:
        if attn_mask is not None:
            raise SetupError("--cp needs attention without a mask, got the mask of one rank; leave out --cp")
        first = mesh.get_local_rank() * query.shape[2]
        causal = torch.arange(first, first + query.shape[2])[:, None] >= torch.arange(mesh.size() * key.shape[2])
        return original(
            query, _gather(key, mesh), _gather(value, mesh), attn_mask=causal if is_causal else None, **options
        )

    with replacing(functional, "scaled_dot_product_attention", attention):
        yield


def _gather(shard: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the keys or values (batch, heads, tokens, width) of all ranks; gradients are summed over the ranks."""
    return (
        DTensor.from_local(shard, mesh, [Shard(2)])
        .redistribute(placements=[Replicate()])
        .to_local(grad_placements=[Partial()])
    )
