# SPDX-License-Identifier: Apache-2.0
"""KTO: a loss on single answers that are desirable or not."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, ShapeError
from liger_core.losses.averaging import mean_of
from liger_core.losses.head import LogProbs
from liger_core.losses.tokens import log_ratio, tokens_of


class KTOMetrics(NamedTuple):
    """The detached metrics of kto. Rewards β · log-ratio are means over the answers of one kind, 0 if there are none.

    desirable, undesirable  the number of answers of each kind, by which ranks can be weighted
    baseline                the z₀ that the loss used, in nats
    """

    desirable_reward: Tensor
    undesirable_reward: Tensor
    margin: Tensor
    desirable: Tensor
    undesirable: Tensor
    baseline: Tensor


def kto(
    policy: LogProbs,
    reference: LogProbs,
    desirable: Tensor,
    *,
    mask: Tensor | None = None,
    baseline: Tensor | float = 0.0,
    beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0),
    length_normalized: bool = False,
) -> tuple[Tensor, KTOMetrics]:
    """Compute the loss of Kahneman–Tversky optimization, for single answers that are desirable or not.

        r    = log π(y|x) / π_ref(y|x)
        loss = mean of  λ_D · (1 − σ(β (r − z₀)))   where desirable
                        λ_U · (1 − σ(β (z₀ − r)))   elsewhere

    policy     (B, T) log-probabilities of the tokens, or a Head
    reference  the same of the frozen model, a Head (no gradient), or (B,) sums over the counted tokens
    desirable  (B,) bool
    mask       (B, T) True where a token counts; from the targets of a Head by default, and to be given with
               log-probabilities
    baseline   z₀, how far the policy has moved from the reference: in nats, without a gradient, and as given. The
               paper's is kto_baseline(…), averaged over ranks, then .clamp(min=0). With 0 this is the unpaired form of
               APO-zero
    beta       β > 0, the strength of the pull toward the reference
    weights    (λ_D, λ_U). For n_D and n_U answers of each kind, the paper recommends λ_D n_D / (λ_U n_U) in [1, 3/2]
    length_normalized  divide log-ratios by the number of counted tokens, as kto_baseline must then do, too
    returns    (loss, KTOMetrics)

    An answer without a counted token is left out; without any the loss is 0, with zero gradients.
    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    name = "losses.kto"
    checks.positive(name, "beta", beta)
    for weight in weights:
        checks.not_negative(name, "weights", weight)
    tokens = tokens_of(name, policy, mask)
    _check_desirable(name, desirable, tokens.log_prob)
    ratio = log_ratio(name, tokens, reference, length_normalized)
    if isinstance(baseline, Tensor):
        if baseline.dim():
            got = f"got a tensor of shape {checks.shape(baseline)}"
            checks.fail(ShapeError, name, f"baseline must be one number for the whole batch, {got}")
    else:
        checks.finite(name, "baseline", baseline)
    z = baseline.detach().to(ratio) if isinstance(baseline, Tensor) else ratio.new_full((), baseline)
    # 1 − σ(x) = σ(−x)
    gains = weights[0] * torch.sigmoid(beta * (z - ratio))
    pains = weights[1] * torch.sigmoid(beta * (ratio - z))
    counted = tokens.mask.any(-1)
    loss = mean_of(torch.where(desirable, gains, pains), counted)
    with torch.no_grad():
        kinds = counted & desirable, counted & ~desirable
        rewards = [mean_of(beta * ratio.detach(), kind) for kind in kinds]
        return loss, KTOMetrics._make((*rewards, rewards[0] - rewards[1], *(kind.sum() for kind in kinds), z))


def kto_baseline(
    policy: LogProbs, reference: LogProbs, *, mask: Tensor | None = None, length_normalized: bool = False
) -> Tensor:
    """Return the baseline z₀ of kto: mean of log π(y′|x) / π_ref(y′|x) over answers y′ to other prompts.

    policy, reference, mask, length_normalized  those of kto, for each prompt with the answer of another one
    returns  a number on the device, in nats, without a gradient. It may be negative: average it over ranks, and then
             cut it at 0 for kto
    """
    name = "losses.kto_baseline"
    with torch.no_grad():
        tokens = tokens_of(name, policy, mask)
        return mean_of(log_ratio(name, tokens, reference, length_normalized), tokens.mask.any(-1))


def _check_desirable(name: str, desirable: Tensor, log_prob: Tensor) -> None:
    checks.same_device(name, "policy", log_prob, desirable=desirable)
    if desirable.dtype != torch.bool:
        checks.fail(DtypeError, name, f"desirable must be bool, got {desirable.dtype}")
    if desirable.shape != log_prob.shape[:1]:
        sentence = f"desirable must be ({log_prob.shape[0]},) to match policy {checks.shape(log_prob)}"
        checks.misshapen(name, sentence, desirable)
