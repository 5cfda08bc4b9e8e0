# SPDX-License-Identifier: Apache-2.0
"""The losses once more, as their papers print them: for lists of answers, one token after the other, without masks or
padding.

An answer is a one-dimensional tensor with the log-probabilities of its own tokens. Written apart from the losses, to be
run in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Answers = Sequence[Tensor]


def sigma(x: Tensor) -> Tensor:
    return torch.exp(log_sigma(x))


def log_sigma(x: Tensor) -> Tensor:
    return -torch.logaddexp(torch.zeros_like(x), -x)


def sign(x: Tensor) -> float:
    return float(x.detach())


# Preference losses. h is the log-ratio (or log-probability) of an answer, r = β h its reward, w the chosen and l the
# rejected one.


def sigmoid_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2305.18290, equation 7; with ε the cDPO loss that arXiv:2403.00409 compares with."""
    u = beta * h_w - beta * h_l
    return -(1 - eps) * log_sigma(u) - eps * log_sigma(-u)


def robust_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2403.00409: ((1 − ε) L(w ≻ l) − ε L(l ≻ w)) / (1 − 2ε)."""
    right, flipped = sigmoid_loss(h_w, h_l, beta, 0.0), sigmoid_loss(h_l, h_w, beta, 0.0)
    return ((1 - eps) * right - eps * flipped) / (1 - 2 * eps)


def hinge_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2309.06657, hinge-norm: max(0, 1 − (γ h_w − γ h_l))."""
    return torch.clamp(1 - (beta * h_w - beta * h_l), min=0)


def ipo_loss(h_w: Tensor, h_l: Tensor, tau: float, eps: float) -> Tensor:
    """arXiv:2310.12036, equation 17."""
    return (h_w - h_l - 1 / (2 * tau)) ** 2


def exo_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2402.00856, equation 16: the divergence of the policy's preference from (1 − ε, ε)."""
    logits = torch.stack([beta * h_w, beta * h_l])
    log_p = logits - torch.logsumexp(logits, 0)
    return (log_p.exp() * (log_p - torch.tensor([1 - eps, eps], dtype=log_p.dtype).log())).sum()


def nca_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2402.05369, with two answers."""
    return -log_sigma(beta * h_w) - sum(log_sigma(-beta * h) for h in (h_w, h_l)) / 2


def sppo_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2405.00675, equation 4.7: (h − η (P(y ≻ π) − ½))² with P = 1 for the winner, 0 for the loser, η = 1/β."""
    eta = 1 / beta
    return (h_w - eta * (1 - 0.5)) ** 2 + (h_l - eta * (0 - 0.5)) ** 2


def bco_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float, delta: float = 0.0) -> Tensor:
    """arXiv:2404.04656."""
    return -log_sigma(beta * h_w - delta) - log_sigma(-(beta * h_l - delta))


def apo_zero_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2408.06266, equation 7, plus 1."""
    return -sigma(beta * h_w) + sigma(beta * h_l) + 1


def apo_down_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float) -> Tensor:
    """arXiv:2408.06266, equation 8, plus 1."""
    return sigma(beta * h_w) - sigma(beta * h_w - beta * h_l) + 1


def discopop_loss(h_w: Tensor, h_l: Tensor, beta: float, eps: float, tau: float = 0.05) -> Tensor:
    """arXiv:2406.08414, equation 5: logistic and exponential losses, mixed by σ(βρ / τ)."""
    x = beta * (h_w - h_l)
    mixture = sigma(x / tau)
    return (1 - mixture) * torch.logaddexp(torch.zeros_like(x), -x) + mixture * torch.exp(-x)


FORMULAS = (
    sigmoid_loss, robust_loss, hinge_loss, ipo_loss, exo_loss, nca_loss, sppo_loss, bco_loss, apo_zero_loss,
    apo_down_loss, discopop_loss,
)  # fmt: skip
PAIRS: dict[str, Callable[..., Tensor]] = {
    formula.__name__.removesuffix("_loss").replace("_", "-"): formula for formula in FORMULAS
}


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum() / len(values)


def pairs_of(answers: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The first half are the chosen answers, the second the rejected ones."""
    half = len(answers) // 2
    return list(zip(answers[:half], answers[half:], strict=True))


def log_ratios(policy: Answers, reference: Answers) -> list[Tensor]:
    return [(own - other).sum() for own, other in zip(policy, reference, strict=True)]


def dpo(
    policy: Answers, reference: Answers, variant: str = "sigmoid", beta: float = 0.1, eps: float = 0.0,
    **constants: float,
) -> Tensor:  # fmt: skip
    return mean([PAIRS[variant](w, l, beta, eps, **constants) for w, l in pairs_of(log_ratios(policy, reference))])


