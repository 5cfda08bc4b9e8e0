# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from liger_core import checks, ops
from liger_core.nn.arguments import Parameter, check_known, parameters_of, with_options
from liger_core.nn.module import Module, check_options, check_size, check_switches, meta
from liger_core.op import Op


class Gate(NamedTuple):
    """The op of an activation, which of its options the name of the activation says, and whether it takes gate and up as one tensor."""

    op: Op[..., Any]
    fixed: dict[str, Any]
    packs: bool = True

    @property
    def options(self) -> dict[str, Parameter]:
        return {name: p for name, p in parameters_of(self.op).items() if p.kind is Parameter.KEYWORD_ONLY and name not in self.fixed}


GATES = {
    "silu": Gate(ops.swiglu, {}),
    "gelu_tanh": Gate(ops.geglu, {"approximate": "tanh"}),
    "gelu_pytorch_tanh": Gate(ops.geglu, {"approximate": "tanh"}),
    "gelu": Gate(ops.geglu, {"approximate": "none"}),
    "relu_squared": Gate(ops.relu_squared, {}, packs=False),
}
_OPTIONS = {name: parameter for gate in GATES.values() for name, parameter in gate.options.items()}


class GatedMLP(Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, with the names of Llama, or of Phi-3 if gate and up are packed.

    hidden_size        columns of x and of the result
    intermediate_size  columns between
    activation         "silu", "gelu_tanh" (Transformers also calls it "gelu_pytorch_tanh"), "gelu" or "relu_squared"
    bias               whether the Linears have one
    packed             gate and up are one Linear, `gate_up_proj`
    device, dtype      of the parameters

    limit, alpha, shift, gate_scale, scale
                       for "silu" alone, see `swiglu`: gpt-oss has limit=7.0, alpha=1.702 and shift=1.0; Falcon-H1 calls gate_scale and scale
                       the gate and down multipliers (scale comes before down_proj and its bias)
    overwrite          not for "relu_squared": a backward pass that frees its graph may write over the outputs of gate_proj and up_proj, if no
                       hook keeps them

    The call takes x (..., hidden_size) and returns the same shape. Parameters begin as those of `torch.nn.Linear`.
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    gate_up_proj: nn.Linear

    @with_options(_OPTIONS)
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Literal["silu", "gelu_tanh", "gelu_pytorch_tanh", "gelu", "relu_squared"] = "silu",
        bias: bool = False,
        packed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        super().__init__(**sizes, activation=activation, bias=bias, packed=packed, **options)
        check_size(self, **sizes)
        check_switches(self, bias=bias, packed=packed)
        checks.choice("GatedMLP", "activation", activation, tuple(GATES))
        self.activation, self.packed, self.options = activation, packed, options
        _check(GATES[activation], activation, options)
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        for name in ("gate_up_proj",) if packed else ("gate_proj", "up_proj"):
            self.add_module(name, nn.Linear(hidden_size, (2 if packed else 1) * intermediate_size, **place))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        gate = GATES[self.activation]
        projected = (self.gate_up_proj(x),) if self.packed else (self.gate_proj(x), self.up_proj(x))
        if self.packed and not gate.packs:
            projected = projected[0].chunk(2, dim=-1)
        result: Tensor = self.down_proj(gate.op(*projected, **gate.fixed, **self.options))
        return result


def _check(gate: Gate, activation: str, options: dict[str, Any]) -> None:
    check_known("GatedMLP", options, gate.options, f"options of activation={activation!r}")
    if options:
        check_options(gate.op.check, [{"gate": meta(1, 1), "up": meta(1, 1)}], options)
