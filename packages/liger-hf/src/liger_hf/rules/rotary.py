# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: an attention module whose forward calls a function `apply_rotary…` of its modelling file.

That function is a global of the file, shared by every model of the process, so it is not replaced there. Each instance gets a
forward made from the same code with a private namespace: the globals that the code names, copied once, and in them this one
function replaced. A global that is rebound in the modelling file after `apply` is therefore not seen by a patched instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import rope
from liger_hf.patch import forward_of, replacement
from liger_hf.replica import Draw, device_of
from liger_hf.verification import Candidate, Case, Found, Results

NOTHING = "no attention module calls a function apply_rotary… of its modelling file"
NAME = "apply_rotary_pos_emb"


def look(module: nn.Module) -> Found | None:
    original = forward_of(module)
    if isinstance(original, str):
        inside = getattr(type(module), "forward", None)
        return Found("rope", refusal=original) if inside is not None and _called(inside) else None
    called = _called(original)
    if called is None:
        return None
    name, function = called
    if name != NAME:
        return Found("rope", refusal=f"it calls {name}, which no rule knows")
    arguments = list(inspect.signature(function).parameters.values())[:4]
    if [a.name for a in arguments] != ["q", "k", "cos", "sin"] or any(a.default is not a.empty for a in arguments):
        return Found("rope", refusal=f"its {name} takes ({', '.join(map(str, arguments))}), not (q, k, cos, sin)")
    width = getattr(module, "head_dim", None)
    width = width if isinstance(width, int) and width % 2 == 0 else 64
    parameter = next(module.parameters(), None)
    return Found(
        "rope",
        kind=(
            type(module),
            function,
            width,
            parameter.dtype if parameter is not None else None,
            str(parameter.device) if parameter is not None else "",
        ),
        original=function,
        candidates=tuple(_candidate(original, function, interleaved) for interleaved in (False, True)),
        cases=lambda device, dtypes: _cases(function, width, device, dtypes),
        device=lambda: device_of(module),
        dtype=parameter.dtype if parameter is not None and parameter.is_floating_point() else torch.float32,
    )


def _candidate(original: Callable[..., Any], function: Callable[..., Any], interleaved: bool) -> Candidate:
    fused = _fused(function, interleaved)
    forward: list[Callable[..., Any]] = []

    def install(module: nn.Module) -> list[Any]:
        # One namespace for all the layers of a model: torch.compile then guards it once.
        if not forward:
            forward.append(rebound(original, fused))
        return [replacement(module, forward[0], original)]

    return Candidate(rope, "interleaved=True" if interleaved else "", fused, install)


def _fused(original: Callable[..., Any], interleaved: bool) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        # Tables of another dtype promote the result, unless autocast rounds it in the attention anyway.
        mixed = cos.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type)
        if rest or options or mixed or q.dim() != 4 or cos.dim() != 3 or cos.requires_grad:
            return original(q, k, cos, sin, *rest, **options)
        return rope(q, k, cos, sin, interleaved=interleaved)

    return apply_rotary_pos_emb


def _called(function: Any, depth: int = 0) -> tuple[str, Callable[..., Any]] | None:
    """The rotary function that a forward calls, also through decorators that keep it in a closure."""
    if not isinstance(function, FunctionType) or depth > 4:
        return None
    for name in _names(function.__code__):
        if name.startswith("apply_rotary") and callable(function.__globals__.get(name)):
            return name, function.__globals__[name]
    for cell in function.__closure__ or ():
        found = _called(_content(cell), depth + 1)
        if found is not None:
            return found
    return None


def rebound(function: FunctionType | Any, fused: Callable[..., Any]) -> FunctionType:
    """The same code, with `fused` where it says NAME."""
    space, cells = function.__globals__, function.__closure__
    if NAME in _names(function.__code__):
        # No __name__: with one, torch.compile would look globals up in the module of that name instead of here.
        space = {name: space[name] for name in _names(function.__code__) if name in space}
        space |= {"__builtins__": function.__globals__["__builtins__"], "__package__": function.__globals__.get("__package__"), NAME: fused}
    else:
        cells = tuple(CellType(rebound(_content(c), fused)) if _called(_content(c)) else c for c in cells or ())
    twin = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__annotations__ = function.__annotations__
    twin.__doc__, twin.__module__ = function.__doc__, function.__module__
    return twin


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _cases(function: Callable[..., Any], width: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    draw = Draw(device)
    q, k = draw.normal(2, 5, 4, width).transpose(1, 2), draw.normal(2, 5, 2, width).transpose(1, 2)
    upstream = [draw.normal(2, 4, 5, width), draw.normal(2, 2, 5, width)]
    for batch, rotary in ((2, width), (1, width), (1, width // 2)):
        # Independent entries: nothing may rely on cos² + sin² = 1 or on equal halves.
        table = [draw.normal(batch, 5, rotary) for _ in range(2)]
        if rotary < width and (rotary % 2 or not _takes(function, q, k, *table)):
            continue
        for dtype in dtypes:
            name = f"{str(dtype).removeprefix('torch.')}, {rotary} of {width} columns, tables of batch {batch}"
            yield Case(name, dtype, _run([t.to(dtype) for t in (q, k, *table)], [g.to(dtype) for g in upstream]))


def _takes(function: Callable[..., Any], *args: Tensor) -> bool:
    try:
        function(*args)
    except Exception:
        return False
    return True


def _run(inputs: list[Tensor], upstream: list[Tensor]) -> Callable[[Callable[..., Any], bool], Results]:
    def run(function: Callable[..., Any], exact: bool) -> Results:
        q, k, cos, sin = (t.double() if exact else t for t in inputs)
        q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
        rotated = function(q, k, cos, sin)
        torch.autograd.backward(list(rotated), [g.to(r.dtype) for g, r in zip(upstream, rotated, strict=True)])
        return {"q": rotated[0].detach(), "k": rotated[1].detach(), "gradient of q": q.grad, "gradient of k": k.grad}

    return run
