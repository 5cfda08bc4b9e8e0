# SPDX-License-Identifier: Apache-2.0
"""Logits that other heads got wrong: a large offset that all have in common, only negative ones, and a softcap far below
its bound."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import cross_entropy, kl_div, linear_cross_entropy, linear_divergence, linear_log_prob

pytestmark = pytest.mark.slow

ROWS, WIDTH, CLASSES = 12, 16, 50
Head = Callable[..., Tensor]


def fixed(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(-8, 9, shape, device=device).float() / 8


def divergence(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, **options: Any) -> Tensor:
    theirs = fixed(CLASSES, WIDTH, device=hidden.device)
    if "softcap" in options:
        options["teacher_softcap"] = options["softcap"]
    return linear_divergence(hidden, weight, hidden.detach().flip(0), theirs, bias=bias, teacher_bias=-bias, **options)


HEADS: dict[str, Head] = {
    "linear_cross_entropy": partial(linear_cross_entropy, label_smoothing=0.1),
    "linear_log_prob": lambda *head, **options: linear_log_prob(*head, **options).mean(),
    "linear_log_prob_entropy": lambda *head, **options: torch.stack(
        linear_log_prob(*head, return_entropy=True, **options)
    ).mean(),
    **{
        f"linear_divergence_{kind}": partial(divergence, kind=kind)
        for kind in ("forward_kl", "reverse_kl", "jsd", "total_variation")
    },
    "cross_entropy": lambda hidden, weight, target, bias, softcap=None, budget=None: cross_entropy(
        hidden @ weight.t() + bias, target, softcap=softcap
    ),
    "kl_div": lambda hidden, weight, target, bias, budget=None: kl_div(
        hidden @ weight.t() + bias, torch.arange(CLASSES, device=hidden.device) / 8 + bias.expand(ROWS, -1)
    ),
}
EACH = pytest.mark.parametrize("name", HEADS)
# All logits at once, and four rows at a time.
BUDGET = pytest.mark.parametrize("budget", [None, 4 * CLASSES * 4], ids=["whole", "in_parts"])


def results(name: str, offset: float, device: torch.device, **options: Any) -> list[Tensor]:
    """Loss and gradients. Hidden states and weights are eighths, so that no logit is rounded."""
    torch.manual_seed(0)
    hidden, weight = (fixed(rows, WIDTH, device=device).requires_grad_() for rows in (ROWS, CLASSES))
    target = torch.randint(CLASSES, (ROWS,), device=device)
    bias = torch.full((CLASSES,), offset, device=device)
    loss = HEADS[name](hidden, weight, target, bias=bias, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


@EACH
@BUDGET
@pytest.mark.parametrize("offset", [2.0**14, -(2.0**14), -256.0], ids=["high", "low", "all_negative"])
def test_what_all_logits_have_in_common_changes_neither_a_loss_nor_its_gradients(
    name: str, budget: int | None, offset: float, device: torch.device
) -> None:
    plain, shifted = (results(name, value, device, budget=budget) for value in (0.0, offset))
    for ours, expected in zip(shifted, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", [name for name in HEADS if name != "kl_div"])
@BUDGET
@pytest.mark.parametrize("offset", [-1e4, -1e30, 1e4], ids=["negative", "huge", "positive"])
def test_logits_far_beyond_a_softcap_are_at_its_bound(
    name: str, budget: int | None, offset: float, device: torch.device
) -> None:
    """All classes are then equally likely, and no gradient is left."""
    loss, *gradients = results(name, offset, device, softcap=30.0, budget=budget)
    uniform = torch.log(torch.tensor(float(CLASSES)))
    expected = {"linear_log_prob": -uniform, "linear_log_prob_entropy": 0.0 * uniform}
    wanted = 0.0 * uniform if name.startswith("linear_divergence") else expected.get(name, uniform)
    torch.testing.assert_close(loss.cpu(), wanted, rtol=1e-5, atol=1e-6)
    assert [bool(g.any()) for g in gradients] == [False, False]
