# SPDX-License-Identifier: Apache-2.0
"""Every loss with every variant and option: how it is called, and what its paper says about the same batch."""

from __future__ import annotations

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
        names = {
            "policy": self.policy,
            "old": self.old,
            "reference": self.reference,
            "sampling": self.sampling,
            "entropy": self.entropy,
        }
        advantages = self.advantages if per_token else self.advantage
        return papers.Batch(**{name: self.rows(x) for name, x in names.items()}, advantages=self.rows(advantages))


@dataclass(frozen=True)
class Case:
    """ours(policy, given, **mask) → (loss, metrics); paper(given) → loss."""

    name: str
    ours: Callable[..., tuple[Tensor, Any]]
    paper: Callable[[Given], Tensor]
    entropy: bool = False


# The likelihood of whole answers.
SUMS = Likelihood(averaging=Averaging("constant", length=1))


def preference_cases() -> list[Case]:
    def pair(variant: str, name: str = "", eps: float = 0.0, beta: float = 0.1, **constants: float) -> Case:
        chosen: Any = partial(getattr(pairs, variant.replace("-", "_")), **constants) if constants else variant
        options = {"variant": chosen, "beta": beta, "label_smoothing": eps}
        return Case(
            f"dpo_{name or variant}",
            lambda policy, given, **mask: dpo(policy, given.reference, **options, **mask),
            lambda given: papers.dpo(
                given.rows(given.policy), given.rows(given.reference), variant, beta, eps, **constants
            ),
        )

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
        bco_with_shift(),
        pair("apo-zero"),
        pair("apo-down"),
        pair("discopop", beta=0.05),
        pair("discopop", "discopop_tau", beta=0.05, tau=0.3),
        Case(
            "dpo_length_normalized",
            lambda policy, given, **mask: dpo(policy, given.reference, beta=2.0, length_normalized=True, **mask),
            lambda given: papers.normalized_dpo(given.rows(given.policy), given.rows(given.reference), 2.0),
        ),
        Case(
            "dpo_likelihood",
            lambda policy, given, **mask: dpo(policy, given.reference, likelihood=Likelihood(0.5), **mask),
            lambda given: papers.dpo_with_likelihood(given.rows(given.policy), given.rows(given.reference), 0.1, 0.5),
        ),
        Case(
            "cpo",
            lambda policy, given, **mask: cpo(policy, likelihood=SUMS, **mask),
            lambda given: papers.cpo(given.rows(given.policy)),
        ),
        Case(
            "cpo_hinge",
            lambda policy, given, **mask: cpo(policy, variant="hinge", likelihood=SUMS, **mask),
            lambda given: papers.cpo(given.rows(given.policy), variant="hinge"),
        ),
        Case(
            "cpo_label_smoothing",
            lambda policy, given, **mask: cpo(policy, label_smoothing=0.1, likelihood=SUMS, **mask),
            lambda given: papers.cpo(given.rows(given.policy), eps=0.1),
        ),
        Case(
            "simpo",
            lambda policy, given, **mask: simpo(policy, **mask),
            lambda given: papers.simpo(given.rows(given.policy), 2.0, 1.0),
        ),
        Case(
            "simpo_constants",
            lambda policy, given, **mask: simpo(policy, beta=2.5, gamma=0.3, label_smoothing=0.1, **mask),
            lambda given: papers.simpo(given.rows(given.policy), 2.5, 0.3, 0.1),
        ),
        Case(
            "orpo",
            lambda policy, given, **mask: orpo(policy, **mask),
            lambda given: papers.orpo(given.rows(given.policy), 0.1),
        ),
        *likelihood_cases(),
        *(
            kto_case(*constants)
            for constants in (
                ("kto", 0.0, 0.1, (1.0, 1.0)),
                ("kto_weights", 0.4, 0.5, (1.0, 1.33)),
                ("kto_baseline_below_zero", -0.3, 0.5, (1.0, 1.0)),
                ("kto_length_normalized", 0.1, 2.0, (1.0, 1.33), True),
            )
        ),
    ]


def likelihood_cases() -> list[Case]:
    """The likelihood term: over tokens, of any loss, of other tokens than the answers, and none."""
    tokens = Likelihood(0.5, Averaging("token"))

    def per_token(given: Given) -> Tensor:
        return 0.5 * papers.per_token([-own for own in given.rows(given.policy)[:2]])

    def other(given: Given) -> Likelihood:
        return Likelihood(0.7, Averaging("token"), policy=given.old[:2], mask=given.mask[:2])

    return [
        Case(
            "dpo_likelihood_of_tokens",
            lambda policy, given, **mask: dpo(policy, given.reference, likelihood=tokens, **mask),
            lambda given: papers.dpo(given.rows(given.policy), given.rows(given.reference)) + per_token(given),
        ),
        Case(
            "simpo_likelihood_of_tokens",
            lambda policy, given, **mask: simpo(policy, likelihood=tokens, **mask),
            lambda given: papers.simpo(given.rows(given.policy), 2.0, 1.0) + per_token(given),
        ),
        Case(
            "orpo_without_likelihood",
            lambda policy, given, **mask: orpo(policy, likelihood=Likelihood(0.0), **mask),
            lambda given: papers.orpo(given.rows(given.policy), 0.1, 0.0),
        ),
        Case(
            "orpo_likelihood_of_other_tokens",
            lambda policy, given, **mask: orpo(policy, likelihood=other(given), **mask),
            lambda given: (
                papers.orpo(given.rows(given.policy), 0.1, 0.0)
                + 0.7 * papers.per_token([-row for row in given.rows(given.old)[:2]])
            ),
        ),
    ]


