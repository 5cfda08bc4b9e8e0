# SPDX-License-Identifier: Apache-2.0
"""Experts in one module, which Transformers runs through its experts interface: the whole module becomes one op.

`use_experts_implementation` gives their class the attributes that say how the weights are stored. The code between the
matmuls is passed over; the check finds the activation. If no candidate fits, `gated_mlp.experts` replaces the gate.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from liger_core import experts
from liger_core.op import autocast_dtype
from liger_hf import stand_in
from liger_hf.four_bits import declared, matrices_of, quantized
from liger_hf.passing import may_pass, passing, skipping
from liger_hf.patch import forward_of
from liger_hf.private_transformers import EXPERTS_CHOSEN, GATE, experts_implementation
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.experts.adapters import FACTORS, TAKES_FACTORS, added
from liger_hf.rules.experts.unlike import unlike
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, device_of, of_length, replica, sized, trial

NOTHING = "no module holds experts"
# Other implementations were chosen by the user, or by generate() for the few tokens of a step.
REPLACED = (None, "eager", "grouped_mm")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu_squared")
# Sizes of the stand-in.
EXPERTS, TOP, HIDDEN, INNER = 4, 2, 24, 40


class WeightLayout(NamedTuple):
    """The name of the packed gate and up projection, and how the weights are stored."""

    gate_up: str
    biased: bool
    transposed: bool
    interleaved: bool

    def names(self) -> tuple[str, ...]:
        matrices = (self.gate_up, "down_proj")
        return (*matrices, *(f"{name}_bias" for name in matrices)) if self.biased else matrices


class GateFunction(NamedTuple):
    """The function between the matmuls: an activation, and the module's attributes that hold its constants."""

    activation: str
    limit: str = ""
    alpha: str = ""

    def options(self, module: Any) -> dict[str, Any]:
        """Return the options of the op. With a slope, as in gpt-oss, 1 is added to up."""
        names = {"limit": self.limit, "alpha": self.alpha}
        constants = {option: getattr(module, name) for option, name in names.items() if name}
        return {"activation": self.activation, **constants, **({"shift": 1.0} if self.alpha else {})}

    def words(self) -> str:
        plain = "" if self.activation == "silu" else f"activation={self.activation!r}"
        limit, alpha = self.limit and f"limited by {self.limit}", self.alpha and f"with the slope {self.alpha}"
        return ", ".join(filter(None, (plain, limit, alpha)))


def look(module: nn.Module) -> Found | None:
    layout = declared(module)
    if layout is None:
        reason = unlike(module)
        return None if reason is None else Found("experts", refusal=reason)
    has_gate, has_bias, is_transposed, is_concatenated = layout
    weights = WeightLayout("gate_up_proj" if has_gate else "up_proj", has_bias, is_transposed, not is_concatenated)
    if not all(isinstance(getattr(module, name, None), Tensor) for name in weights.names()):
        return None
    original = forward_of(module)
    refusal = original if isinstance(original, str) else _refusal(module)
    if refusal is not None or isinstance(original, str):
        return Found("experts", refusal=refusal)
    first = getattr(module, weights.gate_up)
    # Each module with weights in four bits has a class of its own.
    children = (stand_in.configuration(child) for name, child in module.named_children() if name != "parametrizations")
    kind = (type_before_parametrizations(module), stand_in.settings(module), *children)
    return Found(
        "experts",
        kind=(*kind, weights, first.dtype, str(first.device)),
        original=original,
        candidates=lambda: _candidates(module, original, weights),
        cases=lambda device, dtypes: _cases(module, weights, device, dtypes),
        device=lambda: device_of(module),
        dtype=first.dtype,
    )


def _refusal(module: nn.Module) -> str | None:
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each of its experts"
    if GATE in module.__dict__:
        return f"its {GATE} was already replaced on this instance"
    name = experts_implementation(module)
    if name not in REPLACED:
        return (
            f"the experts implementation {name!r} was chosen; model.set_experts_implementation('grouped_mm') lets the "
            "op replace it"
        )
    return skipping(module.named_children())


def _units(module: nn.Module) -> Iterator[GateFunction]:
    yield from map(GateFunction, ACTIVATIONS)
    numbers = [name for name, value in vars(module).items() if isinstance(value, (int, float)) and value > 0]
    for limit in (name for name in numbers if name.endswith("limit")):
        yield GateFunction("silu", limit)
        yield from (GateFunction("silu", limit, alpha) for alpha in numbers if alpha.endswith("alpha"))


def _candidates(module: nn.Module, original: Callable[..., Any], weights: WeightLayout) -> Iterator[Candidate]:
    for unit in _units(module):
        function = _forward(original, weights, unit)
        yield Candidate(experts, unit.words(), function, partial(passing, function=function, original=original))


