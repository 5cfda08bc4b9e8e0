# SPDX-License-Identifier: Apache-2.0
"""Modules for models of your own.

Parameters have the names and initial values that they have in torch.nn or Transformers, so checkpoints load.
"""

from liger_core.nn.embedding import Embedding
from liger_core.nn.losses import LinearCrossEntropyLoss, LogProb
from liger_core.nn.mlp import Experts, GatedMLP
from liger_core.nn.norms import AddLayerNorm, AddRMSNorm, DyT, GatedRMSNorm, GroupNorm, LayerNorm, PolyNorm, RMSNorm
from liger_core.nn.rotary import RotaryEmbedding
from liger_core.nn.streams import AttentionResidual, HyperConnection

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "AttentionResidual",
    "DyT",
    "Embedding",
    "Experts",
    "GatedMLP",
    "GatedRMSNorm",
    "GroupNorm",
    "HyperConnection",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LogProb",
    "PolyNorm",
    "RMSNorm",
    "RotaryEmbedding",
]
