# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of each head of queries and keys, and the rotary function after it, in one step.

An instance gets a forward rebuilt from its source (`liger_hf.rules.rotary_norm.source`). Every call checks the norms:
if one has hooks, or was wrapped or replaced, as ZeRO-3, tensor parallelism and PEFT do, both are called as modules, and
the rotary function computes `rope`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import qk_norm_rope, rope
from liger_hf.patch import forward_of, replacing
from liger_hf.rebinding import rebound, unwrapped
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.norm import rule as norms
from liger_hf.rules.norm.within import norm_in, refusal, untouched
from liger_hf.rules.rotary.forms import Coverage, Form, Signature, read, returned, signature, with_rope
from liger_hf.rules.rotary.rule import PREFIX, calls, cast_calls, fitting_forms, results_of, rotary_functions
from liger_hf.rules.rotary_norm.source import CATCH_UP, MAY, NORM, ROTATE, norms_before_rotary, with_held_norms
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, device_of, of_length, replica, trial
from liger_hf.unread import unread

NOTHING = (
    "no forward normalizes queries and keys by an RMSNorm of each head and passes them straight to a function "
    "apply_rotary…"
)


@dataclass(frozen=True)
class RotaryStep:
    """The rotary function of a forward, and the attributes of the norms before each call of it."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    norm_names: tuple[tuple[str, ...], ...]


def look(module: nn.Module) -> Found | None:
    step = _step(module)
    if step is None:
        lost = unread(module, module._modules, "", "norms of queries and keys are left alone")
        has_parts = lost is not None and _norms_in(module) and rotary_functions(unwrapped(type(module).forward))
        return Found("qk_norm_rope", refusal=lost) if has_parts else None
    children = {name: getattr(module, name) for names in step.norm_names for name in names}
    original = forward_of(module)
    if isinstance(original, str):
        return Found("qk_norm_rope", refusal=original)
    matches = {name: match for name, child in children.items() if (match := norm_in(child)) is not None}
    for name, match in matches.items():
        if (reason := refusal(children[name]) or match.refusal) is not None:
            return Found("qk_norm_rope", refusal=f"{name}: {reason}")
    kinds = {match.kind for match in matches.values()}
    if len(kinds) > 1:
        return Found("qk_norm_rope", refusal="the norms of queries and keys must be of one class, width, eps and dtype")
    first = next(iter(children.values()))
    return Found(
        "qk_norm_rope",
        kind=(type(module), original, step, *kinds),
        original=_separately(step.function, type(first).forward),
        candidates=lambda: _candidates(original, step, first),
        cases=lambda device, dtypes: _cases(step, first, device, dtypes),
        device=lambda: device_of(first),
        dtype=first.weight.dtype,
    )


def _step(module: nn.Module) -> RotaryStep | None:
    forward = unwrapped(type(module).forward)
    heads = _norms_in(module)
    if not heads:
        return None
    sites = [(function, names) for function, names in norms_before_rotary(forward, PREFIX) if heads.issuperset(names)]
    functions = rotary_functions(forward)
    names = {function for function, _ in sites if function in functions}
    if len(names) != 1:
        return None
    (name,) = names
    readable = signature(functions[name])
    if readable is None:
        return None
    norm_names = tuple(dict.fromkeys(names for _, names in sites if len(names) == len(readable.rotated)))
    return RotaryStep(name, functions[name], readable, norm_names) if norm_names else None


def _norms_in(module: nn.Module) -> set[str]:
    children = ((name, child) for name, child in module._modules.items() if child is not None)
    return {n for n, c in children if c._parameters.get("weight") is not None and norm_in(c) is not None}


def _separately(rotary: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original of a candidate's function: the norms, then the rotary function."""

    def rotate(held: bool, children: tuple[nn.Module, ...], *args: Any, **options: Any) -> Any:
        if held:
            args = (*map(forward, children, args), *args[len(children) :])
        return rotary(*args, **options)

    return rotate


def _candidates(original: Any, step: RotaryStep, child: nn.Module) -> Iterator[Candidate]:
    for form, coverage in fitting_forms(step.function, step.signature, _width(child)):
        # Columns that move would be multiplied by other weights of the norm.
        if not (form.gathers or form.trailing):
            for cast, offset in norms.CONVENTIONS:
                yield _candidate(original, step, child, form, coverage, {"weight_offset": offset, "cast": cast})


