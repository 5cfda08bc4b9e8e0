# SPDX-License-Identifier: Apache-2.0
"""The rules that replace one kind of module each, one folder per rule; none knows a model by its name."""

from liger_hf.rules.activation.rule import RULE as ACTIVATION
from liger_hf.rules.embedding.rule import RULE as EMBEDDING
from liger_hf.rules.experts.rule import RULE as EXPERTS
from liger_hf.rules.gated_mlp.experts import RULE as GATE
from liger_hf.rules.gated_mlp.gate import RULE as GATE_WITHIN
from liger_hf.rules.gated_mlp.rule import RULE as GATED_MLP
from liger_hf.rules.head.rule import RULE as HEAD
from liger_hf.rules.hyper_connection.rule import RULE as HYPER_CONNECTION
from liger_hf.rules.lora.rule import RULE as LORA
from liger_hf.rules.modulation.rule import RULE as MODULATION
from liger_hf.rules.norm.rule import RULE as NORM
from liger_hf.rules.residual.rule import LAYER_NORM as RESIDUAL_LAYER_NORM
from liger_hf.rules.residual.rule import RULE as RESIDUAL
from liger_hf.rules.rotary.rule import RULE as ROTARY
from liger_hf.rules.rotary_norm.rule import RULE as ROTARY_NORM

RULES = (
    NORM,
    GATED_MLP,
    EXPERTS,
    GATE,
    ACTIVATION,
    HYPER_CONNECTION,
    # Before the rule for the rotary embedding alone.
    ROTARY_NORM,
    LORA,
    ROTARY,
    RESIDUAL,
    RESIDUAL_LAYER_NORM,
    MODULATION,
    # After the rules for sums and norms, which find more in a forward.
    GATE_WITHIN,
    HEAD,
    EMBEDDING,
)
