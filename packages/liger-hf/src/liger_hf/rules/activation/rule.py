# SPDX-License-Identifier: Apache-2.0
"""Squared ReLU: a module without children or weights that maps x to max(x, 0)²."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import relu_squared
from liger_hf.isolation import undisturbed
from liger_hf.patch import forward_of, replacement
from liger_hf.rebinding import unwrapped
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, configuration, of_length, replica, sized, trial

NOTHING = "no module is a squared ReLU: none without weights maps x to max(x, 0)²"
PROBE = (-2.0, -0.5, 0.0, 0.5, 3.0)


def look(module: nn.Module) -> Found | None:
    if module._modules or module._parameters or module._buffers or not _squares(module):
        return None
    original = forward_of(module)
    if isinstance(original, str):
        return Found("relu_squared", refusal=original)
    return Found(
        "relu_squared",
        kind=(type(module), configuration(module)),
        original=original,
        candidates=lambda: [_candidate(original)],
        cases=lambda device, dtypes: _cases(module, device, dtypes),
    )


def _squares(module: nn.Module) -> bool:
    """Return whether the forward of the module's class computes max(x, 0)² of a few numbers."""
    forward = unwrapped(type(module).forward)
    if len(inspect.signature(forward).parameters) != 2:
        return False
    with undisturbed(torch.device("cpu")):
        x = torch.tensor(PROBE, device="cpu")
        try:
            return torch.equal(forward(replica(module), x.clone()), x.clamp(min=0).square())
        except Exception:
            return False


def _candidate(original: Callable[..., Any]) -> Candidate:
    def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*inputs, *named.values())
        return relu_squared(x)

    return Candidate(relu_squared, "", forward, lambda module: [replacement(module, forward, original)])


def _cases(module: nn.Module, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    draw = Draw(device)
    x, upstream = draw.normal(2, 9, 40), draw.normal(2, 9, 40)
    for name, dtype, scale in sized(dtypes):
        yield Case(name, dtype, _run(module, (x * scale).to(dtype), upstream.to(dtype)))
    for length in LENGTHS:
        yield of_length(length, torch.float32, _run(module, draw.normal(1, length, 40), draw.normal(1, length, 40)))


def _run(module: nn.Module, x: Tensor, upstream: Tensor) -> Run:
    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        return {"output": function(replica(module), inputs["x"])}

    return trial(call, {"x": x}, {"output": upstream})


RULE = Rule("activation", look, ("relu_squared",), NOTHING)
