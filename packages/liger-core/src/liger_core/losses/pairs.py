# SPDX-License-Identifier: Apache-2.0
"""The variants of DPO: formulas for one pair.

chosen, rejected (pairs,) are the policy's preferences for each answer: log π(y|x) − log π_ref(y|x), or log π(y|x)
without a reference. β scales them to rewards, Δ = chosen − rejected, ε is the share of pairs whose labels are wrong.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError, ShapeError

PairLoss = Callable[[Tensor, Tensor, float], Tensor]


def sigmoid(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return −(1 − ε) log σ(βΔ) − ε log σ(−βΔ).

    Rafailov et al. 2023, arXiv:2305.18290; ε: the conservative DPO of arXiv:2403.00409.
    """
    x = beta * (chosen - rejected)
    return _smoothed(1.0 - label_smoothing, label_smoothing, x)


def robust(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.1) -> Tensor:
    """Return (−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)) / (1 − 2ε). Chowdhury et al. 2024, arXiv:2403.00409."""
    x = beta * (chosen - rejected)
    return _smoothed(1.0 - label_smoothing, -label_smoothing, x) / (1.0 - 2.0 * label_smoothing)


def hinge(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return max(0, 1 − βΔ).

    Zhao et al. 2023, arXiv:2305.10425 (SLiC-HF); Liu et al. 2023, arXiv:2309.06657, with a reference.
    """
    return torch.relu(1.0 - beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return (Δ − 1 / 2β)². Azar et al. 2023, arXiv:2310.12036; β is the paper's τ."""
    return (chosen - rejected - 0.5 / beta).square()


def exo(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 1e-3) -> Tensor:
    """Return KL(p ‖ (1 − ε, ε)) with p = (σ(βΔ), σ(−βΔ)). Ji et al. 2024, arXiv:2402.00856."""
    # The bounds avoid 0 · log 0; at them, the loss has reached its limits.
    x = (beta * (chosen - rejected)).clamp(-80.0, 80.0)
    right = torch.sigmoid(x) * (F.logsigmoid(x) - math.log1p(-label_smoothing))
    return right + torch.sigmoid(-x) * (F.logsigmoid(-x) - math.log(label_smoothing))


def nca(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return −log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l), r = β · log-ratio. Chen et al. 2024, arXiv:2402.05369."""
    return -F.logsigmoid(beta * chosen) - 0.5 * F.logsigmoid(-beta * chosen) - 0.5 * F.logsigmoid(-beta * rejected)


def sppo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return (chosen − 1 / 2β)² + (rejected + 1 / 2β)², β = 1/η.

    Wu et al. 2024, arXiv:2405.00675, with winning probabilities 1 and 0.
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def bco(chosen: Tensor, rejected: Tensor, beta: float, shift: float | Tensor = 0.0) -> Tensor:
    """Return −log σ(r_w − δ) − log σ(δ − r_l), r = β · log-ratio. Jung et al. 2024, arXiv:2404.04656.

    shift  δ: a running mean of (chosen_reward + rejected_reward) / 2, which the metrics of dpo report
    """
    return -F.logsigmoid(beta * chosen - shift) - F.logsigmoid(shift - beta * rejected)


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return 1 − σ(r_w) + σ(r_l), r = β · log-ratio, for answers better than the model's.

    D'Oosterlinck et al. 2024, arXiv:2408.06266.
    """
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return σ(r_w) + 1 − σ(r_w − r_l), r = β · log-ratio, for answers worse than the model's.

    D'Oosterlinck et al. 2024, arXiv:2408.06266.
    """
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def discopop(chosen: Tensor, rejected: Tensor, beta: float, tau: float = 0.05) -> Tensor:
    """Return (1 − m) log(1 + e⁻ˣ) + m e⁻ˣ, x = βΔ, m = σ(x / τ). Lu et al. 2024, arXiv:2406.08414."""
    x = beta * (chosen - rejected)
    # m e⁻ˣ as one exponential: e⁻ˣ alone overflows where the product is 0.
    bounded = x.clamp(-80.0, 80.0)
    return torch.sigmoid(-x / tau) * -F.logsigmoid(x) + (F.logsigmoid(bounded / tau) - bounded).exp()


_FORMULAS = (sigmoid, robust, hinge, ipo, exo, nca, sppo, bco, apo_zero, apo_down, discopop)
VARIANTS: dict[str, Callable[..., Tensor]] = {formula.__name__.replace("_", "-"): formula for formula in _FORMULAS}
SMOOTHED = ("sigmoid", "robust", "exo")


def pair_losses(
    name: str, variant: str | PairLoss, chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float
) -> Tensor:
    """Return each pair's loss by the variant's formula; label_smoothing must be 0 if the formula has none."""
    checks.positive(name, "beta", beta)
    if isinstance(variant, str) or not callable(variant):
        checks.choice(name, "variant", variant, tuple(VARIANTS))
        if variant in SMOOTHED:
            _check_smoothing(name, variant, label_smoothing)
            return VARIANTS[variant](chosen, rejected, beta, label_smoothing)
    if label_smoothing:
        sentence = f"label_smoothing must be 0 with variant={variant!r}, got {label_smoothing}"
        checks.fail(OptionError, name, f"{sentence}; {', '.join(SMOOTHED)} have it")
    if isinstance(variant, str):
        return VARIANTS[variant](chosen, rejected, beta)
    losses = variant(chosen, rejected, beta)
    if not isinstance(losses, Tensor) or losses.shape != chosen.shape:
        got = f"shape {checks.shape(losses)}" if isinstance(losses, Tensor) else type(losses).__name__
        sentence = f"variant must return a loss of each pair, shape {checks.shape(chosen)}, got {got}"
        checks.fail(ShapeError, name, sentence)
    return losses


def _smoothed(share: float, flipped: float, x: Tensor) -> Tensor:
    """Return −share · log σ(x) − flipped · log σ(−x), with a second term of 0 if flipped is 0, as 0 · ∞ is NaN."""
    loss = -share * F.logsigmoid(x)
    return loss - flipped * F.logsigmoid(-x) if flipped else loss


def _check_smoothing(name: str, variant: str, label_smoothing: float) -> None:
    checks.fraction(name, "label_smoothing", label_smoothing)
    if variant == "robust" and label_smoothing >= 0.5:
        sentence = f"label_smoothing must be below 0.5 with variant='robust', got {label_smoothing}"
        checks.fail(OptionError, name, sentence)
    if variant == "exo" and not 0.0 < label_smoothing < 1.0:
        sentence = f"label_smoothing must be between 0 and 1 with variant='exo', got {label_smoothing}"
        checks.fail(OptionError, name, f"{sentence}; the paper takes 1e-3")
