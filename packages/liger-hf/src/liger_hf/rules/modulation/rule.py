# SPDX-License-Identifier: Apache-2.0
"""Modulated norms (adaLN): a module whose forward scales the result of a norm by 1 + scale and shifts it.

An instance gets a forward rebuilt from its source (`liger_hf.rules.modulation.source`). Every call checks the norm: if
it has hooks, or was wrapped or replaced, it is called as a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import Op, modulated_layer_norm, modulated_rms_norm
from liger_hf.patch import forward_of, replacing
from liger_hf.rebinding import unwrapped
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.modulation.source import modulated_norms, with_one_call
from liger_hf.rules.norm import rule as norms
from liger_hf.rules.norm.within import norm_in, refusal, untouched
from liger_hf.stand_in import Case, Draw, Run, device_of, replica, trial
from liger_hf.unread import unread

NOTHING = "no forward has the form self.norm(x) * (1 + scale) + shift"
OPS: dict[str, Op[..., Any]] = {"layer_norm": modulated_layer_norm, "rms_norm": modulated_rms_norm}


def look(module: nn.Module) -> Found | None:
    with_eps = [n for n, child in module._modules.items() if child is not None and norms.eps_of(child) is not None]
    modulated = modulated_norms(unwrapped(type(module).forward)) if with_eps else ()
    names = tuple(name for name in modulated if name in with_eps)
    if not names:
        return _unread(module, with_eps)
    children = {name: getattr(module, name) for name in names}
    kinds = [kind for kind in OPS if any(norm_in(child, kind) is not None for child in children.values())]
    if not kinds:
        return None
    (kind, *others) = kinds
    op = f"modulated_{kind}"
    original = forward_of(module)
    if isinstance(original, str):
        return Found(op, refusal=original)
    if others or len({type(child) for child in children.values()}) > 1:
        words = f"the norms that it scales and shifts must be of one class, {', '.join(names)} are not"
        return Found(op, refusal=words)
    matches = {name: norm_in(child, kind) for name, child in children.items()}
    for name, child in children.items():
        if (reason := _refusal(matches[name], child)) is not None:
            return Found(op, refusal=f"{name}: {reason}")
    first = children[names[0]]
    distinct = {matches[name].kind: child for name, child in children.items()}  # type: ignore[union-attr]
    return Found(
        op,
        kind=(type(module), original, names, tuple(distinct)),
        original=lambda child, x, scale, shift: _plain(type(child).forward, child, x, scale, shift),
        candidates=lambda: [_candidate(OPS[kind], original, names, first)],
        cases=lambda device, dtypes: (case for child in distinct.values() for case in _cases(child, device, dtypes)),
        device=lambda: device_of(module),
        dtype=next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32),
    )


def _unread(module: nn.Module, norms_in_it: list[str]) -> Found | None:
    # Norms that are scaled and shifted mostly have no weights, unlike norms before sums.
    bare = [name for name in norms_in_it if next(getattr(module, name).parameters(), None) is None]
    lost = unread(module, bare, "+*", "norms that it scales and shifts are left alone") if bare else None
    for kind in OPS if lost else ():
        if any(norm_in(getattr(module, name), kind) is not None for name in bare):
            return Found(f"modulated_{kind}", refusal=lost)
    return None


def _refusal(match: Found | None, child: nn.Module) -> str | None:
    assert match is not None
    if isinstance(child, nn.LayerNorm) and child.elementwise_affine:
        return "modulated_layer_norm has neither weight nor bias"
    return match.refusal or refusal(child)


def _plain(forward: Callable[..., Any], child: nn.Module, x: Any, scale: Any, shift: Any) -> Any:
    return forward(child, x) * (1 + scale) + shift


def _candidate(op: Op[..., Any], original: Any, names: tuple[str, ...], child: nn.Module) -> Candidate:
    eps, forward = norms.eps_of(child), type(child).forward
    assert eps is not None

    def step(child: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        weight = {} if getattr(child, "weight", None) is None else {"weight": child.weight}
        if scale.shape == x.shape:
            return op(x.unsqueeze(-2), scale, shift, **weight, eps=getattr(child, eps)).squeeze(-2)
        return op(x, scale.squeeze(-2), shift.squeeze(-2), **weight, eps=getattr(child, eps))

    def modulated(child: Any, x: Any, scale: Any, shift: Any) -> Any:
        if untouched(child, forward) and _fit(getattr(child, "weight", None), x, scale, shift):
            return step(child, x, scale, shift)
        return _plain(nn.Module.__call__, child, x, scale, shift)

    return Candidate(op, "", step, replacing(original, lambda: with_one_call(original, names, modulated)))


def _fit(weight: Any, x: Any, scale: Any, shift: Any) -> bool:
    """Return whether scale and shift have one row per sample or per token, and all tensors one dtype.

    Mixed dtypes do not fit, because classes treat them differently.
    """
    if not all(isinstance(value, Tensor) for value in (x, scale, shift)) or torch.is_autocast_enabled(x.device.type):
        return False
    same_dtype = all(value.dtype == x.dtype for value in (scale, shift, weight) if value is not None)
    if not same_dtype or scale.shape != shift.shape:
        return False
    return scale.shape == x.shape or (x.dim() > 1 and scale.shape == (*x.shape[:-2], 1, x.shape[-1]))


def _cases(child: nn.Module, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    for drawn in norms.inputs(child, device, dtypes):
        for words, rows in (("one row for a sample", slice(0, 1)), ("one row for a token", slice(None))):
            draw = Draw(device, 1)
            scale, shift = (draw.normal(*drawn.x.shape)[:, rows].to(drawn.x.dtype) for _ in range(2))
            yield replace(drawn, name=f"{drawn.name}, {words}").case(_run(child, drawn, scale, shift))


def _run(child: nn.Module, drawn: norms.NormInputs, scale: Tensor, shift: Tensor) -> Run:
    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        return {"output": function(replica(child, parameters=weights), *inputs.values())}

    return trial(call, {"x": drawn.x, "scale": scale, "shift": shift}, {"output": drawn.upstream}, drawn.values)


RULE = Rule("modulation", look, tuple(op.name for op in OPS.values()), NOTHING)
