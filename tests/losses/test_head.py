# SPDX-License-Identifier: Apache-2.0
"""A Head instead of log-probabilities: what it computes, and what it leaves out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import linear_log_prob
from liger_core.losses import Head, OffPolicy, Penalty, dpo, grpo, kto, kto_baseline
from liger_core.losses import head as module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of linear_log_prob, with its target and whether gradients were recorded."""
    found: list[dict[str, Any]] = []

    def spy(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        found.append({"target": target, "recorded": torch.is_grad_enabled(), **options})
        return linear_log_prob(hidden, weight, target, **options)

    monkeypatch.setattr(module, "linear_log_prob", spy)
    return found


def head(ignore_index: int = -100, **options: Any) -> Head:
    target = torch.randint(20, (4, 5))
    target[:, 0] = ignore_index
    target[1, 3:] = ignore_index
    if ignore_index != -100:
        options["ignore_index"] = ignore_index
    return Head(torch.randn(4, 5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True), target, **options)


@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_the_tokens_that_count_are_those_with_a_target(ignore_index: int) -> None:
    policy = head(ignore_index)
    counted = policy.target != ignore_index
    reference = torch.zeros(4, 5)
    loss, _ = dpo(policy, reference)
    log_prob, _ = policy.log_prob()
    torch.testing.assert_close(loss, dpo(log_prob, reference, mask=counted)[0], rtol=0, atol=0)


def test_a_mask_leaves_out_more_tokens_and_they_cost_nothing(calls: list[dict[str, Any]]) -> None:
    policy, mask = head(), torch.ones(4, 5, dtype=torch.int64)
    mask[:, 1] = 0
    dpo(policy, torch.zeros(4, 5), mask=mask)
    assert torch.equal(calls[0]["target"] == -100, (policy.target == -100) | (mask == 0))


def test_a_reference_head_is_computed_without_gradients(calls: list[dict[str, Any]]) -> None:
    policy, reference = head(), head()
    reference.target = policy.target
    loss, _ = dpo(policy, reference)
    assert [call["recorded"] for call in calls] == [True, False]
    assert torch.autograd.grad(loss, [reference.hidden, reference.weight], allow_unused=True) == (None, None)


def test_a_reference_may_be_a_head_or_cached_for_tokens_or_cached_for_answers() -> None:
    policy, reference = head(), head()
    reference.target = policy.target
    log_prob, _ = reference.log_prob()
    first, *others = (
        dpo(policy, given)[0] for given in (reference, log_prob, log_prob.sum(-1), log_prob.sum(-1).double())
    )
    for other in others:
        torch.testing.assert_close(first, other)
    first, second = (
        kto(policy, given, torch.tensor([True, False, True, False]))[0] for given in (reference, log_prob.sum(-1))
    )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_the_entropy_is_computed_only_for_a_bonus(weight: float, calls: list[dict[str, Any]]) -> None:
    _, metrics = grpo(head(), None, torch.ones(4), penalty=Penalty(entropy=weight))
    assert calls[0]["return_entropy"] == (weight > 0.0)
    assert (metrics.entropy is None) == (weight == 0.0)


def test_a_head_that_returns_its_entropy_reports_it() -> None:
    policy = head(return_entropy=True)
    _, metrics = grpo(policy, None, torch.ones(4))
    _, entropy = policy.log_prob()
    torch.testing.assert_close(metrics.entropy, entropy.sum() / policy.mask.sum())


def test_the_options_are_those_of_linear_log_prob(calls: list[dict[str, Any]]) -> None:
    options = {"bias": torch.randn(20), "temperature": 0.7, "softcap": 5.0, "logit_scale": 0.5, "budget": 4096}
    dpo(head(**options), torch.zeros(4, 5))
    assert {name: calls[0][name] for name in options} == options


def test_without_old_log_probabilities_the_ratio_is_one() -> None:
    policy = head()
    loss, metrics = grpo(policy, None, torch.tensor([1.0, -2.0, 0.5, 3.0]))
    assert float(metrics.ratio) == pytest.approx(1.0)
    assert float(loss.detach()) == pytest.approx(-2.5 / 4)
    assert bool(torch.autograd.grad(loss, policy.weight)[0].any())


def test_old_log_probabilities_of_a_head_get_no_gradient() -> None:
    policy, old = head(), head()
    old.target = policy.target
    loss, _ = grpo(policy, old, torch.ones(4))
    assert torch.autograd.grad(loss, old.weight, allow_unused=True) == (None,)


def test_nothing_but_the_policy_gets_a_gradient() -> None:
    policy, mask = -torch.rand(4, 5).requires_grad_(), torch.ones(4, 5, dtype=torch.bool)
    old, reference, sampling, advantages = (torch.randn(4, 5, requires_grad=True) for _ in range(4))
    loss, _ = grpo(
        policy, old, advantages, mask=mask, penalty=Penalty(reference), off_policy=OffPolicy(sampling, threshold=1.0)
    )
    assert torch.autograd.grad(loss, [old, reference, sampling, advantages], allow_unused=True) == (None,) * 4


def test_the_baseline_of_kto_is_a_mean_without_a_gradient() -> None:
    policy, reference = head(), torch.randn(4, 5)
    baseline = kto_baseline(policy, reference)
    log_prob, _ = policy.log_prob()
    torch.testing.assert_close(baseline, (log_prob - reference * policy.mask).sum(-1).mean().detach())
    assert not baseline.requires_grad


def test_the_loss_has_the_dtype_of_the_policy_whatever_the_reference_has() -> None:
    policy = head()
    for shape, dtype in (((4, 5), torch.float64), ((4,), torch.float64), ((4, 5), torch.bfloat16)):
        assert dpo(policy, torch.zeros(shape, dtype=dtype))[0].dtype == torch.float32
