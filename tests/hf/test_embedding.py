# SPDX-License-Identifier: Apache-2.0
"""Embeddings are replaced where they are asked for, and differ in the gradient of a trained table alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_hf
from hf.sweep import build
from hf.tiny_models import assert_same_step, make, pair_of, rows_of, step_disagreements
from liger_hf.rules.embedding import rule

pytestmark = pytest.mark.cpu

# Tied and scaled, one of each: what is replaced, and how.
MODELS: dict[str, tuple[int, set[str]]] = {
    "llama": (1, {""}),
    "gemma3_text": (1, {", times embed_scale"}),
    "bart": (1, {", times embed_scale", ""}),
    "bert": (3, {""}),
}


@pytest.mark.parametrize(("model_type", "expected"), MODELS.items(), ids=MODELS)
def test_a_model_trains_like_the_unpatched_one(model_type: str, expected: tuple[int, set[str]]) -> None:
    count, details = expected
    patched, plain = pair_of(build(model_type).eval(), only=["embedding"])
    report = patched.liger_report
    assert report.replaced == {"embedding": count}
    replaced = [row for row in rows_of(report, "embedding") if row.verdict == "replaced"]
    assert {row.reason.removeprefix("outputs and gradients agree") for row in replaced} <= details
    wrong = step_disagreements(patched, plain)
    # A softmax does not depend on a bias of the keys: its gradient is rounding alone.
    assert [name for name in wrong if not name.endswith(("key.bias", "k_proj.bias"))] == []
    report.undo()
    assert_same_step(patched, plain, rtol=0, atol=0)


def test_they_are_replaced_on_request_alone_also_after_another_apply() -> None:
    model = make()
    first = liger_hf.apply(model)
    assert rows_of(first, "embedding") == []
    assert "embedding" not in first.absent
    assert liger_hf.apply(model, only=["embedding"]).replaced == {"embedding": 1}
    (row,) = rows_of(liger_hf.apply(model, only=["embedding"]), "embedding")
    assert row.reason == "already replaced by an earlier apply"


class Positions(nn.Embedding):
    """Counts the positions of a mask itself, as OPT's does."""

    def forward(self, attention_mask: Tensor, cache_length: int = 0) -> Tensor:
        return super().forward(attention_mask.cumsum(-1)[:, cache_length:])


def normed() -> nn.Embedding:
    module = nn.Embedding(5, 8)
    module.norm = nn.LayerNorm(8)
    return module


LEFT: dict[str, tuple[Any, str]] = {
    "sparse": (lambda: nn.Embedding(5, 8, sparse=True), "the op has no sparse"),
    "renormalized": (lambda: nn.Embedding(5, 8, max_norm=1.0, scale_grad_by_freq=True), "the op has no max_norm and no scale_grad_by_freq"),
    "frozen": (lambda: nn.Embedding(5, 8).requires_grad_(False), "its table is frozen, and the op differs in the gradient alone"),
    "positions": (lambda: Positions(5, 8), "an embedding must take indices alone, its forward takes (attention_mask, cache_length)"),
    "children": (normed, "it must have no children, it has norm"),
}  # fmt: skip


@pytest.mark.parametrize(("make_one", "reason"), LEFT.values(), ids=LEFT)
def test_the_report_says_why_an_embedding_is_left(make_one: Any, reason: str) -> None:
    (row,) = rows_of(liger_hf.apply(make_one(), only=["embedding"]), "embedding")
    assert (row.verdict, row.reason) == ("left", reason)


def test_calls_without_a_gradient_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Embedding(5, 8)
    liger_hf.apply(module, only=["embedding"])
    monkeypatch.setattr(rule, "embedding", lambda *args, **options: pytest.fail("the op ran"))
    index = torch.tensor([[1, 4]])
    with torch.no_grad():
        assert torch.equal(module(index), module.weight[index])
    module.requires_grad_(False)
    assert torch.equal(module(index), module.weight[index])


def test_a_compiled_embedding_has_no_graph_break() -> None:
    module = nn.Embedding(5, 8, padding_idx=0)
    liger_hf.apply(module, only=["embedding"])
    index = torch.tensor([[1, 4, 0, 1]])
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(index).sum().backward()
    assert module.weight.grad.sum(1).tolist() == [0, 16, 0, 0, 8]


def test_a_sharded_table_is_looked_up_by_the_rules_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("torch.distributed.tensor", reason="torch was built without torch.distributed")
    module, index = nn.Embedding(6, 8), torch.tensor([[1, 4, 1]])
    expected = module(index)
    liger_hf.apply(module, only=["embedding"])
    monkeypatch.setattr(rule, "embedding", lambda *args, **options: pytest.fail("the op ran"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = distributed.distribute_tensor(module.weight.detach(), mesh, [distributed.Shard(0)])
        module.weight = nn.Parameter(sharded)
        result = module(distributed.distribute_tensor(index, mesh, [distributed.Replicate()]))
        assert torch.equal(result.full_tensor(), expected)
    finally:
        torch.distributed.destroy_process_group()
