# SPDX-License-Identifier: Apache-2.0
"""The losses compile as one graph and wait for no device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_core.losses import Averaging, Head, grpo
from losses.cases import CASES, Case, Given
from losses.test_papers import head_batch, in_dtype, random_batch

pytestmark = pytest.mark.slow

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@EACH
def test_a_loss_of_log_probabilities_is_one_graph(case: Case) -> None:
    batch = in_dtype(random_batch(), torch.float32)

    def loss(policy: Tensor, entropy: Tensor) -> Any:
        return case.ours((policy, entropy) if case.entropy else policy, batch, mask=batch.mask)

    given = batch.policy.requires_grad_(), batch.entropy
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")(*given)
    torch.testing.assert_close(compiled, loss(*given), rtol=0, atol=0)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("dpo_sigmoid", "grpo_entropy")], ids=lambda case: case.name
)
def test_a_loss_of_a_head_is_one_graph_with_its_gradients(case: Case) -> None:
    batch, leaves, target = head_batch()
    inputs = [x.requires_grad_() for x in leaves.values()]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return case.ours(Head(hidden, weight, target, bias=bias), batch)[0]

    torch._dynamo.reset()
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for compiled, eager in zip(*(torch.autograd.grad(f(*inputs), inputs) for f in (whole, loss)), strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_head_may_be_an_argument_of_the_compiled_function() -> None:
    batch, leaves, target = head_batch()
    head = Head(leaves["hidden"], leaves["weight"], target, bias=leaves["bias"])
    torch._dynamo.reset()
    compiled = torch.compile(lambda head: grpo(head, batch.old, batch.advantage)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(head), grpo(head, batch.old, batch.advantage)[0], rtol=0, atol=0)


def test_another_count_of_tokens_does_not_recompile() -> None:
    batch = in_dtype(random_batch(), torch.float32)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()

    def loss(count: Tensor) -> Tensor:
        averaging = Averaging("token", count=count)
        return grpo(batch.policy, batch.old, batch.advantage, mask=batch.mask, averaging=averaging)[0]

    compiled = torch.compile(loss, fullgraph=True, backend=graphs)
    for count in (7, 19):
        torch.testing.assert_close(compiled(torch.tensor(count)), loss(torch.tensor(count)))
    assert graphs.frame_count == 1


@EACH
def test_a_loss_reads_no_values(case: Case) -> None:
    """Tensors without values fail where one is read, which on a GPU would wait for it. Metrics are detached numbers."""
    batch = in_dtype(random_batch(), torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        without = Given(**{name: torch.empty_like(x) for name, x in vars(batch).items()})
        policy = without.policy.requires_grad_()
        loss, metrics = case.ours((policy, without.entropy) if case.entropy else policy, without, mask=without.mask)
        loss.backward()
    assert policy.grad is not None
    assert loss.shape == ()
    assert {(m.requires_grad, m.dim()) for m in metrics if m is not None} == {(False, 0)}
