# SPDX-License-Identifier: Apache-2.0
"""How one kind of module becomes an op: one folder a rule, none knows a model by its name."""

from liger_hf.rule import Rule
from liger_hf.rules.gated_unit import experts
from liger_hf.rules.gated_unit import rule as gated_unit
from liger_hf.rules.head import rule as head
from liger_hf.rules.norm import rule as norm
from liger_hf.rules.residual import rule as residual
from liger_hf.rules.rotary import rule as rotary

RULES = (
    Rule("norm", norm.look, ("rms_norm", "layer_norm"), norm.NOTHING),
    Rule("gated_unit", gated_unit.look, ("swiglu", "geglu"), gated_unit.NOTHING),
    Rule("experts", experts.look, ("swiglu", "geglu"), gated_unit.NOTHING),
    Rule("rotary", rotary.look, ("rope",), rotary.NOTHING),
    Rule("residual", residual.look, ("add_rms_norm",), residual.NOTHING),
    Rule("head", head.look, ("linear_cross_entropy",), head.NOTHING),
)
