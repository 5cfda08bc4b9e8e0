# SPDX-License-Identifier: Apache-2.0
"""Gated units: down(act(gate(x)) · up(x)), with gate and up as two projections or packed into one, gate first.

The module's own projections are called as modules, so that adapters, hooks and quantisation on them keep working; only what
happens between them is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from liger_core import Op, geglu, swiglu
from liger_hf.patch import forward_of, replacement
from liger_hf.replica import Draw, device_of, replica
from liger_hf.verification import Candidate, Case, Found, Results

NOTHING = "no module is a gated unit: none takes one tensor through two or three Linear children around an activation"
ACTIVATIONS: tuple[tuple[Op[..., Any], dict[str, Any]], ...] = (
    (swiglu, {}),
    (geglu, {"approximate": "tanh"}),
    (geglu, {"approximate": "none"}),
)
# Sizes of the stand-in; an op that works elementwise does not care.
HIDDEN, INNER = 24, 40


def look(module: nn.Module) -> Found | None:
    linears = {name: child for name, child in module._modules.items() if child is not None and _is_linear(child)}
    layout = _layout(linears)
    if layout is None:
        return None
    original = forward_of(module)
    if isinstance(original, str):
        return Found("swiglu", refusal=original)
    arguments = list(inspect.signature(original).parameters.values())[1:]
    if len(arguments) != 1:
        return None
    for name, child in module._modules.items():
        if child is None or name in linears:
            continue
        if isinstance(child, nn.Dropout) and child.p > 0:
            return Found("swiglu", refusal=f"dropout with p={child.p:g} works between its projections ({name})")
        if next(child.parameters(), None) is not None:
            return Found("swiglu", refusal=f"{name} ({type(child).__name__}) has weights of its own between the projections")
    first = next(iter(linears.values()))
    weight = next((p for p in first.parameters() if p.is_floating_point()), None)
    others = tuple((name, type(child)) for name, child in module._modules.items() if name not in linears)
    return Found(
        "swiglu",
        kind=(
            type(module),
            layout,
            others,
            _configured(module),
            weight.dtype if weight is not None else None,
            str(weight.device) if weight is not None else "",
        ),
        original=original,
        candidates=lambda: _candidates(original, arguments[0].name, layout),
        cases=lambda device, dtypes: _cases(module, linears, layout, device, dtypes),
        device=lambda: device_of(module),
        dtype=weight.dtype if weight is not None else torch.float32,
    )


Layout = tuple[tuple[str, ...], str]


def _is_linear(child: nn.Module) -> bool:
    return isinstance(getattr(child, "in_features", None), int) and isinstance(getattr(child, "out_features", None), int)


def _layout(linears: dict[str, nn.Module]) -> Layout | None:
    """((gate and up, in the order of definition, or the packed one), down), by shape alone."""
    sizes: dict[str, tuple[Any, Any]] = {name: (child.in_features, child.out_features) for name, child in linears.items()}
    for down, (inner, hidden) in reversed(sizes.items()):
        rest = tuple(name for name in sizes if name != down)
        if len(rest) == 2 and all(sizes[name] == (hidden, inner) for name in rest):
            return rest, down
        if len(rest) == 1 and sizes[rest[0]] == (hidden, 2 * inner):
            return rest, down
    return None


def _configured(module: nn.Module) -> tuple[Any, ...]:
    """What tells two instances of one class apart: the activation, if it is no child."""
    return tuple(sorted((name, getattr(value, "__name__", "")) for name, value in vars(module).items() if inspect.isroutine(value)))


def _candidates(original: Callable[..., Any], argument: str, layout: Layout) -> Iterator[Candidate]:
    inputs, down = layout
    for op, options in ACTIVATIONS:
        label = ", ".join(f"{name}={value!r}" for name, value in options.items())
        for order in (inputs, inputs[::-1])[: len(inputs)]:
            function = _forward(partial(op, **options) if options else op, argument, order, down)
            yield Candidate(op, label, function, lambda module, function=function: [replacement(module, function, original)])  # type: ignore[misc]


def _forward(op: Callable[..., Any], argument: str, inputs: tuple[str, ...], down: str) -> Callable[..., Any]:
    if len(inputs) == 1:
        (packed,) = inputs

        def forward_packed(self: nn.Module, *args: Tensor, **named: Tensor) -> Any:
            (x,) = args or (named.pop(argument),)
            inner = getattr(self, packed)
            return getattr(self, down)(op(inner(x), overwrite=unobserved(inner)))

        return forward_packed
    gate, up = inputs

    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Any:
        (x,) = args or (named.pop(argument),)
        first, second = getattr(self, gate), getattr(self, up)
        return getattr(self, down)(op(first(x), second(x), overwrite=unobserved(first, second)))

    return forward


def unobserved(*modules: nn.Module) -> bool:
    """No hook sees, and so might keep, what these modules return."""
    return not (global_hooks._global_forward_hooks or any(module._forward_hooks for module in modules))


def _cases(
    module: nn.Module, linears: dict[str, nn.Module], layout: Layout, device: torch.device, dtypes: Iterable[torch.dtype]
) -> Iterator[Case]:
    draw = Draw(device)
    inputs, down = layout
    sizes = {name: (HIDDEN, INNER * (3 - len(inputs))) for name in inputs} | {down: (INNER, HIDDEN)}
    layers = {name: draw.linear(*sizes[name], bias=getattr(child, "bias", None) is not None) for name, child in linears.items()}
    # Large enough that the curvature of the activation, by which its variants differ, matters.
    x, upstream = draw.normal(2, 9, HIDDEN, scale=2.0), draw.normal(2, 9, HIDDEN)
    for dtype in dtypes:
        yield Case(str(dtype).removeprefix("torch."), dtype, _run(module, layers, x.to(dtype), upstream.to(dtype), dtype))


def _run(
    module: nn.Module, layers: dict[str, nn.Linear], x: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Callable[[Callable[..., Any], bool], Results]:
    def run(function: Callable[..., Any], exact: bool) -> Results:
        wide = torch.float64 if exact else dtype
        children: dict[str, nn.Module] = {}
        for name, layer in layers.items():
            values = {n: p.detach().to(dtype).to(wide) for n, p in layer.named_parameters()}
            children[name] = replica(layer, parameters=values)
        leaf = x.to(wide).clone().requires_grad_()
        y = function(replica(module, children=children), leaf)
        y.backward(upstream.to(y.dtype))
        gradients = {f"gradient of {name}.{n}": p.grad for name, child in children.items() for n, p in child.named_parameters()}
        return {"output": y.detach(), "gradient of x": leaf.grad, **gradients}

    return run
