# SPDX-License-Identifier: Apache-2.0
"""Impossible and certain tokens: where a formula has a finite limit, so have the loss and its gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from liger_core.losses import Clip, dpo, grpo, orpo, pairs, ppo
from losses import papers
from losses.cases import CASES, Case
from losses.test_papers import from_tensors, in_dtype, random_batch

# Their loss of an impossible rejected answer is infinite: they pull it back to a finite reward, reward it for being far
# away, or keep a weight on its logarithm.
UNBOUNDED = {
    "dpo_ipo", "dpo_sppo", "grpo_cispo_bounds", "dpo_robust", "dpo_label_smoothing", "cpo_label_smoothing",
    "simpo_constants",
}  # fmt: skip
# The divergence of an impossible token is infinite.
DIVERGING = {
    f"grpo_{estimator}{kind}" for estimator in ("k1", "k2") for kind in ("", "_unbiased", "_unbiased_sequence")
}


def of_an_impossible_token(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    batch = in_dtype(random_batch(), torch.float32)
    # A rejected answer, which is also an undesirable one with a negative advantage.
    batch.policy[2, 3] = -torch.inf
    return from_tensors(case, batch)


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in UNBOUNDED | DIVERGING], ids=lambda case: case.name)
def test_an_impossible_token_leaves_the_loss_and_its_gradients_finite(case: Case) -> None:
    loss, gradients = of_an_impossible_token(case)
    assert bool(loss.isfinite())
    assert all(bool(g.isfinite().all()) for g in gradients.values())


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in UNBOUNDED - {"dpo_ipo", "dpo_sppo"}], ids=lambda case: case.name
)
def test_an_infinite_loss_still_has_finite_gradients(case: Case) -> None:
    loss, gradients = of_an_impossible_token(case)
    assert bool(loss.isinf())
    assert all(bool(g.isfinite().all()) for g in gradients.values())


@pytest.mark.parametrize("difference", [-100.0, 100.0])
@pytest.mark.parametrize("variant", pairs.VARIANTS)
def test_rewards_a_hundred_nats_apart_are_those_of_the_paper(variant: str, difference: float) -> None:
    def result(loss: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        answers = torch.tensor([0.6 * difference, -0.4 * difference], dtype=dtype, requires_grad=True)
        smoothing = (0.1,) if variant in pairs.SMOOTHED or dtype == torch.float64 else ()
        value = loss(*answers, 1.0, *smoothing)
        return [value.detach().double(), torch.autograd.grad(value, answers)[0].double()]

    ours, paper = result(pairs.VARIANTS[variant], torch.float32), result(papers.PAIRS[variant], torch.float64)
    torch.testing.assert_close(ours, paper, rtol=1e-5, atol=1e-7)


def test_certain_answers_have_finite_odds() -> None:
    policy = torch.zeros(4, 3, requires_grad=True)
    loss, _ = orpo(policy, mask=torch.ones(4, 3, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss, policy)
    assert bool(loss.isfinite())
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("distance", [100.0, torch.inf])
def test_a_clipped_ratio_has_no_gradient_however_far_it_is(sign: float, distance: float) -> None:
    policy, old = torch.full((1, 1), -2.0, requires_grad=True), torch.full((1, 1), -2.0 - sign * distance)
    loss, metrics = ppo(policy, old, torch.full((1, 1), sign), mask=torch.ones(1, 1, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(loss.detach(), torch.tensor(-1.2 if sign > 0 else 0.8))
    assert float(gradient) == 0.0
    assert float(metrics.clipped_high if sign > 0 else metrics.clipped_low) == 1.0


@pytest.mark.parametrize(("options", "expected"), [({}, 5.54e34), ({"delta": 3.0}, 3.0)], ids=["without", "with"])
def test_a_ratio_that_float32_cannot_hold_counts_as_e_to_the_80th_or_delta(
    options: dict[str, float], expected: float
) -> None:
    policy = torch.full((1, 1), -1.0, requires_grad=True)
    old, mask, advantage = policy.detach() - 100.0, torch.ones(1, 1).bool(), torch.tensor([-1.0])
    loss, _ = grpo(policy, old, advantage, mask=mask, variant=Clip(**options))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3 if not options else 1e-6)
    assert float(torch.autograd.grad(loss, policy)[0]) == 0.0


def test_small_log_ratios_keep_their_digits_in_k3() -> None:
    """e^d − d − 1 in float32 is 0 or a multiple of 6e-8 here; d²/2 is 5e-11."""
    d = torch.full((1, 1), 1e-5)
    _, metrics = grpo(torch.zeros(1, 1), -d, torch.zeros(1), mask=torch.ones(1, 1).bool())
    assert float(metrics.drift) == pytest.approx(5e-11, rel=0.01)


def test_log_ratios_of_long_answers_keep_their_digits() -> None:
    """Sums of 100 000 tokens are near 150 000, where float32 has steps of 1/64."""
    policy = -3.0 * torch.rand(2, 100_000)
    reference = policy + 1e-5 * torch.randn(2, 100_000)
    counted = torch.ones(2, 100_000, dtype=torch.bool)
    exact = -torch.nn.functional.logsigmoid(
        0.1 * torch.tensor([1.0, -1.0]).double() @ (policy.double() - reference.double()).sum(-1)
    )
    for given in (reference, reference.double().sum(-1)):
        loss, _ = dpo(policy, given, mask=counted)
        assert float((loss.double() - exact).abs()) < (1e-6 if given is reference else 2e-3)


def test_a_token_that_the_sampler_could_not_score_is_not_corrected() -> None:
    from liger_core.losses import OffPolicy

    batch = in_dtype(random_batch(), torch.float32)
    known: Tensor = torch.where(batch.mask, batch.old, 0.0)
    sampling = known.clone()
    sampling[0, 3] = torch.nan
    losses = [
        grpo(batch.policy, batch.old, batch.advantage, mask=batch.mask, off_policy=OffPolicy(s, threshold=0.5))[0]
        for s in (sampling, known)
    ]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
