# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs: down(act(gate(x)) · up(x)), with gate and up as two projections or packed into one, gate first.

Projections, norms and dropouts are called as modules, in the original order, so their adapters, hooks and quantization
keep working; only the function between the projections is replaced. The activation is not called: if it gets hooks or
is replaced, the module runs its own forward.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import Op, geglu, relu_squared, swiglu
from liger_hf import stand_in
from liger_hf.passing import may_pass, passing, skipping
from liger_hf.patch import forward_of
from liger_hf.rule import Candidate, Dtypes, Found, Rule
from liger_hf.rules.gated_mlp.ownership import unshared
from liger_hf.rules.gated_mlp.parts import HIDDEN, INPUTS, Layout, MLPParts, watch
from liger_hf.rules.lora.together import together
from liger_hf.stand_in import Case, Draw, Run, device_of, replica, row_cases, trial, weight_kind

NOTHING = "no module is a gated MLP: none takes one tensor through two or three Linear children around an activation"
ACTIVATIONS: tuple[tuple[Op[..., Any], dict[str, Any]], ...] = (
    (swiglu, {}),
    (geglu, {"approximate": "tanh"}),
    (geglu, {"approximate": "none"}),
)
# Option of swiglu → the attribute of Falcon-H1 that scales the gate, or the output of down.
MULTIPLIERS = {"gate_scale": "gate_multiplier", "scale": "down_multiplier"}


def look(module: nn.Module) -> Found | None:
    linears = {name: child for name, child in module._modules.items() if child is not None and _is_linear(child)}
    layout = _layout(linears)
    if layout is None or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    original = forward_of(module)
    if isinstance(original, str):
        return Found("swiglu", refusal=original)
    arguments = list(inspect.signature(original).parameters.values())[1:]
    if len(arguments) != 1:
        return None
    others = {name: child for name, child in module._modules.items() if child is not None and name not in linears}
    passed = {n: c for n, c in others.items() if not isinstance(c, nn.Dropout) and next(c.parameters(), None) is None}
    between = {name: child for name, child in others.items() if name not in passed}
    if (reason := skipping(passed.items())) is not None:
        return Found("swiglu", refusal=reason)
    parts = MLPParts(linears, between, passed, layout)
    first = next(iter(linears.values()))
    children = tuple((name, stand_in.configuration(child)) for name, child in others.items())
    return Found(
        "swiglu",
        kind=(type(module), stand_in.settings(module), layout, children, *weight_kind(first)),
        original=original,
        candidates=lambda: _candidates(module, original, arguments[0].name, parts),
        cases=lambda device, dtypes: _cases(module, original, parts, device, dtypes),
        device=lambda: device_of(module),
        dtype=weight_kind(first)[0],
    )


def _is_linear(child: nn.Module) -> bool:
    return isinstance(getattr(child, "in_features", None), int) and isinstance(
        getattr(child, "out_features", None), int
    )


def _layout(linears: dict[str, nn.Module]) -> Layout | None:
    """Return ((gate, up) in the order of definition, or (packed,); down), recognized by their shapes, or None."""
    sizes: dict[str, tuple[Any, Any]] = {
        name: (child.in_features, child.out_features) for name, child in linears.items()
    }
    for down, (inner, hidden) in reversed(sizes.items()):
        rest = tuple(name for name in sizes if name != down)
        if len(rest) == 2 and all(sizes[name] == (hidden, inner) for name in rest):
            return rest, down
        if len(rest) == 1 and sizes[rest[0]] == (hidden, 2 * inner):
            return rest, down
    return None


# A function of the module, (gate, up) or both packed in one tensor, and whether it may overwrite them.
GateFunction = Callable[[nn.Module, tuple[Tensor, ...], bool], Tensor]


def gate_functions(module: nn.Module) -> Iterator[tuple[Op[..., Any], str, GateFunction]]:
    """Yield the functions by which a module may join gate and up, each with its op and its description."""
    for op, options in ACTIVATIONS:
        words = ", ".join(f"{name}={value!r}" for name, value in options.items())
        yield op, words, partial(_joined, partial(op, **options))
    yield relu_squared, "with a gate", _squared
    numbers = {
        name: value for name, value in vars(module).items() if isinstance(value, (int, float)) and math.isfinite(value)
    }
    for limit in (name for name, value in numbers.items() if name.endswith("limit") and value > 0):
        yield swiglu, f"limited by {limit}", partial(_scaled, {"limit": limit}, {})
        for alpha in (name for name in numbers if name.endswith("alpha")):
            clamped = partial(_scaled, {"limit": limit, "alpha": alpha}, {"shift": 1.0})
            yield swiglu, f"limited by {limit}, with {alpha} and up + 1", clamped
    multipliers = {option: name for option, name in MULTIPLIERS.items() if name in numbers}
    if multipliers:
        yield swiglu, f"scaled by {' and '.join(multipliers.values())}", partial(_scaled, multipliers, {})


