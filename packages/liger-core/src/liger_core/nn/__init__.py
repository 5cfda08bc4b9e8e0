# SPDX-License-Identifier: Apache-2.0
"""Ops and losses as modules, for models of your own.

Their options go to the constructor, their tensors to the call. Parameters have the initial values and the names in a `state_dict` that
they have in torch and in Transformers.
"""

from liger_core.nn.embedding import Embedding
from liger_core.nn.functions import (
    CrossEntropyLoss,
    FunctionModule,
    GeGLU,
    JSDLoss,
    KLDivLoss,
    LinearCrossEntropyLoss,
    LinearDivergenceLoss,
    LogProb,
    MergeStreams,
    MixStreams,
    ProjectStreams,
    ReLUSquared,
    RoPE,
    Sinkhorn,
    Softmax,
    Sparsemax,
    SwiGLU,
    TotalVariationLoss,
    function_module,
)
from liger_core.nn.losses import (
    CosineDistillationLoss,
    CPOLoss,
    DFTLoss,
    DPOLoss,
    GRPOLoss,
    KTOLoss,
    ORPOLoss,
    PPOLoss,
    SimPOLoss,
    TopKDistillationLoss,
)
from liger_core.nn.mlp import GatedMLP
from liger_core.nn.norms import (
    AddLayerNorm,
    AddRMSNorm,
    DyT,
    GatedRMSNorm,
    GroupNorm,
    LayerNorm,
    ModulatedLayerNorm,
    ModulatedRMSNorm,
    Norm,
    PolyNorm,
    RMSNorm,
    norm_module,
)
from liger_core.nn.rotary import QKNormRoPE, RotaryEmbedding
from liger_core.nn.streams import AttentionResidual, HyperConnection

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "AttentionResidual",
    "CPOLoss",
    "CosineDistillationLoss",
    "CrossEntropyLoss",
    "DFTLoss",
    "DPOLoss",
    "DyT",
    "Embedding",
    "FunctionModule",
    "GRPOLoss",
    "GatedMLP",
    "GatedRMSNorm",
    "GeGLU",
    "GroupNorm",
    "HyperConnection",
    "JSDLoss",
    "KLDivLoss",
    "KTOLoss",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearDivergenceLoss",
    "LogProb",
    "MergeStreams",
    "MixStreams",
    "ModulatedLayerNorm",
    "ModulatedRMSNorm",
    "Norm",
    "ORPOLoss",
    "PPOLoss",
    "PolyNorm",
    "ProjectStreams",
    "QKNormRoPE",
    "RMSNorm",
    "ReLUSquared",
    "RoPE",
    "RotaryEmbedding",
    "SimPOLoss",
    "Sinkhorn",
    "Softmax",
    "Sparsemax",
    "SwiGLU",
    "TopKDistillationLoss",
    "TotalVariationLoss",
    "function_module",
    "norm_module",
]

# The place of a class in a pickled model, whatever file it is in.
for _name in __all__:
    globals()[_name].__module__ = __name__
