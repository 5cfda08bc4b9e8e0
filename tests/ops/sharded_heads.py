# SPDX-License-Identifier: Apache-2.0
"""What ranks do for tests/ops/test_sharded_heads.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from liger_core import LigerError, VocabShard, linear_cross_entropy, linear_divergence, linear_log_prob
from liger_core.ops.head import shards

CLASSES, C10D = 37, shards._c10d


def on_gloo(rank: int, *works: Callable[[], None]) -> None:
    dist.init_process_group("gloo")
    for work in works:
        torch.manual_seed(0)
        shards._c10d = C10D
        work()
        dist.barrier()


def call() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, target and bias, the same on every rank."""
    hidden, weight, bias = torch.randn(12, 8), torch.randn(CLASSES, 8), torch.randn(CLASSES)
    target = torch.randint(CLASSES, (12,))
    target[[1, 5, 6]] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()


def same(*pairs: tuple[Any, Any]) -> None:
    """Compare tensors with those of one process."""
    for got, wanted in pairs:
        torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, wanted, rtol=1e-4, atol=1e-5)


def line() -> DeviceMesh:
    """All ranks in one dimension."""
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def placed(tensor: Tensor, mesh: DeviceMesh, *placements: Placement) -> Any:
    """A leaf with these values."""
    return distribute_tensor(tensor.detach(), mesh, placements).requires_grad_(tensor.is_floating_point())


def counted() -> "Counting":
    """Collectives from now on."""
    shards._c10d = counting = Counting(C10D)  # type: ignore[assignment]
    return counting


def takes_a_dtensor() -> None:
    """weight and bias over all ranks, hidden and target on each."""
    hidden, weight, target, bias = call()
    linear_cross_entropy(hidden, weight, target, bias=bias, label_smoothing=0.1).backward()
    mesh = line()
    w, b = (placed(t, mesh, Shard(0)) for t in (weight, bias))
    x = hidden.detach().requires_grad_()
    loss = linear_cross_entropy(x, w, target, bias=b, label_smoothing=0.1)
    loss.backward()
    assert type(loss) is Tensor
    assert w.grad.placements == (Shard(0),)
    same((x.grad, hidden.grad), (w.grad, weight.grad), (b.grad, bias.grad))


def takes_rows_of_another_dimension(reduction: str) -> None:
    """Rows over two ranks, the vocabulary over two."""
    hidden, weight, target, bias = call()
    expected = linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction, z_loss=0.01)
    factor = torch.linspace(-1, 1, 12) if reduction == "none" else torch.tensor(2.0)
    (expected * factor).sum().backward()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, head = [Shard(0), Replicate()], [Replicate(), Shard(0)]
    x, t = (placed(each, mesh, *rows) for each in (hidden, target))
    w, b = (placed(each, mesh, *head) for each in (weight, bias))
    loss = linear_cross_entropy(x, w, t, bias=b, reduction=reduction, z_loss=0.01)
    assert loss.placements == (Shard(0) if reduction == "none" else Partial(), Replicate())
    same((loss, expected))
    (loss * (distribute_tensor(factor, mesh, rows) if reduction == "none" else 2.0)).sum().backward()
    same((x.grad, hidden.grad), (w.grad, weight.grad), (b.grad, bias.grad))


def gathers_rows_that_the_vocabulary_shards() -> None:
    """Sequence parallelism: hidden is sharded over the ranks that share the vocabulary."""
    hidden, weight, target, _ = call()
    expected = linear_log_prob(hidden, weight, target)
    expected.square().sum().backward()
    mesh = line()
    x, w = (placed(t, mesh, Shard(0)) for t in (hidden, weight))
    got = linear_log_prob(x, w, target)
    same((got, expected))
    got.full_tensor().square().sum().backward()
    assert x.grad.placements == (Shard(0),)
    same((x.grad, hidden.grad), (w.grad, weight.grad))


def scatters_the_gradient(pack: bool) -> None:
    """Sequence parallelism with as many rows on each rank: each gets the gradient of its own rows, summed in float32."""
    hidden, weight, target, _ = call()
    linear_cross_entropy(hidden, weight, target, pack=pack).backward()
    mesh = line()
    x, w, counting = placed(hidden[None], mesh, Shard(1)), placed(weight, mesh, Shard(0)), counted()
    linear_cross_entropy(x, w, target[None], pack=pack).backward()
    assert counting.calls[1:] == [("reduce_scatter_tensor", hidden.numel())], counting.calls
    assert x.grad.placements == (Shard(1),)
    same((x.grad[0], hidden.grad), (w.grad, weight.grad))