def _joined(op: Callable[..., Tensor], module: nn.Module, parts: tuple[Tensor, ...], overwrite: bool) -> Tensor:
    return op(*parts, overwrite=overwrite)


def _squared(module: nn.Module, parts: tuple[Tensor, ...], overwrite: bool) -> Tensor:
    return relu_squared(*(parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)))


def _scaled(
    names: dict[str, str], options: dict[str, float], module: nn.Module, parts: tuple[Tensor, ...], overwrite: bool
) -> Tensor:
    """Call swiglu with options from the module's attributes, which are read in every call.

    names  option of swiglu → attribute
    """
    arguments: dict[str, Any] = {option: getattr(module, name) for option, name in names.items()} | options
    return swiglu(*parts, **arguments, overwrite=overwrite)


def _candidates(module: nn.Module, original: Callable[..., Any], argument: str, parts: MLPParts) -> Iterator[Candidate]:
    inputs, down = parts.layout
    # In a packed projection, either half may be the gate.
    orders = ((inputs, False), (inputs[::-1], False)) if len(inputs) == 2 else ((inputs, False), (inputs, True))
    first, rest = parts.around()
    for op, label, join in gate_functions(module):
        for order, swapped in orders:
            function = _forward(partial(_swapped, join) if swapped else join, original, argument, (first, order, rest))
            called = (*inputs, down, *parts.between)
            install = partial(passing, function=function, original=original, called=called)
            yield Candidate(op, label, function, install)


def _swapped(join: GateFunction, module: nn.Module, parts: tuple[Tensor, ...], overwrite: bool) -> Tensor:
    up, gate = parts[0].chunk(2, dim=-1)
    return join(module, (gate, up), False)


# The children that a forward calls: before gate and up, gate and up or the packed one, and after them.
Chain = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _forward(join: GateFunction, original: Callable[..., Any], argument: str, chain: Chain) -> Callable[..., Any]:
    first, inputs, rest = chain

    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Any:
        if not may_pass(self):
            return original(self, *args, **named)
        (x,) = args or (named.pop(argument),)
        for name in first:
            x = getattr(self, name)(x)
        parts = tuple(together([getattr(self, name) for name in inputs], x))
        y = join(self, parts, unshared(parts))
        # Freed before the rest runs.
        del parts
        for name in rest:
            y = getattr(self, name)(y)
        return y

    return forward


def _cases(
    module: nn.Module, original: Callable[..., Any], parts: MLPParts, device: torch.device, dtypes: Dtypes
) -> Iterator[Case]:
    stand_ins = parts.stand_ins(device)
    # Before the candidates are made, which call the children in this order.
    watch(module, original, parts, stand_ins)
    layers: dict[str, Any] = {name: stand_ins[name] for name in parts.linears}
    others = {name: child for name, child in stand_ins.items() if name not in layers}
    return row_cases(partial(_run, module, layers, others), Draw(device, INPUTS), HIDDEN, HIDDEN, dtypes)


def _run(
    module: nn.Module, layers: dict[str, nn.Linear], others: dict[str, nn.Module], x: Tensor, upstream: Tensor
) -> Run:
    """Return a pass through a twin of the module with these projections, in the dtype of x, and these other modules."""

    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        parameters = {
            name: {n: weights[f"{name}.{n}"] for n, _ in layer.named_parameters()} for name, layer in layers.items()
        }
        children = {name: replica(layer, parameters=parameters[name]) for name, layer in layers.items()}
        return {"output": function(replica(module, children={**children, **others}), inputs["x"])}

    weights = {
        f"{name}.{n}": p.detach().to(x.dtype) for name, layer in layers.items() for n, p in layer.named_parameters()
    }
    return trial(call, {"x": x}, {"output": upstream}, weights)


RULE = Rule("gated_mlp", look, ("swiglu", "geglu", "relu_squared"), NOTHING)
