# SPDX-License-Identifier: Apache-2.0
"""The metrics of each loss: their formulas, and that they are detached."""

from __future__ import annotations

import pytest
import torch

from liger_core.losses import Clip, OffPolicy, Penalty, cpo, dpo, grpo, kto, orpo, simpo
from losses.cases import CASES, Case
from losses.test_papers import random_batch


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_metrics_are_detached_numbers(case: Case) -> None:
    batch = random_batch()
    policy = batch.policy.requires_grad_()
    loss, metrics = case.ours((policy, batch.entropy) if case.entropy else policy, batch, mask=batch.mask)
    assert loss.requires_grad
    assert {(m.requires_grad, m.dim()) for m in metrics if m is not None} == {(False, 0)}


def test_rewards_of_dpo_are_scaled_log_ratios() -> None:
    batch = random_batch()
    _, metrics = dpo(batch.policy, batch.reference, mask=batch.mask, beta=0.3)
    ratio = torch.stack(
        [(own - other).sum() for own, other in zip(batch.rows(batch.policy), batch.rows(batch.reference), strict=True)]
    )
    sums = torch.stack([own.sum() for own in batch.rows(batch.policy)])
    chosen, rejected = 0.3 * ratio.view(2, 2)
    assert list(map(float, metrics[:4])) == pytest.approx(
        [
            float(chosen.mean()),
            float(rejected.mean()),
            float((chosen - rejected).mean()),
            float((chosen > rejected).double().mean()),
        ]
    )
    assert list(map(float, metrics[4:6])) == pytest.approx([float(sums[:2].mean()), float(sums[2:].mean())])


def test_rewards_without_a_reference_are_scaled_log_probabilities() -> None:
    batch = random_batch()
    answers = batch.rows(batch.policy)
    sums, means = (torch.stack([f(own) for own in answers[:2]]).mean() for f in (torch.sum, torch.mean))
    odds = torch.stack([own.mean() - torch.log(1 - own.mean().exp()) for own in answers[:2]]).mean()
    given = {"mask": batch.mask}
    assert float(cpo(batch.policy, beta=0.2, **given)[1].chosen_reward) == pytest.approx(0.2 * float(sums))
    assert float(simpo(batch.policy, beta=2.0, **given)[1].chosen_reward) == pytest.approx(2.0 * float(means))
    assert float(orpo(batch.policy, odds_weight=0.3, **given)[1].chosen_reward) == pytest.approx(0.3 * float(odds))


def test_kto_reports_the_rewards_of_both_kinds_and_how_many_there_are() -> None:
    batch = random_batch()
    _, metrics = kto(
        batch.policy,
        batch.reference,
        torch.tensor([True, False, False, False]),
        mask=batch.mask,
        beta=0.5,
        baseline=0.2,
    )
    rewards = [
        0.5 * float((own - other).sum())
        for own, other in zip(batch.rows(batch.policy), batch.rows(batch.reference), strict=True)
    ]
    expected = [rewards[0], sum(rewards[1:]) / 3, rewards[0] - sum(rewards[1:]) / 3, 1, 3, 0.2]
    assert list(map(float, metrics)) == pytest.approx(expected)


def test_kto_reports_zero_for_a_kind_that_is_missing() -> None:
    batch = random_batch()
    _, metrics = kto(batch.policy, batch.reference, torch.ones(4, dtype=torch.bool), mask=batch.mask)
    assert (float(metrics.undesirable_reward), int(metrics.undesirable)) == (0.0, 0)


def test_a_policy_loss_reports_ratios_bounds_and_divergences() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    log_ratio = torch.tensor([[0.5, -0.5, 0.05, -0.6]], dtype=torch.float64)
    old, advantages = (
        torch.full((1, 4), -1.0, dtype=torch.float64),
        torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float64),
    )
    policy, reference, entropy = old + log_ratio, old + 0.2, torch.tensor([[0.1, 0.2, 0.3, 0.6]], dtype=torch.float64)
    off_policy = OffPolicy(old - 0.1, high=2.0, threshold=10.0)
    _, metrics = grpo(
        (policy, entropy),
        old,
        advantages,
        mask=mask,
        variant=Clip(0.2, 0.2),
        penalty=Penalty(reference),
        off_policy=off_policy,
    )
    d = reference - policy
    expected = {
        "ratio": float(log_ratio.exp().mean()),
        "drift": float((log_ratio.exp() - log_ratio - 1).mean()),
        "clipped_low": 0.25,
        "clipped_high": 0.25,
        "kl": float((d.exp() - d - 1).mean()),
        "entropy": 0.3,
        "weight": float(torch.tensor(0.1).exp()),
        "on_policy": 1.0,
    }
    assert {name: float(getattr(metrics, name)) for name in expected} == pytest.approx(expected)


def test_the_surrogate_is_reported_without_the_penalties() -> None:
    batch = random_batch()
    plain, _ = grpo(batch.policy, batch.old, batch.advantage, mask=batch.mask)
    loss, metrics = grpo(
        batch.policy, batch.old, batch.advantage, mask=batch.mask, penalty=Penalty(batch.reference, beta=1.0)
    )
    torch.testing.assert_close(metrics.surrogate, plain)
    assert float(loss) > float(plain)


def test_what_is_not_computed_is_not_reported() -> None:
    batch = random_batch()
    _, metrics = grpo(batch.policy, batch.old, batch.advantage, mask=batch.mask)
    assert (metrics.kl, metrics.entropy, metrics.weight, metrics.on_policy) == (None,) * 4


def test_the_share_of_kept_tokens_counts_those_of_dropped_sequences() -> None:
    policy, mask = torch.full((2, 2), -3.0), torch.tensor([[True, True], [True, False]])
    sampling, advantages = torch.tensor([[-3.0, -3.0], [-1.0, -1.0]]), torch.tensor([-1.0, -1.0])
    _, metrics = grpo(policy, None, advantages, mask=mask, off_policy=OffPolicy(sampling, weight=None, threshold=1.0))
    assert float(metrics.on_policy) == pytest.approx(2 / 3)
