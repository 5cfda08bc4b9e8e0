# SPDX-License-Identifier: Apache-2.0
"""Gates in modules that are not gated MLPs: an activation and its product with a tensor become one call.

    self.act(a) * b        →        gate(self.act, gate=a, up=b)
    b * F.silu(a)          →        gate(F.silu, up=b, gate=a)

    g = self.act(a)                 g = a
    …                      →        …
    g * b                           gate(self.act, gate=g, up=b)

An instance gets a forward rebuilt from its source. The activation is checked in every call: if it has hooks or has been
replaced, it is called as a module.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import Op
from liger_hf.isolation import undisturbed
from liger_hf.passing import skipping
from liger_hf.patch import Patch, forward_of, installed_in, replacement, replacing
from liger_hf.rebinding import unwrapped
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.gated_mlp import experts, rule
from liger_hf.rules.norm import rule as norms
from liger_hf.rules.norm.within import untouched
from liger_hf.source import copy_of, definition_of, load, once, rebuilt
from liger_hf.stand_in import Draw, Run, configuration, device_of, row_cases, trial, weight_kind
from liger_hf.unread import unread

HELPER = "__liger_gate__"
INNER = 40
PROBE = torch.linspace(-6.0, 6.0, 25)


def look(module: nn.Module) -> Found | None:
    named = activations_of(unwrapped(type(module).forward))
    lost = _unread(module)
    # A norm with a gate belongs to gated_rms_norm.
    if (
        not (named or lost)
        or norms.eps_of(module) is not None
        or rule.look(module) is not None
        or experts.look(module) is not None
    ):
        return None
    if lost is not None:
        return Found("swiglu", refusal=lost, fallback=True)
    original = forward_of(module)
    if isinstance(original, str):
        return Found("swiglu", refusal=original)
    activations = {name: value for name in named if _is_known(value := _value(original, module, name))}
    if not activations:
        return None
    first = next(iter(activations.values()))
    # Functions are compared directly, modules by class and configuration.
    alike = tuple(name for name, value in activations.items() if _kind(value) == _kind(first))
    if isinstance(first, nn.Module) and (reason := skipping([(alike[0], first)])) is not None:
        return Found("swiglu", refusal=reason)
    return Found(
        "swiglu",
        kind=(type(module), original, alike, _kind(first), *weight_kind(module)),
        original=lambda gate, up: first(gate) * up,
        candidates=lambda: _candidates(original, alike, first),
        cases=lambda device, dtypes: row_cases(_run, Draw(device), 2 * INNER, INNER, dtypes),
        device=lambda: device_of(module),
        dtype=weight_kind(module)[0],
    )


def _value(forward: Any, module: nn.Module, name: str) -> Any:
    """Return the object that a name such as `self.act` or `nn.functional.silu` refers to in a forward."""
    root, *attributes = name.split(".")
    value = module if root == next(iter(inspect.signature(forward).parameters)) else forward.__globals__.get(root)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def _unread(module: nn.Module) -> str | None:
    if definition_of(unwrapped(type(module).forward)) is not None:
        return None
    activations = [name for name, child in module._modules.items() if child is not None and _is_known(child)]
    return unread(module, ("silu", "gelu", *activations), "*", "products with an activation are left alone")


def _kind(activation: Any) -> Any:
    return configuration(activation) if isinstance(activation, nn.Module) else activation


def _is_known(activation: Any) -> bool:
    if not callable(activation) or (
        isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None
    ):
        return False
    with undisturbed(torch.device("cpu")):
        try:
            got, ones = activation(PROBE.clone()), torch.ones_like(PROBE)
            return any(
                torch.allclose(got, op.reference(PROBE, ones, **options), atol=1e-6) for op, options in rule.ACTIVATIONS
            )
        except Exception:
            return False


def _candidates(original: Any, names: tuple[str, ...], activation: Any) -> Iterator[Candidate]:
    for op, options in rule.ACTIVATIONS:
        words = ", ".join([*(f"{name}={value!r}" for name, value in options.items()), "the gate within its forward"])
        yield _candidate(original, names, activation, op, options, words)


def _candidate(
    original: Any, names: tuple[str, ...], activation: Any, op: Op[..., Any], options: Any, words: str
) -> Candidate:
    forward = type(activation).forward if isinstance(activation, nn.Module) else None

    def joined(gate: Tensor, up: Tensor) -> Any:
        return op(gate, up, **options)

    def gate_of(current: Any, *, gate: Any, up: Any) -> Any:
        same = (
            current is activation if forward is None else isinstance(current, nn.Module) and untouched(current, forward)
        )
        if same and isinstance(up, Tensor) and gate.shape == up.shape and gate.dtype == up.dtype:
            return joined(gate, up)
        return current(gate) * up

    @cache
    def gated(function: FunctionType) -> FunctionType:
        return with_gates(function, names, gate_of)

    def onto(patch: Patch) -> Patch | None:
        function = installed_in(patch.value.__func__)
        calls_all = {*names} <= {*activations_of(function)}
        return replacement(patch.owner, gated(function), original) if calls_all else None

    return Candidate(op, words, joined, replacing(original, lambda: gated(original)), onto=onto)


@dataclass(frozen=True)
class GateSite:
    """A product, the activation's call in it or in a statement `holder`, and the expressions of gate and up."""

    product: ast.BinOp
    call: ast.Call
    gate: ast.expr
    up: ast.expr
    holder: ast.Assign | None = None


