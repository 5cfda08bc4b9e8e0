# SPDX-License-Identifier: Apache-2.0
"""Norms: a module without children that has an eps and at most one weight and one bias as wide as its rows.

A norm may also have a gate (gated.py), normalize groups, or take rows of other shapes (shaped.py).
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from liger_core import Op, layer_norm, rms_norm
from liger_hf.passing import may_pass, passing
from liger_hf.patch import forward_of
from liger_hf.rebinding import innermost, names_in
from liger_hf.rule import Candidate, Dtypes, Found, Rule
from liger_hf.rules.norm.gated import NormFunction, fits, forms
from liger_hf.rules.norm.shaped import NormForm, form_of
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, Unfit, configuration, device_of, of_length, replica, trial

Cast = Literal["input", "float32"]
CONSTANT = "its forward has several numbers that may be its eps"
EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
NOTHING = (
    f"no module is a norm: none without children has a float named {', '.join(EPS[:-1])} or {EPS[-1]}, or calls "
    "F.layer_norm or F.rms_norm"
)
# The dtype of the rows before the weight, and the offset of the weight.
CONVENTIONS: tuple[tuple[Cast, float], ...] = (("input", 0.0), ("float32", 1.0), ("float32", 0.0), ("input", 1.0))
# The width of the rows of a norm without a weight, which does not determine it.
WIDTH = 64


def look(module: nn.Module) -> Found | None:
    eps: str | float | None = eps_of(module)
    if eps is None:
        constants = _constants(module)
        if len(constants) != 1:
            return Found("layer_norm", refusal=CONSTANT) if constants else None
        (eps,) = constants
    weights = _weights(module)
    form = form_of(module, weights, eps) if isinstance(eps, str) else None
    by_weights = "layer_norm" if len(weights) == 2 or isinstance(module, nn.LayerNorm) else "rms_norm"
    op = by_weights if form is None else form.name
    if not weights.keys() <= {"weight", "bias"} or any(p.dim() != 1 for p in weights.values()):
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in weights.items())
        return Found(op, refusal=f"a norm must have at most a weight and a bias of one dimension, it has {shapes}")
    original = forward_of(module)
    if isinstance(original, str):
        return Found(op, refusal=original)
    arguments = tuple(inspect.signature(original).parameters)[1:]
    if not (len(arguments) == 1 or (len(arguments) == 2 and weights.keys() == {"weight"})):
        words = f"a norm must take one tensor, and besides at most a gate, its forward takes ({', '.join(arguments)})"
        return Found(op, refusal=words)
    gated = len(arguments) == 2
    grouped = isinstance(getattr(module, "group_size", None), int) and weights.keys() == {"weight"}
    form = None if gated else form
    shape = tuple((name, tuple(p.shape), p.dtype, p.device.type) for name, p in weights.items())

    def candidates() -> Iterator[Candidate]:
        if form is not None:
            return (_candidate(*way, original, (arguments[0], eps)) for way in form.ways)
        if (gated or grouped) and isinstance(eps, str):
            ways = forms(eps, gated, grouped)
            return (_special_candidate(*way, original, (arguments, eps)) for way in ways)
        return _candidates(original, arguments[0], eps, tuple(weights))

    return Found(
        op,
        kind=(configuration(module), shape),
        original=original,
        candidates=candidates,
        cases=lambda device, dtypes: (
            drawn.case(_run(module, drawn, arguments, form is not None))
            for drawn in inputs(module, device, dtypes, gated, form)
        ),
        device=lambda: device_of(module),
        dtype=next((p.dtype for p in weights.values()), torch.float32),
    )


def _constants(module: nn.Module) -> set[float]:
    """Return the possible values of eps in a forward that calls a norm of torch, as OLMo's does.

    These are the small constants in its code, or the default of layer_norm.
    """
    code = getattr(innermost(type(module).forward), "__code__", None)
    if module._modules or code is None or not {"layer_norm", "rms_norm"} & {*names_in(code)}:
        return set()
    return {value for value in code.co_consts if isinstance(value, float) and 0.0 < value < 0.1} or {1e-5}


def eps_of(module: nn.Module) -> str | None:
    """Return the attribute that holds the eps of a norm; None if the module is not a norm."""
    if module._modules or any(b is not None for b in module._buffers.values()):
        return None
    return next((name for name in EPS if isinstance(getattr(module, name, None), float)), None)


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _special_candidate(
    op: Op[..., Any], detail: str, form: NormFunction, original: Callable[..., Any], names: tuple[tuple[str, ...], str]
) -> Candidate:
    arguments, eps = names

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        named_inputs = dict(zip(arguments, inputs, strict=False)) | named
        x, gate = named_inputs[arguments[0]], named_inputs.get(arguments[-1])
        if not fits(self.weight, x, gate, len(arguments) == 2) or not may_pass(self):  # type: ignore[arg-type]
            return original(self, *inputs, **named)
        return form(self, x, gate)

    return Candidate(op, detail, forward, lambda module: passing(module, forward, original, (eps,)))


def _candidates(
    original: Callable[..., Any], argument: str, eps: str | float, weights: tuple[str, ...]
) -> Iterator[Candidate]:
    if "bias" not in weights:
        for cast, offset in CONVENTIONS if weights else CONVENTIONS[:1]:
            detail = f"weight_offset={offset:g}, cast={cast!r}" if weights else "no weight"
            way = partial(_rms, eps=eps, weight_offset=offset, cast=cast)
            yield _candidate(rms_norm, detail, way, original, (argument, eps), promoted=False)
    for detail, added in (("", 0), ("weight + 1", 1))[: 1 + bool(weights)]:
        yield _candidate(layer_norm, detail, partial(_layer, eps=eps, added=added), original, (argument, eps))


def _number(module: Any, eps: str | float) -> float:
    """Return the current value of the attribute `eps`, or `eps` itself if it is a number."""
    return getattr(module, eps) if isinstance(eps, str) else eps


def _rms(module: Any, x: Tensor, *, eps: str | float, **options: Any) -> Tensor:
    return rms_norm(x, getattr(module, "weight", None), _number(module, eps), **options)


def _layer(module: Any, x: Tensor, *, eps: str | float, added: int) -> Tensor:
    weight = getattr(module, "weight", None)
    weight = weight + added if added and weight is not None else weight
    return layer_norm(x, weight, getattr(module, "bias", None), _number(module, eps))


def _candidate(
    op: Op[..., Any],
    detail: str,
    way: Callable[..., Tensor],
    original: Callable[..., Any],
    names: tuple[str, str | float],
    promoted: bool = True,
) -> Candidate:
    """Return a candidate that computes the norm by `way`.

    names     the name of the forward's argument, and the eps: an attribute or a number
    promoted  whether autocast makes the module's result float32
    """
    argument, eps = names

    def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Any:
        (x,) = inputs or (named.pop(argument),)
        weight = getattr(self, "weight", None)
        # Classes treat mixed dtypes differently.
        differs = weight is not None and x.dtype != weight.dtype
        if differs or (promoted and torch.is_autocast_enabled(x.device.type)) or not may_pass(self):
            return original(self, x)
        return way(self, x)

    # The eps is read in every call.
    read = (eps,) if isinstance(eps, str) else ()
    return Candidate(op, detail, forward, lambda module: passing(module, forward, original, read))


@dataclass(frozen=True)
class NormInputs:
    """Random rows, perhaps with a gate, their upstream gradient and weights for a norm, by name.

    length  the length of the only sequence; 0 if there are several
    """

    name: str
    dtype: torch.dtype
    x: Tensor
    upstream: Tensor
    values: dict[str, Tensor]
    gates: tuple[Tensor, ...]
    length: int = 0

    def case(self, run: Run) -> Case:
        return of_length(self.length, self.dtype, run) if self.length else Case(self.name, self.dtype, run)


def inputs(
    module: nn.Module, device: torch.device, dtypes: Dtypes, gated: bool = False, form: NormForm | None = None
) -> Iterator[NormInputs]:
    """Yield random inputs for each dtype of the weights, and of other lengths.

    A gated norm also gets float32 rows beside weights of another dtype, as state-space scans return them.
    """
    weights = _weights(module)
    stated = getattr(module, "normalized_shape", (WIDTH,))
    width = max((p.shape[0] for p in weights.values()), default=stated[-1]) or WIDTH
    draw, sizes = Draw(device), form.shape if form else lambda rows: (rows, width)
    x, upstream, *gates = (draw.normal(3, *sizes(7)) for _ in range(3 if gated else 2))
    # Small rows show where eps is added, large ones whether anything is limited.
    x *= torch.tensor([0.01, 1.0, 100.0], device=device).view(3, *[1] * (x.dim() - 1))
    values = {name: draw.positive(width) for name in weights}
    for dtype in dtypes:
        cast_values = {name: v.to(dtype) for name, v in values.items()}
        for wide in dict.fromkeys((dtype, torch.float32)) if gated else (dtype,):
            name = f"{str(dtype).removeprefix('torch.')}{', float32 rows' if wide != dtype else ''}"
            yield NormInputs(
                name, dtype, x.to(wide), upstream.to(wide), cast_values, tuple(gate.to(dtype) for gate in gates)
            )
    for length in LENGTHS:
        x, upstream, *gate = (draw.normal(1, *sizes(length)) for _ in range(3 if gated else 2))
        yield NormInputs("", torch.float32, x, upstream, values, tuple(gate), length)


def _run(module: nn.Module, drawn: NormInputs, arguments: tuple[str, ...], merges: bool) -> Run:
    """Return a pass through the norm, which may merge the heads of a row into one dimension."""

    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        y = function(replica(module, parameters=weights), *inputs.values())
        if merges and y.numel() == drawn.x.numel() and y.dim() < drawn.x.dim():
            y = y.view_as(drawn.x)
        if isinstance(y, Tensor) and y.shape != drawn.x.shape:
            raise Unfit(f"it is not a norm: rows of shape {tuple(drawn.x.shape)} become {tuple(y.shape)}")
        return {"output": y}

    leaves = dict(zip(("x", "gate"), (drawn.x, *drawn.gates), strict=False))
    run = trial(call, leaves, {"output": drawn.upstream}, drawn.values)

    def checked(function: Callable[..., Any], exact: bool) -> dict[str, Tensor]:
        results = run(function, exact)
        if drawn.gates and "gradient of gate" not in results:
            raise Unfit(f"the second argument of a norm must be a gate with a gradient, {arguments[-1]} gets none")
        return results

    return checked


RULE = Rule("norm", look, ("rms_norm", "layer_norm", "gated_rms_norm", "group_norm"), NOTHING)
