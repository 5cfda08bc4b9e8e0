# SPDX-License-Identifier: Apache-2.0
"""Every loss with every variant and option: how it is called, and what its paper says about the same batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_core.losses import (
    Averaging,
    Cispo,
    Clip,
    Likelihood,
    OffPolicy,
    Penalty,
    Sapo,
    Vespo,
    cpo,
    dft,
    dpo,
    grpo,
    kto,
    orpo,
    pairs,
    ppo,
    simpo,
)
from losses import papers


@dataclass
class Given:
    """A padded batch of four answers, and what else a loss may take.

    Every tensor is (4, T), but advantage and desirable (4,).
    """

    policy: Tensor
    mask: Tensor
    reference: Tensor
    old: Tensor
    sampling: Tensor
    entropy: Tensor
    advantage: Tensor
    advantages: Tensor
    desirable: Tensor

    def rows(self, x: Tensor) -> list[Tensor]:
        """The counted tokens of each answer, in float64."""
        each = x[:, None].expand(self.mask.shape) if x.dim() == 1 else x
        return [row[counted].double() for row, counted in zip(each, self.mask, strict=True)]

    def batch(self, per_token: bool = False) -> papers.Batch:
        """For the policy losses."""
        names = ("policy", "old", "reference", "sampling", "entropy")
        advantages = self.advantages if per_token else self.advantage
        return papers.Batch(**{n: self.rows(getattr(self, n)) for n in names}, advantages=self.rows(advantages))


@dataclass(frozen=True)
class Case:
    """ours(policy, given, **mask) → (loss, metrics); paper(given) → loss."""

    name: str
    ours: Callable[..., tuple[Tensor, Any]]
    paper: Callable[[Given], Tensor]
    entropy: bool = False


# The likelihood of whole answers.
SUMS = Likelihood(averaging=Averaging("constant", length=1))


def alone(name: str, loss: Callable[..., Any], paper: Callable[..., Tensor], **options: Any) -> Case:
    """A loss of the policy only."""
    return Case(
        name,
        lambda policy, given, **mask: loss(policy, **options, **mask),
        lambda given: paper(given.rows(given.policy)),
    )


def beside(name: str, paper: Callable[..., Tensor], **options: Any) -> Case:
    """The loss of DPO, with a reference."""
    return Case(
        name,
        lambda policy, given, **mask: dpo(policy, given.reference, **options, **mask),
        lambda given: paper(given.rows(given.policy), given.rows(given.reference)),
    )


def preference_cases() -> list[Case]:
    def pair(variant: str, name: str = "", eps: float = 0.0, beta: float = 0.1, **constants: float) -> Case:
        chosen: Any = partial(getattr(pairs, variant.replace("-", "_")), **constants) if constants else variant
        paper = partial(papers.dpo, variant=variant, beta=beta, eps=eps, **constants)
        return beside(f"dpo_{name or variant}", paper, variant=chosen, beta=beta, label_smoothing=eps)

    normalized, likelihood = (
        partial(papers.normalized_dpo, beta=2.0),
        partial(papers.dpo_with_likelihood, beta=0.1, alpha=0.5),
    )
    shifted = partial(papers.dpo, variant="bco", delta=0.7)
    smooth_cpo, hinge_cpo = partial(papers.cpo, eps=0.1), partial(papers.cpo, variant="hinge")
    constants = {"beta": 2.5, "gamma": 0.3}
    return [
        pair("sigmoid"),
        pair("sigmoid", "label_smoothing", eps=0.2, beta=0.3),
        pair("robust", eps=0.1),
        pair("hinge"),
        pair("ipo"),
        pair("exo", eps=1e-3),
        pair("exo", "exo_much_smoothing", eps=0.3, beta=0.5),
        pair("nca", beta=0.01),
        pair("sppo"),
        pair("bco"),
        beside("dpo_bco_shift", shifted, variant=partial(pairs.bco, shift=0.7)),
        pair("apo-zero"),
        pair("apo-down"),
        pair("discopop", beta=0.05),
        pair("discopop", "discopop_tau", beta=0.05, tau=0.3),
        beside("dpo_length_normalized", normalized, beta=2.0, length_normalized=True),
        beside("dpo_likelihood", likelihood, likelihood=Likelihood(0.5)),
        alone("cpo", cpo, papers.cpo, likelihood=SUMS),
        alone("cpo_hinge", cpo, hinge_cpo, variant="hinge", likelihood=SUMS),
        alone("cpo_label_smoothing", cpo, smooth_cpo, label_smoothing=0.1, likelihood=SUMS),
        alone("simpo", simpo, partial(papers.simpo, beta=2.0, gamma=1.0)),
        alone("simpo_constants", simpo, partial(papers.simpo, eps=0.1, **constants), label_smoothing=0.1, **constants),
        alone("orpo", orpo, partial(papers.orpo, weight=0.1)),
        *likelihood_cases(),
        kto_case("kto", 0.0, 0.1, (1.0, 1.0)),
        kto_case("kto_weights", 0.4, 0.5, (1.0, 1.33)),
        kto_case("kto_baseline_below_zero", -0.3, 0.5, (1.0, 1.0)),
        kto_case("kto_length_normalized", 0.1, 2.0, (1.0, 1.33), True),
    ]


def likelihood_cases() -> list[Case]:
    """The likelihood term: over tokens, of any loss, of other tokens than the answers, and none."""
    tokens = Likelihood(0.5, Averaging("token"))

    def per_token(policy: papers.Answers) -> Tensor:
        return papers.per_token([-own for own in policy[:2]])

    def other(given: Given) -> Likelihood:
        return Likelihood(0.7, Averaging("token"), policy=given.old[:2], mask=given.mask[:2])

    def of_dpo(policy: papers.Answers, reference: papers.Answers) -> Tensor:
        return papers.dpo(policy, reference) + 0.5 * per_token(policy)

    def of_simpo(policy: papers.Answers) -> Tensor:
        return papers.simpo(policy, 2.0, 1.0) + 0.5 * per_token(policy)

    return [
        beside("dpo_likelihood_of_tokens", of_dpo, likelihood=tokens),
        alone("simpo_likelihood_of_tokens", simpo, of_simpo, likelihood=tokens),
        alone(
            "orpo_without_likelihood",
            orpo,
            partial(papers.orpo, weight=0.1, likelihood=0.0),
            likelihood=Likelihood(0.0),
        ),
        Case(
            "orpo_likelihood_of_other_tokens",
            lambda policy, given, **mask: orpo(policy, likelihood=other(given), **mask),
            lambda given: papers.orpo(given.rows(given.policy), 0.1, 0.0) + 0.7 * per_token(given.rows(given.old)),
        ),
    ]


def kto_case(name: str, z: float, beta: float, weights: tuple[float, float], normalized: bool = False) -> Case:
    def ours(policy: Any, given: Given, **mask: Tensor) -> Any:
        options: dict[str, Any] = {"baseline": z, "beta": beta, "weights": weights, "length_normalized": normalized}
        return kto(policy, given.reference, given.desirable, **options, **mask)

    def paper(given: Given) -> Tensor:
        rows = given.rows(given.policy), given.rows(given.reference), given.desirable.tolist()
        return papers.kto(*rows, z, beta, weights, normalized)

    return Case(name, ours, paper)


def policy_cases() -> list[Case]:
    def named(name: str, paper: Callable[[papers.Batch], Tensor], per_token: bool = False, **options: Any) -> Case:
        def ours(policy: Any, given: Given, **mask: Tensor) -> Any:
            return grpo(policy, given.old, given.advantages if per_token else given.advantage, **options, **mask)

        return Case(f"grpo_{name}", ours, lambda given: paper(given.batch(per_token)))

    def gains(batch: papers.Batch, low: float = 0.2, high: float = 0.2, delta: float = torch.inf) -> list[Tensor]:
        return papers.minus(papers.token_gains(batch, low, high, delta))

    def clipped(name: str, delta: float = torch.inf) -> Case:
        options = {"clip": Clip(0.2, 0.2, delta=delta)} if delta < torch.inf else {}
        return Case(
            name,
            lambda policy, given, **mask: ppo(policy, given.old, given.advantages, **options, **mask),
            lambda given: papers.per_token(gains(given.batch(per_token=True), delta=delta)),
        )

    constant, groups = Averaging("constant", length=17), Averaging("group", group_size=2)
    return [
        named("grpo", lambda b: papers.per_sequence(gains(b))),
        named("token_advantages", lambda b: papers.per_sequence(gains(b)), per_token=True),
        named("dr-grpo", lambda b: papers.constant_length(gains(b), 17), variant="dr-grpo", averaging=constant),
        named("dapo", lambda b: papers.per_token(gains(b, high=0.28)), variant="dapo"),
        named("dapo_groups", lambda b: papers.per_group(gains(b, high=0.28), 2), variant="dapo", averaging=groups),
        named("two_sided", lambda b: papers.per_sequence(gains(b, 0.1, 0.3, 4.0)), variant=Clip(0.1, 0.3, delta=4.0)),
        named("gspo", lambda b: papers.gspo(b, 3e-4, 4e-4), variant="gspo"),
        named("gspo_token", lambda b: papers.gspo_token(b, 3e-4, 4e-4), per_token=True, variant="gspo"),
        named("gspo_wide", lambda b: papers.gspo(b, 0.3, 0.3), variant=Clip(0.3, 0.3, level="sequence")),
        named("luspo", lambda b: papers.luspo(b, 2e-3, 2.5e-3), variant="luspo"),
        named("cispo", lambda b: papers.cispo(b, 0.0, 5.0), variant="cispo"),
        named("cispo_bounds", lambda b: papers.cispo(b, 0.9, 1.2), variant=Cispo(0.9, 1.2)),
        named("sapo", lambda b: papers.sapo(b, 1.0, 1.05), variant="sapo"),
        named("sapo_temperatures", lambda b: papers.sapo(b, 0.5, 2.0), variant=Sapo(0.5, 2.0)),
        named("vespo", lambda b: papers.vespo(b, (2.0, 3.0), (3.0, 2.0)), variant="vespo"),
        named("vespo_powers", lambda b: papers.vespo(b, (1.0, 0.5), (1.5, 0.7)), variant=Vespo((1.0, 0.5), (1.5, 0.7))),
        *(penalized(estimator, level) for estimator in ("k1", "k2", "k3") for level in ("", "token", "sequence")),
        entropy_bonus,
        *(corrected(mode, level) for mode in ("truncate", "mask") for level in ("token", "sequence")),
        sequences_masked(0.01),
        sequences_masked(0.1),
        clipped("ppo"),
        clipped("ppo_dual_clip", 3.0),
    ]


def regularized(
    name: str, options: Callable[[Given], Any], paper: Callable[[papers.Batch], list[Tensor]], entropy: bool = False
) -> Case:
    """GRPO with options that have tensors in them; paper(batch) returns the loss of each token."""
    return Case(
        name,
        lambda policy, given, **mask: grpo(policy, given.old, given.advantage, **options(given), **mask),
        lambda given: papers.per_sequence(paper(given.batch())),
        entropy,
    )


def penalties(batch: papers.Batch, *args: Any, **options: Any) -> list[Tensor]:
    gains, terms = papers.token_gains(batch, 0.2, 0.2), papers.penalties(batch, *args, **options)
    return [-gain + term for gain, term in zip(gains, terms, strict=True)]


def penalized(estimator: Any, level: Any) -> Case:
    def options(given: Given) -> dict[str, Any]:
        unbiased = {"unbiased": bool(level), "level": level or "token"}
        return {"penalty": Penalty(given.reference, beta=0.3, estimator=estimator, **unbiased)}

    suffix = {"": "", "token": "_unbiased", "sequence": "_unbiased_sequence"}[level]
    return regularized(f"grpo_{estimator}{suffix}", options, lambda batch: penalties(batch, estimator, 0.3, level))


entropy_bonus = regularized(
    "grpo_entropy",
    lambda given: {"penalty": Penalty(given.reference, beta=0.04, entropy=0.5)},
    lambda batch: penalties(batch, "k3", 0.04, entropy=0.5),
    entropy=True,
)


def corrected(mode: Any, level: Any) -> Case:
    def options(given: Given) -> dict[str, Any]:
        off_policy = OffPolicy(given.sampling, weight=mode, level=level, low=0.5, high=2.0)
        return {"penalty": Penalty(given.reference), "off_policy": off_policy}

    def paper(batch: papers.Batch) -> list[Tensor]:
        weights = papers.importance_weights(batch, mode, level, 0.5, 2.0)
        rows = zip(papers.token_gains(batch, 0.2, 0.2), weights, papers.penalties(batch, "k3", 0.04), strict=True)
        return [-weight * gain + term for gain, weight, term in rows]

    return regularized(f"grpo_{mode}_{level}", options, paper)


def sequences_masked(threshold: float) -> Case:
    def paper(batch: papers.Batch) -> list[Tensor]:
        rows = zip(papers.token_gains(batch, 0.2, 0.2), papers.sequence_mask(batch, threshold), strict=True)
        return [-gain * kept for gain, kept in rows]

    def options(given: Given) -> dict[str, Any]:
        return {"off_policy": OffPolicy(given.sampling, weight=None, threshold=threshold)}

    return regularized(f"grpo_sequence_mask_{threshold}", options, paper)


CASES = [*preference_cases(), *policy_cases(), alone("dft", dft, papers.dft)]
