# SPDX-License-Identifier: Apache-2.0
"""The ways to compute the loss of a head whose vocabulary is sharded, each on the rows of weight of its rank."""

from collections.abc import Callable
from typing import Any

import torch
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
    sharded = _gathered if implementation == GATHERED else _loss_parallel
    return lambda hidden, weight, target: sharded(hidden, weight, target, classes, mesh)


def _replicated(hidden: Tensor, mesh: Any) -> Tensor:
    """Return the rows, which every rank has; their gradient is the sum over ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _gathered(hidden: Tensor, weight: Tensor, target: Tensor, classes: int, mesh: Any) -> Tensor:
    """Compute the loss of Transformers with tp_plan="auto"."""
    from torch.distributed.tensor import DTensor, Shard

    logits = DTensor.from_local(_replicated(hidden, mesh) @ weight.mT, mesh, [Shard(1)], run_check=False)
    return F.cross_entropy(logits.full_tensor()[:, :classes].float(), target)


def _loss_parallel(hidden: Tensor, weight: Tensor, target: Tensor, classes: int, mesh: Any) -> Tensor:
    """Compute PyTorch's loss on logits whose classes are sharded, as torchtitan does for chunks of tokens."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mine = weight[: max(0, classes - weight.shape[0] * mesh.get_local_rank())]
    shape = torch.Size((hidden.shape[0], classes))
    local = (_replicated(hidden, mesh) @ mine.mT).float()
    logits = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=shape, stride=(classes, 1))
    with loss_parallel():
        loss = F.cross_entropy(logits, DTensor.from_local(target, mesh, [Replicate()], run_check=False))
        # The backward pass must also be within the context.
        loss.backward()
    return loss.to_local().detach()  # type: ignore[attr-defined]
