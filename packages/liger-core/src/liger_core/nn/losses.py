# SPDX-License-Identifier: Apache-2.0
"""The losses of liger_core.losses as modules, each with a call by which its options are checked: losses check what they compute with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_core import losses
from liger_core.nn.functions import Calls, function_module


def _call(*names: str, **others: Callable[[], Any]) -> Calls:
    """Two answers of one token: log-probabilities by these names, and their mask."""
    return lambda: [
        {**{name: _zeros(2, 1) for name in names}, "mask": _zeros(2, 1).bool(), **{name: make() for name, make in others.items()}}
    ]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _with_entropy() -> tuple[Tensor, Tensor]:
    """A policy that brings its entropy, which options may ask for."""
    return _zeros(2, 1), _zeros(2, 1)


DPOLoss = function_module("DPOLoss", losses.dpo, _call("policy", "reference"))
CPOLoss = function_module("CPOLoss", losses.cpo, _call("policy"))
SimPOLoss = function_module("SimPOLoss", losses.simpo, _call("policy"))
ORPOLoss = function_module("ORPOLoss", losses.orpo, _call("policy"))
KTOLoss = function_module("KTOLoss", losses.kto, _call("policy", "reference", desirable=lambda: _zeros(2).bool()))
GRPOLoss = function_module("GRPOLoss", losses.grpo, _call("old", "advantages", policy=_with_entropy))
PPOLoss = function_module("PPOLoss", losses.ppo, _call("old", "advantages", policy=_with_entropy))
DFTLoss = function_module("DFTLoss", losses.dft, _call("policy"))
TopKDistillationLoss = function_module(
    "TopKDistillationLoss", losses.topk_distillation, lambda: [{"log_prob": _zeros(2, 1), "teacher_log_prob": _zeros(2, 1)}]
)
CosineDistillationLoss = function_module("CosineDistillationLoss", losses.cosine_distillation)
