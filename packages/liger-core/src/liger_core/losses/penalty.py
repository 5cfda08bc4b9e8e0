# SPDX-License-Identifier: Apache-2.0
"""The terms that a policy loss adds to its surrogate: divergence from a reference policy, and entropy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_core import checks
from liger_core.losses.head import LogProbs
from liger_core.losses.numerics import bounded, ratio_of
from liger_core.losses.tokens import LEVELS, Tokens, mean_over_tokens

ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, eq=False)
class Penalty:
    """The term β · KL(π ‖ π_ref) − entropy · H(π), estimated for every token and averaged like the surrogate.

        d = log π_ref − log π:   k1 = −d,   k2 = d²/2,   k3 = eᵈ − d − 1

    reference  (B, T) log-probabilities of the frozen model, a Head, or None for no divergence. No gradient
    beta       β ≥ 0; 0.04 in arXiv:2402.03300, which takes k3
    estimator  k1 and k3 are unbiased values, k2 and k3 are never negative. As a loss, k1 has the gradient of log π,
               whatever the reference. For k3, d counts as 80 at most
    unbiased   multiply by π/π_old, which makes the gradient of k3 that of the divergence also away from π_old
               (arXiv:2512.02556)
    level      of this ratio: a "token", or a "sequence", where it is the geometric mean over its tokens
    entropy    weight of the entropy bonus, in nats (arXiv:1707.06347); the policy must then bring its entropy
    """

    reference: LogProbs | None = None
    beta: float = 0.04
    estimator: str = "k3"
    unbiased: bool = False
    level: str = "token"
    entropy: float = 0.0

    def __post_init__(self) -> None:
        name = "losses.Penalty"
        checks.not_negative(name, "beta", self.beta)
        checks.choice(name, "estimator", self.estimator, ESTIMATORS)
        checks.choice(name, "level", self.level, LEVELS)
        checks.finite(name, "entropy", self.entropy)

    def divergence(self, tokens: Tokens, reference: Tensor, log_ratio: Tensor) -> Tensor:
        """Return the estimate of KL(π ‖ π_ref) at every token."""
        kl = divergence(self.estimator, reference - tokens.log_prob)
        if not self.unbiased:
            return kl
        return ratio_of(log_ratio if self.level == "token" else mean_over_tokens(log_ratio, tokens)[:, None]) * kl


def divergence(estimator: str, d: Tensor) -> Tensor:
    """Return the estimate of KL(p ‖ q) at samples of p, from d = log q − log p."""
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    d = bounded(d)
    # expm1, because e^d − 1 − d has no digits left where d is small.
    return torch.expm1(d) - d
