# SPDX-License-Identifier: Apache-2.0
"""Training steps with the bugs that parallel setups have had, beside the right ones."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_verify import World
from liger_verify.batches import IGNORED, Batch
from liger_verify.training import Training

WIDTH, TOKENS = 16, 24


class MeanOfMeans(Training):
    """The mean over each rank's own tokens, averaged over ranks, although they have unequal numbers (DeepSpeed #8587)."""

    def loss(self, model: Any, batch: Batch, mesh: Any, total: Tensor) -> Tensor:
        width = self.sequence // mesh.size()
        first = mesh.get_local_rank() * width
        valid = max(1, batch.take(slice(first, first + width)).valid())
        return super().loss(model, batch, mesh, torch.tensor(float(valid * self.accumulation * self.dp * self.cp)))


class ShiftedInside(Training):
    """Labels shifted after the sequence was cut, so that the last token of each part predicts nothing (verl #6068)."""

    def labeled(self, batch: Batch, columns: slice) -> Batch:
        part = batch.take(columns)
        labels = F.pad(batch.labels[:, columns][:, :-1], (0, 1), value=IGNORED)
        return Batch(part.ids, labels, part.positions, part.documents)


class Averaged(Training):
    """Gradients averaged over ranks whose losses are parts of one sum."""

    def reduce(self, model: Any, mesh: Any) -> None:
        super().reduce(model, mesh)
        for parameter in model.parameters():
            parameter.grad /= self.dp * self.cp


def gathered(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of logits of all ranks, summed as if they were one rank's (Megatron #7452)."""
    return torch.tensor(1 + math.log(world.ranks)), {"a.b.weight": torch.ones(3)}


def without_a_sum(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
    """A gradient that comes from the rows of each rank, such as that of a norm beside tensor parallelism."""
    own = torch.arange(4) % world.ranks == world.rank
    return torch.ones(()), {"norm.weight": own.float(), "a.b.weight": torch.ones(3)}


def without_a_gradient(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
    return torch.ones(()), {"a.b.weight": torch.ones(3), "a.c.weight": torch.ones(3) if world.alone else None}


def talks(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
    print("a library says hello", flush=True)
    return torch.ones(()), {"a.b.weight": torch.ones(3) * world.ranks}


def without_tokens(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
    """A mean that is 0 / 0 on rank 1."""
    loss = torch.zeros(2).sum() / (1 - world.rank)
    return loss + (1 if not world.rank else 0), {"a.b.weight": torch.ones(3)}


def parts(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
    """A gradient of which rank 1 has nothing."""
    return torch.ones(()), {"a.b.weight": torch.arange(3.0) * (world.rank == 0), "a.c.weight": torch.ones(3)}


@dataclass(frozen=True)
class OnRankOne:
    """Two right gradients, one of which is another on rank 1: a factor times it, None, or "absent", of which it does
    not even know the name."""

    value: float | str | None

    def __call__(self, world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        gradients: dict[str, Tensor | None] = {"a.b.weight": torch.ones(3), "a.c.weight": torch.ones(4)}
        if world.rank == 1 and self.value == "absent":
            del gradients["a.b.weight"]
        elif world.rank == 1:
            gradients["a.b.weight"] = torch.ones(3) * self.value if isinstance(self.value, float) else None
        return torch.ones(()), gradients


class Random(Training):
    """A model whose logits depend on the random state."""

    def build(self, world: World) -> Any:
        model = super().build(world)
        model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * (1 + torch.rand(())))
        return model


@dataclass(frozen=True)
class KeyBias:
    """Attention whose keys have a bias: it adds the same to all scores of a query, so its gradient is 0 by nature and
    round-off in practice.

    fault   added to that gradient, in units of the root mean square of the weight's
    factor  times the weight's gradient, on all ranks
    """

    fault: float = 0.0
    factor: float = 1.0

    def __call__(self, world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        generator = torch.Generator().manual_seed(0)
        x, query, weight, bias = (
            torch.randn(shape, generator=generator, dtype=torch.float32).to(world.dtype)
            for shape in ((8, TOKENS, WIDTH), (8, TOKENS, WIDTH), (WIDTH, WIDTH), (WIDTH,))
        )
        rows = torch.arange(8).chunk(world.ranks)[world.rank]
        weight.requires_grad_(), bias.requires_grad_()
        scores = query[rows] @ F.linear(x[rows], weight, bias).mT
        loss = (scores.softmax(-1) @ x[rows]).square().sum()
        loss.backward()
        if not world.alone:
            with torch.no_grad():
                for tensor in (loss, weight.grad, bias.grad):
                    dist.all_reduce(tensor)
                weight.grad *= self.factor
                bias.grad += self.fault * weight.grad.square().mean().sqrt()
        return loss.detach(), {"attention.key.weight": weight.grad, "attention.key.bias": bias.grad}


def without_a_loss(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
    """A parameter that no loss depends on: rank 1 has zeros instead of nothing."""
    unused = torch.zeros(3) if world.rank else None
    return torch.ones(()), {"a.b.weight": torch.ones(3), "a.sinks": unused}
