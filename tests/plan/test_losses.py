# SPDX-License-Identifier: Apache-2.0
"""The memory that a plan counts inside the fused losses, against what they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_bench.memory import peak_bytes
from liger_core import linear_cross_entropy, linear_log_prob
from liger_core.kernels import plain_matmuls
from liger_core.ops import _token_passes
from liger_core.ops.head import loop
from liger_train.plan import devices
from liger_train.plan.ledger import WEIGHTS, Ledger

CPU = torch.device("cpu")
ROWS, WIDTH, CLASSES = 192, 256, 4000
# Of several chunks, whose gradients of the weight are summed in float32, but in bfloat16 within the budget.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "sum": partial(linear_cross_entropy, reduction="sum", chunk=64),
    "each row": partial(linear_cross_entropy, reduction="none", chunk=64),
    "log-probabilities": partial(linear_log_prob, chunk=64),
    "log-probabilities, kept": linear_log_prob,
    "each row, within a budget": partial(linear_cross_entropy, reduction="none", budget=512 << 10),
}
NEEDS = {"both": (True, True), "frozen head": (True, False), "only the head": (False, True)}


def inputs(needs: tuple[bool, bool]) -> list[Tensor]:
    hidden = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=needs[0])
    weight = torch.zeros(CLASSES, WIDTH, dtype=torch.bfloat16, requires_grad=needs[1])
    return [hidden, weight, torch.zeros(ROWS, dtype=torch.long)]


def step(loss: Callable[..., Tensor], given: list[Tensor]) -> object:
    return torch.autograd.grad(loss(*given).sum(), [t for t in given if t.requires_grad])


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_plan_counts_the_memory_of_a_loss(
    loss: Callable[..., Tensor], needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_token_passes, loop):
        monkeypatch.setattr(module, "REFERENCE_BLOCK", 4 * CLASSES)
    # On a CPU that multiplies matrices of bfloat16 itself, oneDNN copies them into buffers of its own first. On one that
    # does not, references multiply tiles in float32, whose few megabytes a plan leaves out.
    with torch.backends.mkldnn.flags(enabled=False), plain_matmuls():
        measured = peak_bytes(partial(step, loss, inputs(needs)), CPU, collect=False)
    ledger = Ledger(partial(devices.replace, "cpu"), partial(devices.workspace, "cpu"))
    with FakeTensorMode(), devices.emulating("cpu"):
        given = inputs(needs)
        for tensor in given:
            ledger.record(tensor, WEIGHTS)
        with ledger:
            ledger.begin()
            step(loss, given)
    assert ledger.peak().total - ledger.static == pytest.approx(measured, rel=0.02)