def _forward(original: Callable[..., Any], weights: WeightLayout, unit: GateFunction) -> Callable[..., Any]:
    # Tokens, indices, router weights; models call the last two by names of their own.
    names = tuple(inspect.signature(original).parameters)[1:]

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        is_sharded = hasattr(self._parameters.get(weights.gate_up), "device_mesh")
        if not may_pass(self) or experts_implementation(self) not in REPLACED or is_sharded:
            with added(self):
                return original(self, *args, **named)
        tokens, index, weight = (*args, *(named[name] for name in names[len(args) :]))
        gate_up, down = (matrices_of(self, name, weights.transposed) for name in weights.names()[:2])
        # In float32, where PEFT has prepared a model in 4 bits.
        biases = [getattr(self, name).to(gate_up.dtype) for name in weights.names()[2:]]
        options = {"interleaved": weights.interleaved, **unit.options(self), **_factors(self, weights, gate_up.dtype)}
        compute = _uncompiled if quantized(self, weights.gate_up) or quantized(self, "down_proj") else experts
        # As in Transformers, the dtype is that of the weights; under autocast, the op would use autocast's.
        kind = tokens.device.type
        with nullcontext() if autocast_dtype(kind) is None else torch.autocast(kind, enabled=False):
            return compute(tokens.to(gate_up.dtype), gate_up, down, index, weight, *biases, **options).to(tokens.dtype)

    forward.__dict__[TAKES_FACTORS] = True
    return forward


@torch.compiler.disable
def _uncompiled(*args: Any, **options: Any) -> Tensor:
    """Call the op outside compiled graphs, which would keep the dequantized matrices for the backward pass."""
    return experts(*args, **options)


def _factors(module: nn.Module, weights: WeightLayout, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the low-rank factors that PEFT adds to the matrices in this call, as arguments of the op."""
    factors: dict[str, Tensor] = {}
    for name, argument in ((weights.gate_up, "gate_up"), ("down_proj", "down")):
        if (adapter := module.__dict__.get(FACTORS, {}).get(name)) is not None:
            a, b = adapter.factors()
            factors |= {f"{argument}_a": a.to(dtype), f"{argument}_b": b.to(dtype)}
    return factors


def _cases(
    module: nn.Module, weights: WeightLayout, device: torch.device, dtypes: Iterable[torch.dtype]
) -> Iterator[Case]:
    draw = Draw(device)
    outer = INNER * (2 if module.has_gate else 1)
    matrices = [
        draw.normal(EXPERTS, outer, HIDDEN, scale=HIDDEN**-0.5),
        draw.normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5),
    ]
    if weights.transposed:
        matrices = [matrix.mT.contiguous() for matrix in matrices]
    biases = [draw.normal(EXPERTS, outer), draw.normal(EXPERTS, HIDDEN)] if weights.biased else []
    stored = dict(zip(weights.names(), (*matrices, *biases), strict=True))

    def run(tokens: int, dtype: torch.dtype, scale: float) -> Run:
        # The last expert gets no token.
        index = torch.stack([draw.integers(EXPERTS - 1, tokens), draw.integers(EXPERTS - 1, tokens)], dim=1)
        inputs = {"tokens": draw.normal(tokens, HIDDEN, scale=scale), "router weights": draw.positive(tokens, TOP)}
        tensors = (inputs, {"output": draw.normal(tokens, HIDDEN)}, stored)
        return _run(module, index, *({name: value.to(dtype) for name, value in named.items()} for named in tensors))

    for name, dtype, scale in sized(dtypes):
        yield Case(name, dtype, run(21, dtype, scale))
    for length in LENGTHS:
        yield of_length(length, torch.float32, run(length, torch.float32, 1.0))


def _run(module: nn.Module, index: Tensor, *tensors: dict[str, Tensor]) -> Run:
    """Return a pass through a twin of the module; the tensors are inputs, upstream gradient and weights by name."""

    def call(function: Callable[..., Any], drawn: Any, parameters: Any, cast: Any) -> dict[str, Tensor]:
        twin = replica(module, parameters=parameters)
        if "parametrizations" in twin._modules:
            twin.__class__ = type_before_parametrizations(module)
            del twin._modules["parametrizations"]
        if hasattr(twin, "num_experts"):
            twin.num_experts = EXPERTS
        # The grouped matmul of torch does not support float64.
        twin.config = copy.copy(module.config)
        setattr(twin.config, EXPERTS_CHOSEN, "eager")
        return {"output": function(twin, drawn["tokens"], index, drawn["router weights"])}

    return trial(call, *tensors)


RULE = Rule("experts", look, ("experts",), NOTHING)
