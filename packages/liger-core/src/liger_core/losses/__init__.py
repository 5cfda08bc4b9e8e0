# SPDX-License-Identifier: Apache-2.0
"""Preference, policy, distillation and fine-tuning losses; a Head computes their log-probabilities without logits."""

from liger_core.losses.averaging import Averaging
from liger_core.losses.dft import DFTMetrics, dft
from liger_core.losses.distillation import cosine_distillation, topk_distillation
from liger_core.losses.head import Head
from liger_core.losses.kto import KTOMetrics, kto, kto_baseline
from liger_core.losses.off_policy import OffPolicy
from liger_core.losses.penalty import Penalty
from liger_core.losses.policy import PolicyMetrics, grpo, ppo
from liger_core.losses.preference import Likelihood, PreferenceMetrics, cpo, dpo, orpo, simpo
from liger_core.losses.surrogates import Cispo, Clip, Sapo, Vespo
from liger_core.losses.top_classes import top_classes

__all__ = [
    "Averaging",
    "Cispo",
    "Clip",
    "DFTMetrics",
    "Head",
    "KTOMetrics",
    "Likelihood",
    "OffPolicy",
    "Penalty",
    "PolicyMetrics",
    "PreferenceMetrics",
    "Sapo",
    "Vespo",
    "cosine_distillation",
    "cpo",
    "dft",
    "dpo",
    "grpo",
    "kto",
    "kto_baseline",
    "orpo",
    "ppo",
    "simpo",
    "top_classes",
    "topk_distillation",
]
