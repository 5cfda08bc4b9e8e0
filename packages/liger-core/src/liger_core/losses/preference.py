# SPDX-License-Identifier: Apache-2.0
"""Losses on pairs of answers: DPO and its variants, CPO, SimPO, ORPO.

A batch holds 2B sequences: first the B chosen answers, then the B rejected ones in the same order. A pair without a
counted token is left out; without any pair the loss is 0, with zero gradients. Arithmetic is in float32 (float64 for
float64).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError, ShapeError
from liger_core.losses.averaging import SEQUENCE, TOKEN, Averaging, mean_of
from liger_core.losses.head import LogProbs
from liger_core.losses.pairs import PairLoss, pair_losses
from liger_core.losses.tokens import Tokens, log_ratio, mean_over_tokens, tokens_of


class PreferenceMetrics(NamedTuple):
    """The means over the pairs, detached.

    chosen_reward, rejected_reward      what the loss compares; its docstring has the formula
    margin                              chosen_reward − rejected_reward
    accuracy                            share of pairs whose chosen answer has the higher reward
    chosen_log_prob, rejected_log_prob  of whole answers, in nats
    nll                                 negative log-likelihood of what is learned, averaged as in the loss
    """

    chosen_reward: Tensor
    rejected_reward: Tensor
    margin: Tensor
    accuracy: Tensor
    chosen_log_prob: Tensor
    rejected_log_prob: Tensor
    nll: Tensor


Result = tuple[Tensor, PreferenceMetrics]


@dataclass(frozen=True, eq=False)
class Likelihood:
    """The term weight · mean of −log π(y_w|x) that a preference loss adds to learn the chosen answers.

    weight     α ≥ 0, 0 for no term
    averaging  None for a mean over tokens and then answers
    policy     (B, T) log-probabilities of other tokens to learn, such as chosen answers with their prompts, or a Head;
               None for the chosen answers
    mask       (B, T) True where one of these tokens counts, as for the loss
    """

    weight: float = 1.0
    # Not SEQUENCE itself: Dynamo cannot build a dataclass with such a default in a graph.
    averaging: Averaging | None = None
    policy: LogProbs | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        name = "losses.Likelihood"
        checks.not_negative(name, "weight", self.weight)
        if self.averaging is not None:
            checks.instance(name, "averaging", self.averaging, Averaging)
        if self.averaging is not None and self.averaging.over == "none":
            checks.fail(OptionError, name, "averaging must reduce to one number, got over='none'")


NO_LIKELIHOOD = Likelihood(0.0)


def dpo(
    policy: LogProbs,
    reference: LogProbs,
    *,
    mask: Tensor | None = None,
    variant: str | PairLoss = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    likelihood: Likelihood = NO_LIKELIHOOD,
) -> Result:
    """Compute the loss of direct preference optimization: prefer chosen to rejected answers more than a reference does.

        Δ    = log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x)
        loss = mean of −(1 − ε) log σ(βΔ) − ε log σ(−βΔ)

    policy             (2B, T) log-probabilities of the tokens, chosen answers first, or a Head
    reference          the same of the frozen model, a Head (no gradient), or (2B,) sums over the counted tokens. Sums
                       of thousands of tokens lose digits in the difference: cache them per token, or in float64
    mask               (2B, T) True where a token counts; from the targets of a Head by default, and to be given with
                       log-probabilities
    variant            "sigmoid", "robust", "hinge", "ipo", "exo", "nca", "sppo", "bco", "apo-zero", "apo-down",
                       "discopop" (liger_core.losses.pairs has the formulas and papers), or a function (chosen,
                       rejected, β) → (B,) of log-ratios
    beta               β > 0, the strength of the pull toward the reference
    label_smoothing    ε, the share of pairs whose labels are wrong; for "sigmoid", "robust" (below 0.5) and "exo"
                       (above 0, 1e-3 in the paper)
    length_normalized  divide log-ratios by the number of counted tokens (arXiv:2411.15124)
    likelihood         Likelihood(α) adds the negative log-likelihood of the chosen answers, by default a mean over
                       tokens and then answers (arXiv:2404.19733)
    returns            (loss, PreferenceMetrics), with reward = β · log-ratio

    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    Rafailov et al. 2023, arXiv:2305.18290.
    """
    name = "losses.dpo"
    tokens = tokens_of(name, policy, mask)
    ratio = log_ratio(name, tokens, reference, length_normalized)
    return _of_pairs(name, tokens, ratio, (variant, beta, label_smoothing), likelihood)


def cpo(
    policy: LogProbs,
    *,
    mask: Tensor | None = None,
    variant: str | PairLoss = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    likelihood: Likelihood = Likelihood(averaging=TOKEN),
) -> Result:
    """Compute the loss of contrastive preference optimization: DPO without a reference, plus the chosen likelihood.

        loss = mean of −log σ(β log π(y_w|x) − β log π(y_l|x)) − weight · mean of log π(y_w|x)

    likelihood  by default a mean over tokens; Likelihood(averaging=Averaging("constant", length=1)) is the paper's, a
                sum over the tokens of an answer
    returns     (loss, PreferenceMetrics), with reward = β · log-probability

    policy, mask, variant, beta, label_smoothing and length_normalized are those of dpo, with log-probabilities instead
    of log-ratios. Xu et al. 2024, arXiv:2401.08417. With variant="hinge" SLiC-HF, arXiv:2305.10425.
    """
    name = "losses.cpo"
    tokens = tokens_of(name, policy, mask)
    score = mean_over_tokens(tokens.log_prob, tokens) if length_normalized else tokens.log_prob.sum(-1)
    return _of_pairs(name, tokens, score, (variant, beta, label_smoothing), likelihood)


def simpo(
    policy: LogProbs,
    *,
    mask: Tensor | None = None,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    likelihood: Likelihood = NO_LIKELIHOOD,
) -> Result:
    """Compute the loss of SimPO: compare mean log-probabilities of tokens, with a target margin and no reference.

        loss = mean of −log σ(β/|y_w| log π(y_w|x) − β/|y_l| log π(y_l|x) − γ)

    gamma    γ ≥ 0, in units of the reward; the paper takes 0.3 to 1.6, with beta 2 to 2.5
    returns  (loss, PreferenceMetrics), with reward = β · mean log-probability of a token

    policy, mask, beta, label_smoothing and likelihood are those of dpo. Meng et al. 2024, arXiv:2405.14734.
    """
    name = "losses.simpo"
    checks.not_negative(name, "gamma", gamma)
    checks.positive(name, "beta", beta)
    tokens = tokens_of(name, policy, mask)
    chosen, rejected = _halves(name, mean_over_tokens(tokens.log_prob, tokens))
    # With the chosen reward shifted by γ, the pair loss compares β · (chosen − rejected) − γ.
    losses = pair_losses(name, "sigmoid", chosen - gamma / beta, rejected, beta, label_smoothing)
    return _result(name, tokens, losses, (beta * chosen, beta * rejected), likelihood)


def orpo(
    policy: LogProbs, *, mask: Tensor | None = None, odds_weight: float = 0.1, likelihood: Likelihood = Likelihood()
) -> Result:
    """Compute the loss of odds ratio preference optimization: fine-tune on chosen answers, and raise their odds.

        odds(y) = P(y) / (1 − P(y)),   log P(y) = 1/|y| log π(y|x)
        loss    = mean of −1/|y_w| log π(y_w|x) − odds_weight · mean of log σ(log odds(y_w) − log odds(y_l))

    odds_weight  the paper's λ
    likelihood   by default a mean over tokens and then answers; Likelihood(policy=…, mask=…) learns other tokens
    returns      (loss, PreferenceMetrics), with reward = odds_weight · log odds

    policy and mask are those of dpo. At P = 1, where the odds are infinite, log P counts as −1.2e-7 and has no gradient
    from the odds. Hong et al. 2024, arXiv:2403.07691.
    """
    name = "losses.orpo"
    checks.not_negative(name, "odds_weight", odds_weight)
    tokens = tokens_of(name, policy, mask)
    log_p = mean_over_tokens(tokens.log_prob, tokens).clamp(max=-torch.finfo(torch.float32).eps)
    # log odds = log P − log(1 − P), where expm1 keeps the digits of 1 − P.
    chosen, rejected = _halves(name, log_p - (-torch.expm1(log_p)).log())
    losses = -odds_weight * F.logsigmoid(chosen - rejected)
    return _result(name, tokens, losses, (odds_weight * chosen, odds_weight * rejected), likelihood)


def _of_pairs(
    name: str, tokens: Tokens, score: Tensor, pair: tuple[str | PairLoss, float, float], likelihood: Likelihood
) -> Result:
    """Apply a variant's formula to the scores of whole answers."""
    variant, beta, label_smoothing = pair
    chosen, rejected = _halves(name, score)
    losses = pair_losses(name, variant, chosen, rejected, beta, label_smoothing)
    return _result(name, tokens, losses, (beta * chosen, beta * rejected), likelihood)


