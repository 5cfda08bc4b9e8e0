# SPDX-License-Identifier: Apache-2.0
"""The ways to compute the loss of a head whose vocabulary is sharded, each on the rows of weight of its rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_core import VocabShard, linear_cross_entropy, linear_log_prob

LIGER, GATHERED, LOSS_PARALLEL = "liger", "gathered", "loss-parallel"
IMPLEMENTATIONS = (LIGER, GATHERED, LOSS_PARALLEL)
OPS = ("linear_cross_entropy", "linear_log_prob")

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def loss_of(op: str, implementation: str, classes: int, mesh: Any) -> Loss:
    """Return a function of hidden, the rank's rows of weight and the targets: the mean loss or −log-probability."""
    if implementation == LIGER:
        vocab = None
        if mesh.size() > 1:
            vocab = VocabShard(mesh.get_group(), -(-classes // mesh.size()) * mesh.get_local_rank(), classes)
        if op == "linear_cross_entropy":
            return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target, vocab=vocab)
        return lambda hidden, weight, target: -linear_log_prob(hidden, weight, target, vocab=vocab).mean()
    if implementation == GATHERED:
        # The loss of Transformers with tp_plan="auto".
        return lambda hidden, weight, target: F.cross_entropy(
            _Gather.apply(_Copy.apply(hidden, mesh.get_group()) @ weight.mT, mesh.get_group())[:, :classes].float(),
            target,
        )
    return lambda hidden, weight, target: _loss_parallel(hidden, weight, target, classes, mesh)


def _loss_parallel(hidden: Tensor, weight: Tensor, target: Tensor, classes: int, mesh: Any) -> Tensor:
    """Compute PyTorch's loss on logits whose classes are sharded, as torchtitan does for chunks of tokens."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    rows = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    mine = weight[: max(0, classes - weight.shape[0] * mesh.get_local_rank())]
    shape = torch.Size((hidden.shape[0], classes))
    logits = DTensor.from_local(
        (rows @ mine.mT).float(), mesh, [Shard(1)], run_check=False, shape=shape, stride=(classes, 1)
    )
    with loss_parallel():
        loss = F.cross_entropy(logits, DTensor.from_local(target, mesh, [Replicate()], run_check=False))
        # The backward pass must also be within the context.
        loss.backward()
    return loss.to_local().detach()  # type: ignore[attr-defined]


class _Copy(torch.autograd.Function):
    """Return the rows, which every rank has; their gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Gather(torch.autograd.Function):
    """Gather the logits of all ranks; the gradient of each rank is that of its own logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.width = group, logits.shape[1]
        all_logits = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(all_logits, logits.contiguous(), group=group)
        return torch.cat(all_logits, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        start = ctx.width * ctx.group.rank()
        return grads[0][:, start : start + ctx.width].contiguous(), None
