# SPDX-License-Identifier: Apache-2.0
"""Modulated norms (adaLN): a module whose forward scales the result of a norm by 1 + scale and shifts it.

An instance gets a forward rebuilt from its source (`liger_hf.rules.modulation.source`). Every call checks the norm: if
it has hooks, or was wrapped or replaced, it is called as a module.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import Op, modulated_layer_norm, modulated_rms_norm
from liger_hf.patch import replacing
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.modulation.source import modulated_norms, with_one_call
from liger_hf.rules.norm import rule as norms
from liger_hf.rules.norm.within import Fusion, fused, refusal, untouched
from liger_hf.stand_in import Case, Draw, twin_trial

NOTHING = "no forward has the form self.norm(x) * (1 + scale) + shift"
OPS: dict[str, Op[..., Any]] = {op.name: op for op in (modulated_layer_norm, modulated_rms_norm)}


def _refusal(child: nn.Module) -> str | None:
    if isinstance(child, nn.LayerNorm) and child.elementwise_affine:
        return "modulated_layer_norm has neither weight nor bias"
    return refusal(child)


def _plain(forward: Callable[..., Any], child: nn.Module, x: Any, scale: Any, shift: Any) -> Any:
    return forward(child, x) * (1 + scale) + shift


def _candidates(original: Any, names: tuple[str, ...], child: nn.Module, name: str) -> list[Candidate]:
    op, eps, forward = OPS[name], norms.eps_of(child), type(child).forward
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

    return [Candidate(op, "", step, replacing(original, lambda: with_one_call(original, names, modulated)))]


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
            inputs = {"x": drawn.x, "scale": scale, "shift": shift}
            run = twin_trial(child, inputs, {"output": drawn.upstream}, drawn.values)
            yield replace(drawn, name=f"{drawn.name}, {words}").case(run)


FUSION = Fusion(
    modulated_norms,
    "+*",
    "the norms that it scales and shifts",
    "norms that it scales and shifts are left alone",
    _plain,
    _candidates,
    _cases,
    _refusal,
    # Norms that are scaled and shifted mostly have no weights, unlike norms before sums.
    weightless=True,
)


def look(module: nn.Module) -> Found | None:
    matches = (fused(module, op.removeprefix("modulated_"), op, FUSION) for op in OPS)
    return next((match for match in matches if match is not None), None)


RULE = Rule("modulation", look, tuple(OPS), NOTHING)
