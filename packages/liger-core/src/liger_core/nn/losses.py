# SPDX-License-Identifier: Apache-2.0
"""The losses of liger_core.losses as modules."""

from __future__ import annotations

from liger_core import losses
from liger_core.nn.functions import function_module

DPOLoss = function_module("DPOLoss", losses.dpo)
CPOLoss = function_module("CPOLoss", losses.cpo)
SimPOLoss = function_module("SimPOLoss", losses.simpo)
ORPOLoss = function_module("ORPOLoss", losses.orpo)
KTOLoss = function_module("KTOLoss", losses.kto)
GRPOLoss = function_module("GRPOLoss", losses.grpo)
PPOLoss = function_module("PPOLoss", losses.ppo)
DFTLoss = function_module("DFTLoss", losses.dft)
TopKDistillationLoss = function_module("TopKDistillationLoss", losses.topk_distillation)
CosineDistillationLoss = function_module("CosineDistillationLoss", losses.cosine_distillation)
