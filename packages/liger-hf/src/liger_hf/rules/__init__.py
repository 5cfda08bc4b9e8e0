# SPDX-License-Identifier: Apache-2.0
"""How one kind of module becomes an op: one file a rule, none knows a model by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from liger_hf.rules import experts, gated_mlp, head, norm, residual, rotary
from liger_hf.verification import Found


@dataclass(frozen=True)
class Rule:
    """`look` returns what it makes of a module, or None if the module is not its business.

    ops      the names of the ops that it can put in
    nothing  what the report says when no module was its business
    """

    look: Callable[[nn.Module], Found | None]
    ops: tuple[str, ...]
    nothing: str


RULES = (
    Rule(norm.look, ("rms_norm", "layer_norm"), norm.NOTHING),
    Rule(gated_mlp.look, ("swiglu", "geglu"), gated_mlp.NOTHING),
    Rule(experts.look, ("swiglu", "geglu"), gated_mlp.NOTHING),
    Rule(rotary.look, ("rope",), rotary.NOTHING),
    Rule(residual.look, ("add_rms_norm",), residual.NOTHING),
    Rule(head.look, ("linear_cross_entropy",), head.NOTHING),
)
