# SPDX-License-Identifier: Apache-2.0
"""Residual and norm in one step: a module whose forward adds two tensors and gives the sum straight to a child that is a norm of rows.

An instance gets a forward rebuilt from its source (`liger_hf.rules.residual.source`). The norm is checked in every call: one
that somebody watches by hooks, has wrapped or replaced, as ZeRO-3, accelerate and PEFT do, is called as the module that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import add_rms_norm
from liger_hf.patch import Patch, forward_of, replacement
from liger_hf.rebinding import unwrapped
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.norm import rule as norms
from liger_hf.rules.norm.within import norm_in, refusal, untouched
from liger_hf.rules.residual.source import norms_of_sums, with_one_call
from liger_hf.stand_in import Case, Run, device_of, replica, trial

NOTHING = (
    "no forward adds two tensors and passes the sum straight to an RMSNorm (only undecorated forwards whose source is available are read)"
)


def look(module: nn.Module) -> Found | None:
    children = {name: found for name, child in module._modules.items() if child is not None and (found := norm_in(child)) is not None}
    if not children:
        return None
    original = forward_of(module)
    names = tuple(name for name in norms_of_sums(unwrapped(type(module).forward)) if name in children)
    if not names:
        return None
    if isinstance(original, str):
        return Found("add_rms_norm", refusal=original)
    after = {name: getattr(module, name) for name in names}
    refusals = [reason for name, child in after.items() if (reason := children[name].refusal or refusal(child)) is not None]
    if refusals:
        return Found("add_rms_norm", refusal=f"the norm after its sum must be one that it may pass over: {refusals[0]}")
    if len({type(child) for child in after.values()}) > 1:
        return Found("add_rms_norm", refusal=f"the norms after its sums must be of one class, {', '.join(names)} are not")
    kinds = {children[name].kind: child for name, child in after.items()}
    first = after[names[0]]
    return Found(
        "add_rms_norm",
        kind=(type(module), original, names, tuple(kinds)),
        original=lambda child, left, right: _plain(type(child).forward, child, left, right),
        candidates=lambda: _candidates(original, names, first),
        cases=lambda device, dtypes: (case for child in kinds.values() for case in _cases(child, device, dtypes)),
        device=lambda: device_of(first),
        dtype=children[names[0]].dtype,
    )


def _plain(forward: Callable[..., Any], child: nn.Module, left: Any, right: Any) -> tuple[Any, Any]:
    summed = left + right
    return forward(child, summed), summed


# -- candidates


def _candidates(original: Any, names: tuple[str, ...], child: nn.Module) -> Iterator[Candidate]:
    eps = norms.eps_of(child)
    assert eps is not None
    for cast, offset in norms.CONVENTIONS:
        yield _candidate(original, names, type(child).forward, eps, cast, offset)


def _candidate(original: Any, names: tuple[str, ...], forward: Callable[..., Any], eps: str, cast: Any, offset: float) -> Candidate:
    made: list[Callable[..., Any]] = []

    def step(child: Any, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        weight = getattr(child, "weight", None)
        # In the order of the sum: its results are laid out in memory like its first part, and Inkling takes views of them.
        return add_rms_norm(left, right, weight, getattr(child, eps), weight_offset=0.0 if weight is None else offset, cast=cast)

    def add_norm(child: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if untouched(child, forward) and _fit(getattr(child, "weight", None), left, right):
            return step(child, left, right)
        return _plain(nn.Module.__call__, child, left, right)

    def install(module: nn.Module) -> list[Patch]:
        # One function for all the layers of a model: torch.compile then compiles it once.
        if not made:
            made.append(with_one_call(original, names, add_norm))
        return [replacement(module, made[0], original)]

    return Candidate(add_rms_norm, f"weight_offset={offset:g}, cast={cast!r}", step, install)


def _fit(weight: Any, left: Any, right: Any) -> bool:
    """Neither broadcast nor promoted: the treatment of mixed dtypes differs between classes."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    return left.shape == right.shape and left.dtype == right.dtype and (weight is None or weight.dtype == left.dtype)


# -- cases


def _cases(child: nn.Module, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    for drawn in norms.inputs(child, device, dtypes):
        yield drawn.case(_run(child, drawn))


def _run(child: nn.Module, drawn: norms.Drawn) -> Run:
    """Both parts of the sum and both results count, with upstream gradients that differ."""

    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        return dict(zip(("normed", "sum"), function(replica(child, parameters=weights), *inputs.values()), strict=True))

    upstream = {"normed": drawn.upstream, "sum": drawn.upstream.flip(-1)}
    return trial(call, {"left": drawn.x, "right": drawn.upstream}, upstream, drawn.values)


RULE = Rule("residual", look, ("add_rms_norm",), NOTHING)