def _result(
    name: str, tokens: Tokens, losses: Tensor, rewards: tuple[Tensor, Tensor], likelihood: Likelihood
) -> Result:
    """Return the mean loss over the pairs, with the likelihood of the chosen answers added, and the metrics."""
    checks.instance(name, "likelihood", likelihood, Likelihood)
    chosen, rejected = rewards
    pairs = losses.shape[0]
    counted = tokens.mask.any(-1).view(2, pairs).any(0)
    learned = Tokens(tokens.log_prob[:pairs], None, tokens.mask[:pairs])
    if likelihood.policy is not None:
        learned = tokens_of("losses.Likelihood", likelihood.policy, likelihood.mask)
    nll = (likelihood.averaging or SEQUENCE)(-learned.log_prob, learned.mask)
    loss = mean_of(losses, counted)
    if likelihood.weight:
        loss = loss + likelihood.weight * nll
    with torch.no_grad():
        log_probs = tokens.log_prob.sum(-1).chunk(2)
        means = (
            mean_of(x.detach(), counted)
            for x in (chosen, rejected, chosen - rejected, (chosen > rejected).to(chosen), *log_probs)
        )
        return loss, PreferenceMetrics._make((*means, nll.detach()))


def _halves(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[0] % 2:
        sentence = f"policy must hold the chosen sequences, then as many rejected ones, got {x.shape[0]} sequences"
        checks.fail(ShapeError, name, sentence)
    chosen, rejected = x.view(2, -1)
    return chosen, rejected