def normalized_dpo(policy: Answers, reference: Answers, beta: float) -> Tensor:
    """arXiv:2411.15124: β/|y| before each log-ratio."""
    each = [h / len(answer) for h, answer in zip(log_ratios(policy, reference), policy, strict=True)]
    return mean([-log_sigma(beta * w - beta * l) for w, l in pairs_of(each)])


def dpo_with_likelihood(policy: Answers, reference: Answers, beta: float, alpha: float) -> Tensor:
    """arXiv:2404.19733: −α log π(y_w)/|y_w| beside the loss of each pair."""
    chosen = policy[: len(policy) // 2]
    return dpo(policy, reference, beta=beta) + alpha * mean([-answer.sum() / len(answer) for answer in chosen])


def cpo(policy: Answers, beta: float = 0.1, eps: float = 0.0, variant: str = "sigmoid") -> Tensor:
    """arXiv:2401.08417, equation 3: the pairs without a reference, and log π(y_w) of whole answers."""
    sums = [answer.sum() for answer in policy]
    return mean([PAIRS[variant](w, l, beta, eps) for w, l in pairs_of(sums)]) + mean([-h for h, _ in pairs_of(sums)])


def simpo(policy: Answers, beta: float, gamma: float, eps: float = 0.0) -> Tensor:
    """arXiv:2405.14734, equation 6."""
    each = [beta / len(answer) * answer.sum() for answer in policy]
    return mean([-(1 - eps) * log_sigma(w - l - gamma) - eps * log_sigma(-(w - l - gamma)) for w, l in pairs_of(each)])


def orpo(policy: Answers, weight: float, likelihood: float = 1.0) -> Tensor:
    """arXiv:2403.07691."""

    def odds(answer: Tensor) -> tuple[Tensor, Tensor]:
        log_p = answer.sum() / len(answer)
        return log_p, log_p - torch.log(1 - torch.exp(log_p))

    return mean([-likelihood * odds(w)[0] - weight * log_sigma(odds(w)[1] - odds(l)[1]) for w, l in pairs_of(policy)])


def kto(
    policy: Answers, reference: Answers, desirable: Sequence[bool], z: float, beta: float, weights: tuple[float, float],
    normalized: bool = False,
) -> Tensor:  # fmt: skip
    """arXiv:2402.01306: λ_y − v(x, y)."""
    losses = []
    for answer, r, good in zip(policy, log_ratios(policy, reference), desirable, strict=True):
        r = r / len(answer) if normalized else r
        value = weights[0] * sigma(beta * (r - z)) if good else weights[1] * sigma(beta * (z - r))
        losses.append((weights[0] if good else weights[1]) - value)
    return mean(losses)


# Policy losses.


def ratio(own: Tensor, other: Tensor) -> Tensor:
    """Documented: a logarithm above 80 counts as 80."""
    return torch.exp(torch.clamp(own - other, max=80.0))


@dataclass
class Batch:
    """Answers with what is known of them: everything is a list over answers, of tensors over their tokens."""

    policy: Answers
    old: Answers
    advantages: Answers
    reference: Answers = ()
    sampling: Answers = ()
    entropy: Answers = ()

    def rows(self) -> Any:
        """Of each answer, the policy, the old one and the advantages."""
        return zip(self.policy, self.old, self.advantages, strict=True)


def clipped(r: Tensor, advantage: Tensor, low: float, high: float, delta: float = torch.inf) -> Tensor:
    """arXiv:1707.06347, equation 7; with δ arXiv:2505.07291."""
    return torch.minimum(torch.clamp(r, max=delta) * advantage, torch.clamp(r, 1 - low, 1 + high) * advantage)


def token_gains(batch: Batch, low: float, high: float, delta: float = torch.inf) -> list[Tensor]:
    return [clipped(ratio(own, old), advantage, low, high, delta) for own, old, advantage in batch.rows()]


def penalties(batch: Batch, estimator: str, beta: float, level: str = "", entropy: float = 0.0) -> list[Tensor]:
    """β · KL − c · H of each token; the estimators are those of Schulman, k3 that of arXiv:2402.03300, equation 4.

    With a level, times π/π_old of the token or of the whole answer.
    """
    found = []
    for i, own in enumerate(batch.policy):
        log_q_over_p = batch.reference[i] - own
        kl = {
            "k1": lambda d: -d,
            "k2": lambda d: d**2 / 2,
            "k3": lambda d: torch.exp(torch.clamp(d, max=80.0)) - torch.clamp(d, max=80.0) - 1,
        }[estimator](log_q_over_p)
        if level:
            kl = {"token": ratio, "sequence": sequence_ratio}[level](own, batch.old[i]) * kl
        found.append(beta * kl - (entropy * batch.entropy[i] if entropy else 0.0))
    return found


def minus(gains: Answers) -> list[Tensor]:
    return [-gain for gain in gains]


def per_sequence(terms: Answers) -> Tensor:
    """1/G Σ 1/|o| Σ: arXiv:2402.03300, equation 3."""
    return mean([term.sum() / len(term) for term in terms])


def per_token(terms: Answers) -> Tensor:
    """Σ Σ / Σ|o|: arXiv:2503.14476, equation 8, where the batch is one group."""
    return torch.stack([term.sum() for term in terms]).sum() / sum(len(term) for term in terms)


def per_group(terms: Answers, size: int) -> Tensor:
    """The same for each question's group, and the mean over questions."""
    return mean([per_token(terms[i : i + size]) for i in range(0, len(terms), size)])


def constant_length(terms: Answers, length: int) -> Tensor:
    """arXiv:2503.20783, listing 1: sums over tokens, divided by a constant."""
    return mean([term.sum() / length for term in terms])


def sequence_ratio(own: Tensor, old: Tensor) -> Tensor:
    """arXiv:2507.18071, equation 7."""
    return torch.exp(torch.clamp((own - old).sum() / len(own), max=80.0))


def gspo(batch: Batch, low: float, high: float) -> Tensor:
    """arXiv:2507.18071, equation 5; one advantage for an answer."""
    return mean([-clipped(sequence_ratio(own, old), a[0], low, high) for own, old, a in batch.rows()])


def gspo_token(batch: Batch, low: float, high: float) -> Tensor:
    """arXiv:2507.18071, section 4.3; one advantage for a token."""
    gains = []
    for own, old, advantage in batch.rows():
        s = sequence_ratio(own, old).detach() * torch.exp(own) / torch.exp(own).detach()
        gains.append(clipped(s, advantage, low, high))
    return per_sequence(minus(gains))


def luspo(batch: Batch, low: float, high: float) -> Tensor:
    """arXiv:2602.05261, equation 7."""
    return mean([-clipped(sequence_ratio(own, old), a[0], low, high) * len(own) for own, old, a in batch.rows()])


def cispo(batch: Batch, low: float, high: float) -> Tensor:
    """arXiv:2506.13585."""
    return per_token([-torch.clamp(ratio(own, old), low, high).detach() * a * own for own, old, a in batch.rows()])


def sapo(batch: Batch, positive: float, negative: float) -> Tensor:
    """arXiv:2511.20347."""

    def gate(r: Tensor, advantage: Tensor) -> Tensor:
        tau = positive if sign(advantage) > 0 else negative
        return sigma(tau * (r - 1)) * 4 / tau

    def gates(own: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        return torch.stack([gate(*pair) for pair in zip(ratio(own, old), advantages, strict=True)])

    return per_sequence([-gates(own, old, a) * a for own, old, a in batch.rows()])


def vespo(batch: Batch, positive: tuple[float, float], negative: tuple[float, float]) -> Tensor:
    """arXiv:2602.10693, equation 20 and appendix I."""
    terms = []
    for own, old, advantage in batch.rows():
        log_w = torch.clamp((own - old).sum(), max=80.0)
        c1, c2 = positive if sign(advantage[0]) >= 0 else negative
        phi = torch.exp(c2 + c1 * log_w - c2 * torch.exp(log_w)).detach()
        terms.append(-phi * advantage * own)
    return per_token(terms)


def importance_weights(batch: Batch, mode: str, level: str, low: float, high: float) -> list[Tensor]:
    """π_old/μ, truncated as in arXiv:1802.01561 or masked as in arXiv:2510.18855."""
    weights = []
    for old, sampling in zip(batch.old, batch.sampling, strict=True):
        log_rho = (old - sampling).detach()
        rho = torch.exp(torch.clamp(log_rho if level == "token" else log_rho.sum().expand_as(log_rho), max=80.0))
        within = torch.clamp(rho, low, high)
        weights.append(within if mode == "truncate" else torch.where(rho == within, rho, 0.0))
    return weights


def sequence_mask(batch: Batch, delta: float) -> list[Tensor]:
    """arXiv:2512.02556, equation 9: 0 where A < 0 and the mean of log μ/π is above δ."""
    kept = []
    for own, sampling, advantage in zip(batch.policy, batch.sampling, batch.advantages, strict=True):
        far = float(((sampling - own).sum() / len(own)).detach()) > delta
        kept.append(torch.where(advantage < 0, 0.0 if far else 1.0, 1.0).to(own.dtype))
    return kept


def dft(policy: Answers) -> Tensor:
    """arXiv:2508.05629."""
    return per_token([-torch.exp(answer).detach() * answer for answer in policy])
