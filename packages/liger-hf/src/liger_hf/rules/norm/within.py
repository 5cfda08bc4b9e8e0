# SPDX-License-Identifier: Apache-2.0
"""Norms that become one op together with the code before or after them in the forward of another module."""

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_core.private_torch import has_global_hook
from liger_hf.passing import has_hooks, may_pass
from liger_hf.patch import MARK, forward_of
from liger_hf.private_transformers import OFFLOADED
from liger_hf.rebinding import unwrapped
from liger_hf.rule import Candidate, Found
from liger_hf.rules.norm import rule as norms
from liger_hf.stand_in import Case, device_of, replica
from liger_hf.unread import unread


class Fusion(NamedTuple):
    """A norm and the code around it that a rule replaces in the forward of a module.

    find        returns the attributes of these norms in a forward
    operators   operators that the code around the norms has
    words, left  how the report names the norms, and what it says if the forward cannot be read
    plain       (forward of the norm, norm, *tensors) → the results
    candidates  (original forward, names of the norms, one of them, op) → the candidates
    cases       (norm, device, dtypes) → the cases for one norm
    refusal     returns why a norm must be called as a module
    weightless  whether forwards that cannot be read are reported only for norms without weights
    """

    find: Callable[[Any], Iterable[str]]
    operators: str
    words: str
    left: str
    plain: Callable[..., Any]
    candidates: Callable[[Any, tuple[str, ...], nn.Module, str], Iterable[Candidate]]
    cases: Callable[[nn.Module, torch.device, Iterable[torch.dtype]], Iterator[Case]]
    refusal: Callable[[nn.Module], str | None]
    weightless: bool = False


def fused(module: nn.Module, norm: str, op: str, fusion: Fusion) -> Found | None:
    """Return the findings for a module in which `op` can replace norms and code around them.

    norm  the op that the norm rule finds for these norms
    """
    with_eps = {n: c for n, c in module._modules.items() if c is not None and norms.eps_of(c) is not None}
    names = fusion.find(unwrapped(type(module).forward)) if with_eps else ()
    matches = {n: match for n in names if n in with_eps and (match := norm_in(with_eps[n], norm)) is not None}
    if not matches:
        may_be = {n: c for n, c in with_eps.items() if not fusion.weightless or next(c.parameters(), None) is None}
        lost = unread(module, may_be, fusion.operators, fusion.left) if may_be else None
        alike = lost is not None and any(norm_in(child, norm) is not None for child in may_be.values())
        return Found(op, refusal=lost) if alike else None
    original = forward_of(module)
    if isinstance(original, str):
        return Found(op, refusal=original)
    for name, match in matches.items():
        if (reason := match.refusal or fusion.refusal(with_eps[name])) is not None:
            return Found(op, refusal=f"{name}: {reason}")
    if len({type(with_eps[name]) for name in matches}) > 1:
        return Found(op, refusal=f"{fusion.words} must be of one class, {', '.join(matches)} are not")
    first, distinct = with_eps[next(iter(matches))], {match.kind: with_eps[name] for name, match in matches.items()}
    return Found(
        op,
        kind=(type(module), original, tuple(matches), tuple(distinct)),
        original=lambda child, *tensors: fusion.plain(type(child).forward, child, *tensors),
        candidates=lambda: fusion.candidates(original, tuple(matches), first, op),
        cases=lambda device, dtypes: (c for child in distinct.values() for c in fusion.cases(child, device, dtypes)),
        device=lambda: device_of(module),
        dtype=next((p.dtype for m in (first, module) for p in m.parameters() if p.is_floating_point()), torch.float32),
    )


def norm_in(child: nn.Module, op: str = "rms_norm") -> Found | None:
    """Return the norm rule's findings for an unmodified replica of the child; None if it is not a norm of this op."""
    if norms.eps_of(child) is None:
        return None
    match = norms.look(replica(child))
    return match if match is not None and match.op == op else None


def refusal(child: nn.Module) -> str | None:
    """Return why the norm must be called as a module, or None."""
    if OFFLOADED in child.__dict__ or has_hooks(child):
        return "the norm has hooks, which the fused op would skip"
    forward = forward_of(child)
    return forward if isinstance(forward, str) and not hasattr(getattr(child.forward, "__func__", None), MARK) else None


def untouched(child: Any, forward: Callable[..., Any]) -> bool:
    """Return whether calling the module runs only the forward of its class, or the replacement by `apply`."""
    if has_hooks(child) or has_global_hook() or not may_pass(child):
        return False
    # Not getattr with a default: Dynamo does not find __func__ in a method by its name, and returns the default.
    function = child.forward.__func__ if isinstance(child.forward, MethodType) else None
    # A replacement is for the class that the module had when it was installed.
    return function is forward or (
        hasattr(function, MARK) and getattr(function, "__wrapped__", None) is type(child).forward is forward
    )
