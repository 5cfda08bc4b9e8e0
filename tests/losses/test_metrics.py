# SPDX-License-Identifier: Apache-2.0
"""The metrics of each loss: their formulas, and that they are detached."""

import pytest
import torch

from liger_core.losses import Clip, OffPolicy, Penalty, grpo, kto, orpo
from losses.test_papers import random_batch


def test_rewards_of_orpo_are_scaled_odds() -> None:
    batch = random_batch()
    answers = batch.rows(batch.policy)
    odds = torch.stack([own.mean() - torch.log(1 - own.mean().exp()) for own in answers[:2]]).mean()
    _, metrics = orpo(batch.policy, odds_weight=0.3, mask=batch.mask)
    assert float(metrics.chosen_reward) == pytest.approx(0.3 * float(odds))


def test_kto_reports_the_rewards_of_both_kinds_and_how_many_there_are() -> None:
    batch = random_batch()
    desirable = torch.tensor([True, False, False, False])
    _, metrics = kto(batch.policy, batch.reference, desirable, mask=batch.mask, beta=0.5, baseline=0.2)
    answers = zip(batch.rows(batch.policy), batch.rows(batch.reference), strict=True)
    rewards = [0.5 * float((own - other).sum()) for own, other in answers]
    expected = [rewards[0], sum(rewards[1:]) / 3, rewards[0] - sum(rewards[1:]) / 3, 1, 3, 0.2]
    assert list(map(float, metrics)) == pytest.approx(expected)


def test_kto_reports_zero_for_a_kind_that_is_missing() -> None:
    batch = random_batch()
    _, metrics = kto(batch.policy, batch.reference, torch.ones(4, dtype=torch.bool), mask=batch.mask)
    assert (float(metrics.undesirable_reward), int(metrics.undesirable)) == (0.0, 0)


def test_a_policy_loss_reports_ratios_bounds_and_divergences() -> None:
    rows = [[0.5, -0.5, 0.05, -0.6]], [[-1.0] * 4], [[1.0, -1.0, 1.0, 1.0]], [[0.1, 0.2, 0.3, 0.6]]
    log_ratio, old, advantages, entropy = (torch.tensor(row, dtype=torch.float64) for row in rows)
    policy, reference = old + log_ratio, old + 0.2
    options = {"penalty": Penalty(reference), "off_policy": OffPolicy(old - 0.1, high=2.0, threshold=10.0)}
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, metrics = grpo((policy, entropy), old, advantages, mask=mask, variant=Clip(0.2, 0.2), **options)
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
    given = batch.policy, batch.old, batch.advantage
    plain, _ = grpo(*given, mask=batch.mask)
    loss, metrics = grpo(*given, mask=batch.mask, penalty=Penalty(batch.reference, beta=1.0))
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