def scatters_the_gradient_of_a_divergence(options: dict[str, Any], sums: list[tuple[str, int]]) -> None:
    """The same for two heads, in float64; `sums`: what adds up the gradient of hidden, and how many rows at a time."""
    shapes = (12, 8), (CLASSES, 8), (CLASSES,), (12, 5), (CLASSES, 5), (CLASSES,)
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    target = torch.randint(CLASSES, (12,))
    target[[1, 5, 6]] = -100
    options = {"kind": "jsd", "target": target, "hard_weight": 0.3, "temperature": 2.0, **options}
    factor = torch.linspace(-1, 1, 12, dtype=torch.float64) if options.get("reduction") == "none" else 2.0

    def loss_of(x: Any, w: Any, b: Any, theirs: Any, their_weight: Any, their_bias: Any) -> Any:
        return linear_divergence(x, w, theirs, their_weight, bias=b, teacher_bias=their_bias, **options)

    mesh = line()
    alone = [t.clone().requires_grad_() for t in tensors[:3]]
    expected = loss_of(*alone, *tensors[3:])
    (expected * factor).sum().backward()
    leaves, teacher = (
        [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_(trained) for t in part]
        for part, trained in ((tensors[:3], True), (tensors[3:], False))
    )
    counting = counted()
    loss = loss_of(*leaves, *teacher)
    (loss.to_local() * factor).sum().backward()
    # The other sums have three numbers a row.
    found = [(name, n // 8) for name, n in counting.calls if name != "all_gather_into_tensor" and n % 8 == 0]
    assert found == sums, counting.calls
    for got, wanted in ((loss, expected), *((t.grad, one.grad) for t, one in zip(leaves, alone, strict=True))):
        torch.testing.assert_close(got.full_tensor(), wanted.detach(), rtol=1e-12, atol=1e-14)


def adds_rows_that_are_not_in_the_order_of_ranks() -> None:
    """Two sequences, of each of which a rank has a half."""
    hidden, weight, target, _ = call()
    linear_cross_entropy(hidden, weight, target).backward()
    mesh = line()
    x = placed(hidden.view(2, 6, 8), mesh, Shard(1))
    linear_cross_entropy(x, placed(weight, mesh, Shard(0)), target.view(2, 6)).backward()
    same((x.grad.full_tensor().view(12, 8), hidden.grad))


def sums_where_few_rows_count() -> None:
    """The gradient of a third of the rows is smaller in whole than all rows are in parts."""
    hidden, weight, target, _ = call()
    target[4:] = -100
    linear_cross_entropy(hidden, weight, target).backward()
    mesh = line()
    x, w = (placed(t, mesh, Shard(0)) for t in (hidden, weight))
    counting = counted()
    linear_cross_entropy(x, w, target).backward()
    assert counting.calls[1:] == [("all_reduce_", int((target != -100).sum()) * hidden.shape[1])], counting.calls
    same((x.grad, hidden.grad))


def refuses() -> None:
    """Rows over two ranks: a mean of each, a weight that is sharded over its width, and a target without placements."""
    hidden, weight, target, _ = call()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = [Shard(0), Replicate()]
    x, t = (distribute_tensor(value, mesh, rows) for value in (hidden, target))
    classes, width = (distribute_tensor(weight, mesh, [Replicate(), Shard(dimension)]) for dimension in (0, 1))
    for given, reduction, message in (
        ((x, classes, t), "mean", "reduction='mean' needs a normalizer where rows are distributed"),
        ((x, width, t), "sum", "weight must be replicated, or sharded over its classes"),
        ((x, classes, target), "sum", "target must be a DTensor like hidden, whose rows are distributed"),
    ):
        with pytest.raises(LigerError, match=f"^linear_cross_entropy: {message}"):
            linear_cross_entropy(*given, reduction=reduction)


class Counting:
    """Stands in for the collectives and notes their names and the elements that a rank gives."""

    def __init__(self, real: Any) -> None:
        self.real, self.calls = real, []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.real, name)

        def noted(tensor: Tensor, *args: Any) -> Any:
            if name != "wait_tensor":
                self.calls.append((name, tensor.numel()))
            return function(tensor, *args)

        return noted


def exchanges_once() -> None:
    """What a training step sends."""
    hidden, weight, target, _ = call()
    shard = VocabShard.of(weight[dist.get_rank() :: 2], None)
    assert shard.classes == CLASSES
    counting, part = counted(), weight[shard.start :][: 19 - dist.get_rank()]
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "budget": 9 * 19 * 4}
    loss = linear_cross_entropy(hidden, part, target, vocab=shard, **options)
    rows = int((target != -100).sum())
    assert counting.calls == [("all_gather_into_tensor", rows * 8)], counting.calls
    loss.backward()
    # Rows are cut for this budget; every row is added up once.
    sums = [numbers for name, numbers in counting.calls if name == "all_reduce_"]
    assert len(sums) == len(counting.calls) - 1
    assert sum(sums) == rows * hidden.shape[1]


def compiles() -> None:
    """One graph, without a break."""
    hidden, weight, target, _ = call()
    expected = linear_cross_entropy(hidden, weight, target)
    expected.backward()
    rank = dist.get_rank()
    shard = VocabShard(dist.group.WORLD.group_name, 20 * rank, CLASSES)
    x, w = hidden.detach().requires_grad_(), weight.detach()[20 * rank :][:20].clone().requires_grad_()

    def step(x: Tensor, w: Tensor, t: Tensor) -> Any:
        return linear_cross_entropy(x, w, t, vocab=shard)

    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(x, w, target)
    loss.backward()
    same((loss, expected), (x.grad, hidden.grad), (w.grad, weight.grad[20 * rank :][:20]))


def holds_a_budget_of_an_even_share() -> None:
    """36 classes on one rank and 1 on the other: 100 bytes are more than a row of half of them, and less than one of
    the first."""
    hidden, weight, target, _ = call()
    expected = linear_cross_entropy(hidden, weight, target, reduction="none").detach()
    shard = VocabShard.of(part := weight.detach()[:36] if dist.get_rank() == 0 else weight.detach()[36:])

    def rows(vocab: VocabShard) -> Any:
        return linear_cross_entropy(hidden, part, target, reduction="none", vocab=vocab, budget=100)

    named = shard._replace(group=shard.group.group_name)
    compiled = torch.compile(lambda: rows(named), fullgraph=True, backend="eager")
    same((rows(shard), expected), (compiled(), expected))
    with pytest.raises(LigerError, match="budget must hold at least one row of logits, 76 bytes, got 70"):
        linear_cross_entropy(hidden, part, target, vocab=shard, budget=70)
