# SPDX-License-Identifier: Apache-2.0
"""TRL 1.16: the log-probabilities and divergences of its trainers, in tiles of tokens and of the vocabulary."""

import importlib
from typing import Any

import torch
from torch import Tensor

from liger_bench.peers import Peer, by_name, missing, teacher_share, with_one_target

# The default number of classes in a tile of its trainers.
CLASSES = 32768


def unavailable(device: torch.device) -> str | None:
    return missing("trl", "trl==1.16.0")


def peers() -> list[Peer]:
    tokens = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    divergences = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def linear_log_prob(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        return_entropy: bool = False,
        temperature: float = 1.0,
        softcap: float | None = None,
    ) -> Any:
        with_one_target(hidden, target)
        outputs = ("log_probs", "entropy") if return_entropy else ("log_probs",)
        log_prob, entropy, *_ = tokens.apply(hidden, weight, None, target, temperature, CLASSES, softcap, 1.0, outputs)
        return (log_prob, entropy) if return_entropy else log_prob

    def linear_divergence(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, kind: str = "forward_kl",
        beta: float = 0.5, temperature: float = 1.0, reduction: str = "mean",
    ) -> Any:  # fmt: skip
        share = teacher_share(kind, beta)
        loss, _ = divergences.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, share, temperature)
        return loss if reduction == "none" else loss.mean()

    return [Peer("trl", by_name(linear_log_prob, linear_divergence))]
