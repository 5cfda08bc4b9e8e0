# SPDX-License-Identifier: Apache-2.0
"""The conversion of a loss's arguments to log-probabilities of the tokens that count."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError
from liger_core.losses.head import Head, LogProbs, LogProbsAndEntropy
from liger_core.op import accumulator

# The levels of a ratio π/π_old.
LEVELS = ("token", "sequence")


class Tokens(NamedTuple):
    """A policy's values for the tokens, (sequences, tokens) each; 0 where a token does not count."""

    log_prob: Tensor
    entropy: Tensor | None
    mask: Tensor


def tokens_of(name: str, policy: LogProbsAndEntropy, mask: Tensor | None, entropy: bool = False) -> Tokens:
    """Return the policy's log-probabilities in float32 (float64 for float64), with the mask that later steps use."""
    if isinstance(policy, Head):
        _check_mask(name, mask, policy.target)
        mask = policy.mask if mask is None else policy.mask & mask.bool()
        log_prob, entropies = policy.log_prob(mask, entropy)
    else:
        log_prob, entropies = policy if isinstance(policy, tuple) else (policy, None)
        checks.floating(name, policy=log_prob, entropy=entropies)
        if mask is None:
            sentence = (
                "mask must be given with log-probabilities: True for the tokens that count; only a Head has its own"
            )
            checks.fail(OptionError, name, sentence)
        _check_mask(name, mask, log_prob)
        mask = mask.bool()
    if log_prob.dim() != 2:
        checks.misshapen(name, "policy must be (sequences, tokens)", log_prob)
    if entropy and entropies is None:
        sentence = (
            "policy must bring its entropy: pass a Head, or the pair that linear_log_prob(…, return_entropy=True) "
            "returns, got log-probabilities"
        )
        checks.fail(OptionError, name, sentence)
    return Tokens(masked(wide(log_prob), mask), None if entropies is None else masked(wide(entropies), mask), mask)


def constants_of(name: str, argument: str, policy: LogProbs, tokens: Tokens) -> Tensor:
    """Return another policy's log-probabilities of the same tokens, without a gradient."""
    if isinstance(policy, Head):
        with torch.no_grad():
            policy, _ = policy.log_prob(tokens.mask)
    checks.floating(name, 2, policy=tokens.log_prob, **{argument: policy})
    if policy.shape != tokens.log_prob.shape:
        checks.unlike(name, argument, policy, "policy", tokens.log_prob)
    return masked(policy.detach().to(tokens.log_prob.dtype), tokens.mask)


def log_ratio(name: str, tokens: Tokens, reference: LogProbs, length_normalized: bool = False) -> Tensor:
    """Return log π(y|x) / π_ref(y|x) of whole answers, or the mean over their tokens; the reference may be sums."""
    if length_normalized:
        return log_ratio(name, tokens, reference) / lengths(tokens)
    if isinstance(reference, Tensor) and reference.dim() == 1:
        checks.floating(name, policy=tokens.log_prob, reference=reference)
        if reference.shape != tokens.log_prob.shape[:1]:
            like = f"like policy {checks.shape(tokens.log_prob)}"
            checks.misshapen(name, f"reference must be (sequences, tokens) or (sequences,) {like}", reference)
        # Sums that were cached in float64 keep that precision in the difference.
        reference = wide(reference.detach())
        return (tokens.log_prob.sum(-1, dtype=reference.dtype) - reference).to(tokens.log_prob.dtype)
    # Subtract token by token: two sums of thousands of tokens would cancel.
    return (tokens.log_prob - constants_of(name, "reference", reference, tokens)).sum(-1)


def lengths(tokens: Tokens) -> Tensor:
    """Return each sequence's number of counted tokens, at least 1."""
    return tokens.mask.sum(-1).clamp(min=1)


def mean_over_tokens(x: Tensor, tokens: Tokens) -> Tensor:
    """Return each sequence's mean of x, which is 0 where a token does not count."""
    return x.sum(-1) / lengths(tokens)


def wide(x: Tensor) -> Tensor:
    """Convert to the dtype that losses are computed in."""
    return x.to(accumulator(x.dtype))


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return x with 0 for tokens that do not count; a product with the mask would keep their NaN."""
    return torch.where(mask, x, 0.0)


def _check_mask(name: str, mask: Tensor | None, like: Tensor) -> None:
    if mask is None:
        return
    checks.same_device(name, "policy", like, mask=mask)
    if mask.is_floating_point():
        checks.fail(DtypeError, name, f"mask must be bool or an integer, got {mask.dtype}")
    if mask.shape != like.shape:
        checks.unlike(name, "mask", mask, "policy", like)
