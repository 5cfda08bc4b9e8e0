# SPDX-License-Identifier: Apache-2.0
"""Rotary functions that are static methods and take one table with both sines and cosines."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import rope
from liger_hf.patch import MARK, Patch, replaced_method
from liger_hf.rule import Candidate, Found
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, device_of, trial, weight_kind

WIDTH, HEADS = 64, 4


def of_a_method(module: nn.Module, name: str) -> Found:
    original, static = getattr(type(module), name), inspect.getattr_static(type(module), name)
    if (reason := replaced_method(module, name)) is not None:
        return Found("rope", refusal=reason)
    count = len(inspect.signature(original).parameters) - 1 if isinstance(static, staticmethod) else 0
    if count not in (2, 3):
        words = f"it calls {name}, a method, whose arguments are not a table of angles, queries and keys"
        return Found("rope", refusal=words)
    return Found(
        "rope",
        kind=(type(module), name, *weight_kind(module)),
        original=original,
        candidates=lambda: _candidates(name, original),
        cases=lambda device, dtypes: _cases(count, device, dtypes),
        device=lambda: device_of(module),
        dtype=weight_kind(module)[0],
    )


def _candidates(name: str, original: Callable[..., Any]) -> Iterator[Candidate]:
    for sines_first, interleaved in product((True, False), repeat=2):
        rotated = partial(_rotated, original, sines_first, interleaved)
        words = f"interleaved={interleaved}, {'sines' if sines_first else 'cosines'} first in the table"
        yield Candidate(rope, words, rotated, partial(_installed, name=name, original=original, rotated=rotated))


def _installed(module: nn.Module, name: str, original: Callable[..., Any], rotated: Callable[..., Any]) -> list[Patch]:
    def method(self: nn.Module, *args: Any, **named: Any) -> Any:
        now = getattr(type(self), name)
        return rotated(*args, **named) if now is original else now(*args, **named)

    # With this name, the bound method pickles as the method of its class.
    method.__name__ = name
    method.__dict__[MARK] = True
    return [Patch(module, name, MethodType(method, module))]


def _rotated(original: Callable[..., Any], sines_first: bool, interleaved: bool, *args: Any, **named: Any) -> Any:
    table, *states = args or (None,)
    states = [state for state in states if state is not None]
    if named or not _fit(table, states):
        return original(*args, **named)
    cos, sin = table[0].chunk(2, dim=-1)[:: -1 if sines_first else 1]
    cos, sin = ((t.repeat_interleave(2, dim=-1) if interleaved else torch.cat((t, t), dim=-1)) for t in (cos, sin))
    q, k, *others = states
    # `rope` takes two tensors, so the first head of the third also serves as its key.
    alone = [rope(v, v[:, :1].detach(), cos, sin, interleaved=interleaved)[0] for v in others]
    return (*rope(q, k, cos, sin, interleaved=interleaved), *alone)


def _fit(table: Any, states: list[Any]) -> bool:
    """Return whether the table is (1, 1, tokens, width), each state (batch, heads, tokens, width), all of one dtype."""
    if len(states) < 2 or not isinstance(table, Tensor) or table.dim() != 4 or table.requires_grad:
        return False
    if table.shape[:2] != (1, 1):
        return False
    return all(
        s.dim() == 4 and s.shape[2:] == table.shape[2:] and s.shape == states[0].shape and s.dtype == table.dtype
        for s in states
    )


def _cases(count: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    draw = Draw(device)
    for tensors, dtype in product(range(2, count + 1), dtypes):
        yield Case(f"{str(dtype).removeprefix('torch.')}, {tensors} tensors", dtype, _run(draw, tensors, 5, dtype))
    for length in LENGTHS:
        yield Case(f"float32, length {length}", torch.float32, _run(draw, 2, length, torch.float32))


def _run(draw: Draw, count: int, length: int, dtype: torch.dtype) -> Run:
    # Independent entries, because cos² + sin² = 1 must not matter.
    table = draw.normal(1, 1, length, WIDTH).to(dtype)
    inputs, upstream = ([draw.normal(2, HEADS, length, WIDTH).to(dtype) for _ in range(count)] for _ in range(2))

    def call(function: Callable[..., Any], states: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        return {f"rotated {number}": result for number, result in enumerate(function(cast(table), *states.values()))}

    named = {str(number): value for number, value in enumerate(inputs)}
    return trial(call, named, {f"rotated {number}": value for number, value in enumerate(upstream)})
