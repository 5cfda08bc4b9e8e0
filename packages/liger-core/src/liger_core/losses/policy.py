# SPDX-License-Identifier: Apache-2.0
"""Policy losses on sampled answers: GRPO and its descendants, and PPO."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.losses.averaging import TOKEN, Averaging
from liger_core.losses.head import LogProbs, LogProbsAndEntropy
from liger_core.losses.numerics import ratio_of
from liger_core.losses.off_policy import OffPolicy
from liger_core.losses.penalty import Penalty, divergence
from liger_core.losses.surrogates import VARIANTS, Clip, Surrogate, Vespo
from liger_core.losses.tokens import constants_of, masked, tokens_of


class PolicyMetrics(NamedTuple):
    """The means over the counted tokens, detached; None for quantities that the loss did not compute.

    With Averaging("none"), they are the values of each token.

    surrogate                 the contribution of the surrogate to the loss, averaged like the loss
    ratio                     π/π_old
    drift                     KL(π_old ‖ π), by k3: how far the policy is from π_old
    clipped_low, clipped_high shares of tokens whose ratio the bounds cut: below with A < 0, above with A > 0
    kl                        KL(π ‖ π_ref), by the estimator of the penalty
    entropy                   in nats
    weight                    ρ of the off-policy correction
    on_policy                 share of tokens within the off-policy threshold
    """

    surrogate: Tensor
    ratio: Tensor
    drift: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor | None
    entropy: Tensor | None
    weight: Tensor | None
    on_policy: Tensor | None


Result = tuple[Tensor, PolicyMetrics]
# Policy, old, advantages and mask.
_Batch = tuple[LogProbsAndEntropy, LogProbs | None, Tensor, Tensor | None]
NONE = Penalty()


def grpo(
    policy: LogProbsAndEntropy,
    old: LogProbs | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    variant: str | Surrogate = "grpo",
    averaging: Averaging | None = None,
    penalty: Penalty = NONE,
    off_policy: OffPolicy | None = None,
) -> Result:
    """Compute the loss of group relative policy optimization, or of one of its descendants.

        r    = π/π_old of a token
        loss = −mean of ( min(r·A, clip(r, 1 − ε, 1 + ε)·A) − β · KL(π ‖ π_ref) + c · H(π) )

    policy      (B, T) log-probabilities of the tokens, the pair of them and their entropies, or a Head. `temperature`
                of the Head is that of the sampling
    old         (B, T) log-probabilities at the time of sampling, no gradient; None for those of the policy itself,
                where r is 1
    advantages  (B,), or (B, T) for each token, no gradient. GRPO's are rewards less the mean of their group, divided by
                its deviation
    mask        (B, T) True where a token counts; from the targets of a Head by default, and to be given with
                log-probabilities
    variant     name       surrogate                            averaging   source
                "grpo"     Clip(0.2, 0.2)                       sequence    arXiv:2402.03300
                "dr-grpo"  Clip(0.2, 0.2)                       constant    arXiv:2503.20783
                "dapo"     Clip(0.2, 0.28)                      token       arXiv:2503.14476
                "gspo"     Clip(3e-4, 4e-4, level="sequence")   sequence    arXiv:2507.18071
                "luspo"    Clip(2e-3, 2.5e-3, level="sequence") sums        arXiv:2602.05261
                "cispo"    Cispo(0, 5)                          token       arXiv:2506.13585
                "sapo"     Sapo(1, 1.05)                        sequence    arXiv:2511.20347
                "vespo"    Vespo((2, 3), (3, 2))                token       arXiv:2602.10693
                or a surrogate with constants of your own: Clip, Cispo, Sapo, Vespo
    averaging   that of the variant by default; "dr-grpo" needs Averaging("constant", length=…), the longest answer that
                can be sampled
    penalty     divergence from a reference, and entropy bonus: Penalty
    off_policy  correction for the engine that sampled: OffPolicy; weights and masks are for the surrogate only
    returns     (loss, PolicyMetrics)

    log r is cut at 80: where A < 0, the clipped surrogate is unbounded without delta, and float32 would overflow.
    Without a counted token the loss is 0, with zero gradients. Raises ShapeError, DtypeError, OptionError for arguments
    that do not fit. Shao et al. 2024, arXiv:2402.03300.
    """
    name = "losses.grpo"
    default: Averaging | None
    if isinstance(variant, Surrogate):
        surrogate, default = variant, variant.averaging
    else:
        checks.choice(name, "variant", variant, tuple(VARIANTS))
        surrogate, default = VARIANTS[variant]
    averaging = averaging or default
    if averaging is None:
        sentence = (
            'averaging must be Averaging("constant", length=…) with variant="dr-grpo", the longest answer that can be '
            "sampled, got None"
        )
        checks.fail(OptionError, name, sentence)
    if isinstance(off_policy, OffPolicy) and off_policy.weight is not None and isinstance(surrogate, Vespo):
        sentence = (
            "off_policy must have weight=None with vespo, which corrects by itself: pass the log-probabilities of the "
            "sampler as old"
        )
        checks.fail(OptionError, name, sentence)
    return _loss(name, (policy, old, advantages, mask), surrogate, averaging, penalty, off_policy)


def ppo(
    policy: LogProbsAndEntropy,
    old: LogProbs | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip: Clip | None = None,
    averaging: Averaging = TOKEN,
    penalty: Penalty = NONE,
    off_policy: OffPolicy | None = None,
) -> Result:
    """Compute the clipped surrogate loss of proximal policy optimization.

        loss = −mean over tokens of ( min(r·A, clip(r, 1 − ε, 1 + ε)·A) + c · H(π) ),   r = π/π_old

    advantages  (B, T), one for each token
    clip        Clip() by default: ε = 0.2; Clip(delta=…) is the dual clip
    averaging   a mean over tokens by default

    The other arguments are those of grpo. The value function has its own loss, which needs no head.
    Schulman et al. 2017, arXiv:1707.06347.
    """
    name = "losses.ppo"
    clip = Clip() if clip is None else clip
    checks.instance(name, "clip", clip, Clip)
    return _loss(name, (policy, old, advantages, mask), clip, averaging, penalty, off_policy)


def _loss(
    name: str, batch: _Batch, surrogate: Surrogate, averaging: Averaging, penalty: Penalty, off_policy: OffPolicy | None
) -> Result:
    checks.instance(name, "penalty", penalty, Penalty)
    checks.instance(name, "averaging", averaging, Averaging)
    if off_policy is not None:
        checks.instance(name, "off_policy", off_policy, OffPolicy)
    policy, old, advantages, mask = batch
    tokens = tokens_of(name, policy, mask, entropy=penalty.entropy != 0.0)
    shape = tokens.log_prob.shape
    checks.floating(name, policy=tokens.log_prob, advantages=advantages)
    if advantages.shape not in (shape, shape[:1]):
        sentence = f"advantages must be ({shape[0]},) or {tuple(shape)} to match policy"
        checks.misshapen(name, sentence, advantages)
    per_token = advantages.dim() == 2
    # Values at tokens that do not count may be NaN.
    counted = tokens.mask if per_token else tokens.mask.any(-1)
    advantage = masked(advantages.detach().to(tokens.log_prob.dtype), counted)
    advantage = advantage if per_token else advantage[:, None]
    before = tokens.log_prob.detach() if old is None else constants_of(name, "old", old, tokens)
    log_ratio = tokens.log_prob - before
    gain = surrogate(log_ratio, advantage, tokens)
    value, weight, on_policy, kl = gain.value, None, None, None
    if off_policy is not None:
        sampling = constants_of(name, "sampling", off_policy.sampling, tokens)
        weight, on_policy = off_policy.weights(before, sampling), off_policy.mask(tokens, sampling, advantage)
        value = value if weight is None else weight * value
        value = value if on_policy is None else torch.where(on_policy, value, 0.0)
    loss = surrogate_loss = averaging(-value.expand_as(log_ratio), tokens.mask)
    if penalty.reference is not None:
        kl = penalty.divergence(tokens, constants_of(name, "reference", penalty.reference, tokens), log_ratio)
        loss = loss + penalty.beta * averaging(kl, tokens.mask)
    if penalty.entropy and tokens.entropy is not None:
        loss = loss - penalty.entropy * averaging(tokens.entropy, tokens.mask)

    def mean(x: Tensor | None) -> Tensor | None:
        return None if x is None else averaging.metric(x.detach().to(log_ratio.dtype).expand_as(log_ratio), tokens.mask)

    with torch.no_grad():
        moved = log_ratio.detach()
        always = (mean(x) for x in (ratio_of(moved), divergence("k3", moved), gain.low, gain.high))
        sometimes = (mean(x) for x in (kl, tokens.entropy, weight, on_policy))
        return loss, PolicyMetrics._make((surrogate_loss.detach(), *always, *sometimes))
