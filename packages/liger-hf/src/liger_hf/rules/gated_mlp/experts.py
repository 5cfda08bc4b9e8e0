# SPDX-License-Identifier: Apache-2.0
"""The gate of experts that the op `experts` does not replace: Transformers calls it between two grouped matmuls.

Only the gate, a method of the module, is replaced; the interface, its implementations and the weights stay.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from liger_hf.passing import PASSED, may_pass, passed_over, skipping
from liger_hf.patch import MARK, Patch, forward_of, replaced_method
from liger_hf.private_transformers import GATE, experts_functions, experts_implementation
from liger_hf.rebinding import innermost
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.gated_mlp.rule import NOTHING, GateFunction, gate_functions
from liger_hf.stand_in import Draw, Run, configuration, device_of, row_cases, trial, weight_kind

INNER = 40


def look(module: nn.Module) -> Found | None:
    gate = getattr(type(module), GATE, None)
    if gate is None or getattr(module, "has_gate", None) is False:
        return None
    runs = _implementation(module)
    reason = replaced_method(module, GATE) or (runs if isinstance(runs, str) else skipping(module.named_children()))
    if reason is not None:
        return Found("swiglu", refusal=reason, fallback=True)
    return Found(
        "swiglu",
        kind=(configuration(module), runs, *weight_kind(module)),
        original=gate,
        candidates=lambda: _candidates(module),
        cases=lambda device, dtypes: row_cases(partial(_run, module), Draw(device), 2 * INNER, INNER, dtypes),
        device=lambda: device_of(module),
        dtype=weight_kind(module)[0],
        fallback=True,
    )


def _implementation(module: nn.Module) -> Callable[..., Any] | str:
    """Return the function that runs the experts, or the reason why replacing their gate has no effect."""
    name = experts_implementation(module)
    forward = forward_of(module)
    if isinstance(forward, str):
        return forward
    runs: Any = innermost(experts_functions.get(name) or forward)
    if isinstance(runs, FunctionType) and GATE not in runs.__code__.co_names:
        return (
            f"the experts implementation {name!r} does not call their gate; "
            "model.set_experts_implementation('grouped_mm') does"
        )
    return runs


def _candidates(module: nn.Module) -> Iterator[Candidate]:
    for op, label, join in gate_functions(module):
        function = _gate(join, getattr(type(module), GATE))
        yield Candidate(op, label, function, partial(_installed, function=function))


def _installed(module: nn.Module, function: Callable[..., Any]) -> list[Patch]:
    return [Patch(module, PASSED, passed_over(module, ())), Patch(module, GATE, MethodType(function, module))]


def _gate(join: GateFunction, original: Callable[..., Any]) -> Callable[..., Any]:
    def _apply_gate(self: nn.Module, gate_up: Tensor) -> Tensor:
        current = getattr(type(self), GATE)
        return join(self, (gate_up,), False) if current is original and may_pass(self) else current(self, gate_up)

    _apply_gate.__dict__[MARK] = True
    return _apply_gate


def _run(module: nn.Module, x: Tensor, upstream: Tensor) -> Run:
    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        return {"output": function(module, inputs["gate and up"])}

    return trial(call, {"gate and up": x.flatten(0, -2)}, {"output": upstream.flatten(0, -2)})


RULE = Rule("gate of experts", look, ("swiglu", "geglu", "relu_squared"), NOTHING)
