# SPDX-License-Identifier: Apache-2.0
"""The objectives that policy losses maximize: the surrogates of PPO, GRPO, GSPO, CISPO, SAPO and VESPO.

log_ratio = log π/π_old (B, T), 0 where not counted; A is the advantage, (B, 1) or (B, T). Ratios count as e⁸⁰ at most.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.losses.averaging import SEQUENCE, TOKEN, Averaging
from liger_core.losses.numerics import bounded, ratio_of, weighted
from liger_core.losses.tokens import LEVELS, Tokens, mean_over_tokens


class Gain(NamedTuple):
    """A token's contribution to the objective, and whether the lower or upper bound cuts its ratio."""

    value: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Clip:
    """The surrogate min(r·A, clip(r, 1 − low, 1 + high)·A), where r is cut at delta.

    low, high  ε of PPO, 0.2 (arXiv:1707.06347); DAPO raises high to 0.28 (arXiv:2503.14476)
    delta      δ > 1 + high bounds r where A < 0: two-sided clipping (arXiv:2505.07291), or dual clip (arXiv:1912.09729)
    level      "token": r = π/π_old of the token. "sequence": r is the geometric mean over the tokens of a sequence, and
               its gradient at a token is that of the token's own log-probability: GSPO-token, which is GSPO where A
               belongs to the sequence (arXiv:2507.18071)
    """

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    level: str = "token"

    averaging = SEQUENCE

    def __post_init__(self) -> None:
        name = "losses.Clip"
        checks.fraction(name, "low", self.low)
        checks.not_negative(name, "high", self.high)
        checks.choice(name, "level", self.level, LEVELS)
        if self.delta is not None:
            checks.positive(name, "delta", self.delta)
            if self.delta <= 1.0 + self.high:
                checks.fail(OptionError, name, f"delta must be above 1 + high = {1.0 + self.high}, got {self.delta}")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, tokens: Tokens) -> Gain:
        if self.level == "sequence":
            mean = mean_over_tokens(log_ratio, tokens)[:, None]
            # The value of the mean with the gradient of each token; −inf − (−inf) is NaN.
            log_ratio = mean.detach() + torch.nan_to_num(log_ratio - log_ratio.detach())
        ratio = ratio_of(log_ratio)
        low, high = (ratio < 1.0 - self.low) & (advantage < 0.0), (ratio > 1.0 + self.high) & (advantage > 0.0)
        clipped = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        if self.delta is not None:
            ratio = ratio.clamp(max=self.delta)
        return Gain(torch.minimum(ratio * advantage, clipped * advantage), low, high)


@dataclass(frozen=True)
class Cispo:
    """The surrogate sg(clip(r, low, high))·A·log π: every token keeps its gradient, weighted by the ratio.

    low, high  bounds of the ratio itself, so 1 − ε and 1 + ε of the paper, which has no lower one; 5 is a choice of
               arXiv:2510.13786

    MiniMax 2025, arXiv:2506.13585.
    """

    low: float = 0.0
    high: float = 5.0

    averaging = TOKEN

    def __post_init__(self) -> None:
        checks.fraction("losses.Cispo", "low", self.low)
        checks.positive("losses.Cispo", "high", self.high)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, tokens: Tokens) -> Gain:
        ratio = ratio_of(log_ratio.detach())
        value = advantage * weighted(ratio.clamp(self.low, self.high), tokens.log_prob)
        return Gain(value, (ratio < self.low) & (advantage < 0.0), (ratio > self.high) & (advantage > 0.0))


@dataclass(frozen=True)
class Sapo:
    """The surrogate 4/τ · σ(τ (r − 1))·A: a soft gate instead of the clip.

    positive, negative  τ where A > 0, and τ elsewhere

    Gao et al. 2025, arXiv:2511.20347.
    """

    positive: float = 1.0
    negative: float = 1.05

    averaging = SEQUENCE

    def __post_init__(self) -> None:
        checks.positive("losses.Sapo", "positive", self.positive)
        checks.positive("losses.Sapo", "negative", self.negative)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, tokens: Tokens) -> Gain:
        tau = _either(advantage > 0.0, self.positive, self.negative, advantage)
        value = 4.0 / tau * torch.sigmoid(tau * (ratio_of(log_ratio) - 1.0)) * advantage
        nowhere = torch.zeros_like(log_ratio, dtype=torch.bool)
        return Gain(value, nowhere, nowhere)


Powers: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Vespo:
    """The surrogate sg(W^c₁ e^(c₂ (1 − W)))·A·log π, where W = π/π_old of the whole sequence.

    positive, negative  (c₁, c₂) where A ≥ 0, and where A < 0

    π_old must be the policy that sampled, since W is the only correction. The paper sums over the tokens of a sequence;
    the mean over all tokens differs by the mean length. Shen et al. 2026, arXiv:2602.10693.
    """

    positive: Powers = (2.0, 3.0)
    negative: Powers = (3.0, 2.0)

    averaging = TOKEN

    def __post_init__(self) -> None:
        for name, powers in (("positive", self.positive), ("negative", self.negative)):
            for power in powers:
                checks.positive("losses.Vespo", name, power)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, tokens: Tokens) -> Gain:
        log_w = bounded(log_ratio.detach().sum(-1, keepdim=True))
        c1, c2 = (_either(advantage >= 0.0, a, b, advantage) for a, b in zip(self.positive, self.negative, strict=True))
        # In logarithms: W alone overflows long before the product vanishes.
        phi = (c1 * log_w + c2 * (1.0 - log_w.exp())).exp()
        nowhere = torch.zeros_like(log_ratio, dtype=torch.bool)
        return Gain(advantage * weighted(phi, tokens.log_prob), nowhere, nowhere)


def _either(condition: Tensor, a: float, b: float, like: Tensor) -> Tensor:
    """Select one of two numbers, in the dtype of `like`; torch.where of two numbers returns the default dtype."""
    return torch.where(condition, like.new_full((), a), like.new_full((), b))


Surrogate: TypeAlias = Clip | Cispo | Sapo | Vespo
# The constants of each paper; Dr. GRPO's averaging needs a length that only the caller knows.
VARIANTS: dict[str, tuple[Surrogate, Averaging | None]] = {
    "grpo": (Clip(), SEQUENCE),
    "dr-grpo": (Clip(), None),
    "dapo": (Clip(high=0.28), TOKEN),
    "gspo": (Clip(3e-4, 4e-4, level="sequence"), SEQUENCE),
    "luspo": (Clip(2e-3, 2.5e-3, level="sequence"), Averaging("constant", length=1)),
    "cispo": (Cispo(), TOKEN),
    "sapo": (Sapo(), SEQUENCE),
    "vespo": (Vespo(), TOKEN),
}
