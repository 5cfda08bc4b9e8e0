# SPDX-License-Identifier: Apache-2.0
"""DFT: supervised fine-tuning that scales each token by its own probability."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.losses.averaging import TOKEN, Averaging
from liger_core.losses.head import LogProbs
from liger_core.losses.numerics import weighted
from liger_core.losses.tokens import tokens_of


class DFTMetrics(NamedTuple):
    """The unscaled negative log-likelihood, averaged like the loss, and the tokens' mean probability; both detached."""

    nll: Tensor
    probability: Tensor


def dft(policy: LogProbs, *, mask: Tensor | None = None, averaging: Averaging = TOKEN) -> tuple[Tensor, DFTMetrics]:
    """Compute the loss of dynamic fine-tuning: the cross entropy of each token times its detached probability.

        loss = −mean over tokens of sg(p) · log p,   p = π(y_t | y_<t, x)

    policy     (B, T) log-probabilities of the tokens, or a Head
    mask       (B, T) True where a token counts; from the targets of a Head by default, and to be given with
               log-probabilities
    averaging  a mean over tokens by default
    returns    (loss, DFTMetrics)

    Without a counted token the loss is 0, with zero gradients. Raises ShapeError, DtypeError, OptionError for arguments
    that do not fit. Wu et al. 2025, arXiv:2508.05629.
    """
    checks.instance("losses.dft", "averaging", averaging, Averaging)
    tokens = tokens_of("losses.dft", policy, mask)
    p = tokens.log_prob.detach().exp()
    loss = averaging(-weighted(p, tokens.log_prob), tokens.mask)
    with torch.no_grad():
        return loss, DFTMetrics(averaging(-tokens.log_prob.detach(), tokens.mask), averaging.metric(p, tokens.mask))