@once
def activations_of(definition: ast.FunctionDef) -> Iterator[str]:
    """Return the source of each activation whose result a forward multiplies by a tensor."""
    return (ast.unparse(site.call.func) for site in _sites(definition))


def with_gates(function: FunctionType, names: tuple[str, ...], gate_of: Callable[..., Any]) -> FunctionType:
    """Rebuild the function with `gate_of(activation, gate=a, up=b)` for each `activation(a) * b`; its globals stay."""
    definition = copy_of(function)
    for site in list(_sites(definition)):
        if ast.unparse(site.call.func) in names:
            keywords = [ast.keyword("gate", site.gate), ast.keyword("up", site.up)]
            # In the order of the source, because projections in both may have hooks.
            ordered = keywords if site.product.right is site.up else keywords[::-1]
            if site.holder is not None:
                site.holder.value = site.call.args[0]
            _become(site.product, ast.Call(load(HELPER), [site.call.func], ordered))
    return rebuilt(function, definition, {HELPER: gate_of})


def _sites(definition: ast.FunctionDef) -> Iterator[GateSite]:
    module = definition.args.args[0].arg
    for node in ast.walk(definition):
        for side, factor in _factors(node):
            if isinstance(side, ast.Call) and _may_be_an_activation(side, module) and not _is_mask(factor):
                yield GateSite(node, side, side.args[0], factor)  # type: ignore[arg-type]
                break
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from _held(definition, block, module)


def _held(definition: ast.FunctionDef, block: list[ast.stmt], module: str) -> Iterator[GateSite]:
    """Yield each `g = act(a)` where the next statement with g multiplies it, and none after it reads this value."""
    for index, holder in enumerate(block):
        match holder:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if _may_be_an_activation(
                call, module
            ):
                later = next((s for s in block[index + 1 :] if _uses(s, name)), None)
                yield from _product_of(definition, later, name, call, holder)


def _product_of(
    definition: ast.FunctionDef, later: ast.stmt | None, name: str, call: ast.Call, holder: ast.Assign
) -> Iterator[GateSite]:
    if not isinstance(later, (ast.Assign, ast.Return)) or later.value is None or _uses(later.value, name) != [ast.Load]:
        return
    # Otherwise another statement may read the activation; in a loop, an earlier one too.
    assigned = isinstance(later, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in later.targets)
    uses = [n for n in ast.walk(definition) if isinstance(n, ast.Name) and n.id == name]
    loads = [n.lineno for n in uses if isinstance(n.ctx, ast.Load)]
    loops = any(isinstance(n, (ast.For, ast.While)) for n in ast.walk(definition))
    if not assigned and len([line for line in loads if loops or line > holder.lineno]) != 1:
        return
    for node in ast.walk(later.value):
        for side, factor in _factors(node):
            if isinstance(side, ast.Name) and side.id == name and not _is_mask(factor):
                yield GateSite(node, call, side, factor, holder)  # type: ignore[arg-type]


def _factors(node: ast.AST) -> tuple[tuple[ast.expr, ast.expr], ...]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return (node.left, node.right), (node.right, node.left)
    return ()


def _uses(node: ast.AST, name: str) -> list[type]:
    return [type(n.ctx) for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]


def _may_be_an_activation(call: ast.Call, module: str) -> bool:
    if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
        return False
    match call.func:
        case ast.Attribute(value=ast.Name(id=of)) if of == module:
            return True
        case ast.Attribute(attr="silu" | "gelu") | ast.Name(id="silu" | "gelu"):
            return re.fullmatch(r"[\w.]+", ast.unparse(call.func)) is not None
    return False


def _is_mask(factor: ast.expr) -> bool:
    return isinstance(factor, ast.Constant) or "mask" in ast.unparse(factor)


def _become(product: ast.BinOp, call: ast.Call) -> None:
    """Turn the node `product` into `call` in place, because it may be anywhere in an expression."""
    product.__class__ = ast.Call  # type: ignore[assignment]
    del product.left, product.op, product.right
    vars(product).update(vars(call))


def _run(x: Tensor, upstream: Tensor) -> Run:
    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        return {"output": function(inputs["gate"], inputs["up"])}

    return trial(call, dict(zip(("gate", "up"), x.chunk(2, dim=-1), strict=True)), {"output": upstream})


RULE = Rule("gate within a forward", look, ("swiglu", "geglu"), rule.NOTHING)
