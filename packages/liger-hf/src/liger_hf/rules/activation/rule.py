# SPDX-License-Identifier: Apache-2.0
"""Squared ReLU: a module without children or weights that maps x to max(x, 0)²."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import relu_squared
from liger_hf.isolation import undisturbed
from liger_hf.patch import forward_of, replacement
from liger_hf.rebinding import unwrapped
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.stand_in import Draw, Run, configuration, replica, row_cases, twin_trial

NOTHING = "no module is a squared ReLU: none without weights maps x to max(x, 0)²"
PROBE = (-2.0, -0.5, 0.0, 0.5, 3.0)


def look(module: nn.Module) -> Found | None:
    if module._modules or module._parameters or module._buffers or not _squares(module):
        return None
    original = forward_of(module)
    if isinstance(original, str):
        return Found("relu_squared", refusal=original)

    def run(x: Tensor, upstream: Tensor) -> Run:
        return twin_trial(module, {"x": x}, {"output": upstream})

    return Found(
        "relu_squared",
        kind=configuration(module),
        original=original,
        candidates=lambda: [_candidate(original)],
        cases=lambda device, dtypes: row_cases(run, Draw(device), 40, 40, dtypes),
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


RULE = Rule("activation", look, ("relu_squared",), NOTHING)
