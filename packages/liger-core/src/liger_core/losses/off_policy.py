# SPDX-License-Identifier: Apache-2.0
"""Corrections of a policy loss for tokens that another policy, or another engine, sampled."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.losses.numerics import ratio_of
from liger_core.losses.tokens import LEVELS, Tokens, mean_over_tokens

WEIGHTS = ("truncate", "mask")


@dataclass(frozen=True, eq=False)
class OffPolicy:
    """The off-policy correction: weights ρ = π_old/μ, where the policy μ sampled the tokens, and a filter of sequences.

    sampling   (B, T) log μ, as the engine reported it; NaN, where it has none, counts as ρ = 1
    weight     "truncate": ρ within [low, high] (arXiv:1802.01561); "mask": ρ there and 0 outside (arXiv:2510.18855);
               None: no weights
    level      of ρ: a "token", or a "sequence", where it is the product over its tokens
    low, high  bounds of ρ, None for no bound; the paper on masks has 0.5 and 5
    threshold  δ in nats: leave out tokens with A < 0 of sequences whose mean of log μ/π is above it (arXiv:2512.02556);
               None for none
    """

    sampling: Tensor
    weight: str | None = "truncate"
    level: str = "token"
    low: float | None = None
    high: float | None = 2.0
    threshold: float | None = None

    def __post_init__(self) -> None:
        name = "losses.OffPolicy"
        checks.tensor(name, "sampling", self.sampling)
        checks.choice(name, "weight", self.weight, (*WEIGHTS, None))
        checks.choice(name, "level", self.level, LEVELS)
        for option, value in (("low", self.low), ("high", self.high), ("threshold", self.threshold)):
            if value is not None:
                checks.not_negative(name, option, value)
        if self.low is not None and self.high is not None and self.low >= self.high:
            checks.fail(OptionError, name, f"low must be below high={self.high}, got {self.low}")

    def weights(self, old: Tensor, sampling: Tensor) -> Tensor | None:
        """Return the bounded weights ρ, (B, T) or (B, 1), or None without a correction."""
        if self.weight is None:
            return None
        log_rho = torch.nan_to_num(old.detach() - sampling, nan=0.0)
        rho = ratio_of(log_rho if self.level == "token" else log_rho.sum(-1, keepdim=True))
        if self.weight == "truncate":
            return rho.clamp(self.low, self.high) if (self.low, self.high) != (None, None) else rho
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return torch.where((rho >= low) & (rho <= high), rho, 0.0)

    def mask(self, tokens: Tokens, sampling: Tensor, advantage: Tensor) -> Tensor | None:
        """Return a mask of the tokens that stay, (B, 1) or (B, T), or None if all do."""
        if self.threshold is None:
            return None
        drift = mean_over_tokens(torch.nan_to_num(sampling - tokens.log_prob.detach(), nan=0.0), tokens)
        return (advantage >= 0.0) | (drift <= self.threshold)[:, None]