def _candidate(
    original: Any, step: RotaryStep, child: nn.Module, form: Form, coverage: Coverage, options: Any
) -> Candidate:
    eps, forward = norms.eps_of(child), type(child).forward
    assert eps is not None
    rotated_alone = with_rope(step.signature, form, step.function, coverage)
    # Tables without a batch dimension are verified for the function alone.
    with_norms = replace(coverage, flat=frozenset())

    def may(*children: Any) -> bool:
        return all(untouched(child, forward) for child in children)

    def norm(held: bool, child: Any, x: Any) -> Any:
        return x if held else child(x)

    def rotate(held: bool, children: tuple[Any, ...], *args: Any, **named: Any) -> Any:
        call = read(step.signature, form, with_norms, args, named) if held else None
        if call is not None and _fit(children, eps, call[0]):
            states, cos, sin, *_ = call
            # The op takes keys too; a function of one tensor has keys without heads.
            q, k = states if len(states) == 2 else (states[0], states[0][:, :0])
            weights = children[0].weight, children[-1].weight
            done = qk_norm_rope(
                q, k, *weights, cos, sin, getattr(children[0], eps), interleaved=form.interleaved, **options
            )
            return returned(done[: len(states)], call)
        if held:
            args = (*catch_up(held, children, *args[: len(children)]), *args[len(children) :])
        return rotated_alone(*args, **named)

    def catch_up(held: bool, children: tuple[Any, ...], *states: Any) -> tuple[Any, ...]:
        return tuple(child(x) for child, x in zip(children, states, strict=True))

    def build() -> Callable[..., Any]:
        helpers: dict[str, Callable[..., Any]] = {MAY: may, NORM: norm, ROTATE: rotate, CATCH_UP: catch_up}
        sites = {(step.name, names) for names in step.norm_names}
        held = with_held_norms(original, PREFIX, lambda function, names: (function, names) in sites, helpers)
        return rebound(held, {step.name: rotated_alone})

    words = f"weight_offset={options['weight_offset']:g}, cast={options['cast']!r}"
    words = f"{form.name}, {words}" if form.name else words
    return Candidate(qk_norm_rope, words, rotate, replacing(original, build), covers=(rope,))


def _fit(children: tuple[Any, ...], eps: str, states: list[Tensor]) -> bool:
    """Return whether the weights have the heads' dtype and width, and the norms one eps.

    Mixed dtypes do not fit, because classes treat them differently.
    """
    x = states[0]
    return getattr(children[0], eps) == getattr(children[-1], eps) and all(
        child.weight.dtype == x.dtype and child.weight.shape[0] == x.shape[-1] for child in children
    )


def _cases(step: RotaryStep, child: nn.Module, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    """Yield cases with the norms, and without them, as in calls where the norms run as modules."""
    signature, width = step.signature, _width(child)
    for words, dtype, kwargs in cast_calls(step.function, signature, width, device, dtypes):
        for held in (True, False):
            label = f"{words}, {step.name}{'' if held else ', without norms'}"
            yield Case(label, dtype, _run(step, child, kwargs, held))
    for length in LENGTHS:
        for kwargs in islice(calls(step.function, signature, width, device, length), 1):
            yield of_length(length, torch.float32, _run(step, child, kwargs, True))


def _width(child: nn.Module) -> int:
    """Return the width of a norm, or that of other checks if DeepSpeed has sharded its weight, which is then empty."""
    return child._parameters["weight"].shape[0] or norms.WIDTH  # type: ignore[union-attr]


def _run(step: RotaryStep, child: nn.Module, kwargs: dict[str, Any], held: bool) -> Run:
    signature = step.signature
    draw = Draw(kwargs[signature.rotated[0]].device, seed=1)
    upstream = {f"rotated {key}": draw.normal(*kwargs[key].shape).to(kwargs[key].dtype) for key in signature.rotated}
    # Small rows show where eps is added.
    inputs = {key: kwargs[key] * (0.01 if number else 1.0) for number, key in enumerate(signature.rotated)}
    named = {f"weight of {key}": kwargs[key] for key in signature.rotated} if held else {}
    weights = {name: draw.positive(x.shape[-1]).to(x.dtype) for name, x in named.items()}

    def call(function: Callable[..., Any], states: Any, parameters: Any, cast: Any) -> dict[str, Tensor]:
        tables = {table: cast(kwargs[table]) for table in signature.tables}
        options = {name: value for name, value in {**kwargs, **tables}.items() if name not in states}
        children = tuple(replica(child, parameters={"weight": weight}) for weight in parameters.values())
        return dict(zip(upstream, results_of(function(held, children, *states.values(), **options)), strict=True))

    return trial(call, inputs, upstream, weights)


RULE = Rule("rotary_norm", look, ("qk_norm_rope",), NOTHING)