def bco_with_shift() -> Case:
    return Case(
        "dpo_bco_shift",
        lambda policy, given, **mask: dpo(policy, given.reference, variant=partial(pairs.bco, shift=0.7), **mask),
        lambda given: papers.dpo(given.rows(given.policy), given.rows(given.reference), "bco", 0.1, 0.0, delta=0.7),
    )


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
        return Case(
            f"grpo_{name}",
            lambda policy, given, **mask: grpo(
                policy, given.old, given.advantages if per_token else given.advantage, **options, **mask
            ),
            lambda given: paper(given.batch(per_token)),
        )

    def gains(batch: papers.Batch, low: float = 0.2, high: float = 0.2, delta: float = torch.inf) -> list[Tensor]:
        return papers.minus(papers.token_gains(batch, low, high, delta))

    return [
        named("grpo", lambda b: papers.per_sequence(gains(b))),
        named("token_advantages", lambda b: papers.per_sequence(gains(b)), per_token=True),
        named(
            "dr-grpo",
            lambda b: papers.constant_length(gains(b), 17),
            variant="dr-grpo",
            averaging=Averaging("constant", length=17),
        ),
        named("dapo", lambda b: papers.per_token(gains(b, high=0.28)), variant="dapo"),
        named(
            "dapo_groups",
            lambda b: papers.per_group(gains(b, high=0.28), 2),
            variant="dapo",
            averaging=Averaging("group", group_size=2),
        ),
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
        entropy_bonus(),
        *(corrected(mode, level) for mode in ("truncate", "mask") for level in ("token", "sequence")),
        sequences_masked(0.01),
        sequences_masked(0.1),
        Case(
            "ppo",
            lambda policy, given, **mask: ppo(policy, given.old, given.advantages, **mask),
            lambda given: papers.per_token(gains(given.batch(per_token=True))),
        ),
        Case(
            "ppo_dual_clip",
            lambda policy, given, **mask: ppo(
                policy, given.old, given.advantages, clip=Clip(0.2, 0.2, delta=3.0), **mask
            ),
            lambda given: papers.per_token(gains(given.batch(per_token=True), delta=3.0)),
        ),
    ]


def penalized(estimator: str, level: str) -> Case:
    def ours(policy: Any, given: Given, **mask: Tensor) -> Any:
        penalty = Penalty(given.reference, beta=0.3, estimator=estimator, unbiased=bool(level), level=level or "token")
        return grpo(policy, given.old, given.advantage, penalty=penalty, **mask)

    def paper(given: Given) -> Tensor:
        batch = given.batch()
        gains, terms = papers.token_gains(batch, 0.2, 0.2), papers.penalties(batch, estimator, 0.3, level)
        return papers.per_sequence([-gain + term for gain, term in zip(gains, terms, strict=True)])

    suffix = {"": "", "token": "_unbiased", "sequence": "_unbiased_sequence"}[level]
    return Case(f"grpo_{estimator}{suffix}", ours, paper)


def entropy_bonus() -> Case:
    def ours(policy: Any, given: Given, **mask: Tensor) -> Any:
        return grpo(
            policy, given.old, given.advantage, penalty=Penalty(given.reference, beta=0.04, entropy=0.5), **mask
        )

    def paper(given: Given) -> Tensor:
        batch = given.batch()
        gains, terms = papers.token_gains(batch, 0.2, 0.2), papers.penalties(batch, "k3", 0.04, entropy=0.5)
        return papers.per_sequence([-gain + term for gain, term in zip(gains, terms, strict=True)])

    return Case("grpo_entropy", ours, paper, entropy=True)


def corrected(mode: str, level: str) -> Case:
    def ours(policy: Any, given: Given, **mask: Tensor) -> Any:
        off_policy = OffPolicy(given.sampling, weight=mode, level=level, low=0.5, high=2.0)
        return grpo(policy, given.old, given.advantage, penalty=Penalty(given.reference), off_policy=off_policy, **mask)

    def paper(given: Given) -> Tensor:
        batch = given.batch()
        weights = papers.importance_weights(batch, mode, level, 0.5, 2.0)
        rows = zip(papers.token_gains(batch, 0.2, 0.2), weights, papers.penalties(batch, "k3", 0.04), strict=True)
        return papers.per_sequence([-weight * gain + term for gain, weight, term in rows])

    return Case(f"grpo_{mode}_{level}", ours, paper)


def sequences_masked(threshold: float) -> Case:
    def ours(policy: Any, given: Given, **mask: Tensor) -> Any:
        return grpo(
            policy,
            given.old,
            given.advantage,
            off_policy=OffPolicy(given.sampling, weight=None, threshold=threshold),
            **mask,
        )

    def paper(given: Given) -> Tensor:
        batch = given.batch()
        rows = zip(papers.token_gains(batch, 0.2, 0.2), papers.sequence_mask(batch, threshold), strict=True)
        return papers.per_sequence([-gain * kept for gain, kept in rows])

    return Case(f"grpo_sequence_mask_{threshold}", ours, paper)


CASES = [
    *preference_cases(),
    *policy_cases(),
    Case("dft", lambda policy, given, **mask: dft(policy, **mask), lambda given: papers.dft(given.rows(given.policy))),
]
