# SPDX-License-Identifier: Apache-2.0
"""linear_log_prob(…, batch_invariant=True): what it returns for a row does not depend on the other rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import linear_log_prob
from ops.agreement import leaf

pytestmark = pytest.mark.slow

ROWS, WIDTH, CLASSES = 64, 33, 1001
# The batches of one, two, seven and all rows that are also laid out otherwise.
LAID_OUT = (0, 2, 4, 6)
CASES: dict[str, dict[str, Any]] = {
    "entropy": {"return_entropy": True},
    "statistics": {"return_statistics": True, "softcap": 5.0, "logit_scale": 2.0},
    "several_chunks": {"budget": 40_000, "return_entropy": True},
    "chunk_of_7_rows": {"chunk": 7, "return_entropy": True},
}


def results(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    """Return the results of all rows, each (N,)."""
    log_prob, others = linear_log_prob(hidden, weight, target, batch_invariant=True, **options)
    return [log_prob, *([others] if isinstance(others, Tensor) else others)]


def call(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = leaf(ROWS, WIDTH, device=device, dtype=dtype), leaf(CLASSES, WIDTH, device=device, dtype=dtype)
    target = torch.randint(CLASSES, (ROWS,), device=device)
    target[::5] = -100
    return hidden.detach(), weight.detach(), target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_row_has_the_same_bits_in_every_batch(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight, target = call(device, dtype)
    options = {**options, "bias": leaf(CLASSES, device=device, dtype=dtype).detach()}
    whole = results(hidden, weight, target, **options)
    batches = [torch.arange(start, start + n) for n in (1, 2, 7) for start in (0, 57)]
    batches += [torch.randperm(ROWS), torch.tensor([3] * 100), torch.arange(ROWS).repeat(2)[:101]]
    for number, rows in enumerate(batch.to(device) for batch in batches):
        # Memory that begins elsewhere, and columns that are not adjacent: of each number of rows up to all.
        shifted = torch.empty(len(rows) * WIDTH + 1, dtype=dtype, device=device)[1:].view(-1, WIDTH)
        layouts = [hidden[rows], shifted.copy_(hidden[rows]), hidden[rows].t().contiguous().t()]
        for values in layouts if number in LAID_OUT else layouts[:1]:
            part = results(values, weight, target[rows], **options)
            assert all(torch.equal(each, every[rows]) for each, every in zip(part, whole, strict=True))


def test_other_rows_may_be_infinite_or_nan(device: torch.device) -> None:
    hidden, weight, target = call(device, torch.float32)
    before = linear_log_prob(hidden, weight, target, batch_invariant=True)
    hidden[1::2] = torch.tensor([torch.inf, torch.nan] * (ROWS // 4), device=device)[:, None]
    after = linear_log_prob(hidden, weight, target, batch_invariant=True)
    assert torch.equal(before[::2], after[::2])


def test_a_policy_has_the_ratio_of_exactly_1_to_itself_without_gradients(device: torch.device) -> None:
    hidden, weight, target = call(device, torch.float32)
    with torch.no_grad():
        old = torch.cat([linear_log_prob(hidden[i : i + 9], weight, target[i : i + 9], batch_invariant=True)
                         for i in range(0, ROWS, 9)])  # fmt: skip
    for trained in ((hidden,), (weight,), (hidden, weight)):
        for tensor in trained:
            tensor.requires_grad_()
        for options in ({}, {"budget": 40_000}, {"pack": False}):
            new = linear_log_prob(hidden, weight, target, batch_invariant=True, **options)
            assert torch.equal((new - old).exp(), torch.ones_like(old))
        hidden, weight = hidden.detach(), weight.detach()


def test_a_frozen_head_with_logits_that_do_not_fit_has_the_usual_gradient(device: torch.device) -> None:
    hidden, weight, target = call(device, torch.float32)
    head = (hidden.requires_grad_(), weight, target)
    sums = [linear_log_prob(*head, batch_invariant=invariant, budget=40_000).sum() for invariant in (False, True)]
    torch.testing.assert_close(*(torch.autograd.grad(total, hidden)[0] for total in sums), rtol=1e-4, atol=1e-5)
