# SPDX-License-Identifier: Apache-2.0
"""The projection of an output head and the steps between it and the loss: computed as written, or read as scale and
cap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_hf.private_transformers import OFFLOADED
from liger_hf.rules.head.weights import Weights, gathered, gathering, held

Step = tuple[Any, ...]


def replay(logits: Any, steps: tuple[Step, ...]) -> Any:
    """The remembered steps, exactly as they were written."""
    for kind, *value in steps:
        if kind == "mul":
            logits = logits * value[0]
        elif kind == "div":
            logits = logits / value[0]
        elif kind == "tanh":
            logits = torch.tanh(logits)
        elif kind == "add":
            logits = logits + value[0]
        else:
            logits = logits.to(value[0])
    return logits


def scale_and_cap(steps: tuple[Step, ...]) -> tuple[float, float | None, Tensor | None] | None:
    """(logit_scale, softcap, bias) with which the steps are `softcap · tanh(logit_scale · (z + bias) / softcap)`; None
    if they are not."""
    before, after, capped, bias = [1.0, 1.0], [1.0, 1.0], False, None
    for kind, *value in steps:
        if kind == "tanh":
            if capped:
                return None
            capped = True
        elif kind == "add":
            if capped or bias is not None or before[0] == 0.0:
                return None
            bias = value[0].flatten() * (before[1] / before[0])
        elif kind in ("mul", "div"):
            # int: the compiler of torch 2.11 takes no bool as an index.
            (after if capped else before)[int(kind == "div")] *= value[0]
    if not capped:
        return before[0] / before[1], None, bias
    cap = after[0] / after[1]
    if cap == 0.0 or before[0] == 0.0:
        return None
    # One division: (1 / cap) · cap need not be 1.
    return (before[0] * after[0]) / (before[1] * after[1]), abs(cap), bias


class Forward:
    """A forward of a model, which runs or has ended."""

    def __init__(self) -> None:
        self.runs = True


class Lazy(threading.local):
    """The head that this thread's model forward wants lazy logits from, and that forward; None in compiled code."""

    def __init__(self) -> None:
        self.head: nn.Module | None = None
        self.forward: Forward | None = None


LAZY = Lazy()


class _Forward(nn.Module):
    """Runs the forward of a head without the hooks on it, which have run."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head.forward(hidden)


def compute(
    head: nn.Module, hidden: Tensor, weights: Weights | None, autocast: tuple[str, torch.dtype] | None
) -> Tensor:
    """The head's own projection, with the weights and under the autocast that its call saw."""
    if LAZY.head is head:
        with eager_logits():
            return compute(head, hidden, weights, autocast)
    kind = hidden.device.type
    if autocast is None and not torch.is_autocast_enabled(kind):
        return _project(head, hidden, weights)
    with torch.autocast(kind, enabled=False) if autocast is None else torch.autocast(autocast[0], dtype=autocast[1]):
        return _project(head, hidden, weights)


@contextmanager
def eager_logits() -> Iterator[None]:
    """Heads return real logits.

    Entered outside a checkpoint, since torch.compile allows no outside effects within one.
    """
    before, LAZY.head = LAZY.head, None
    try:
        yield
    finally:
        LAZY.head = before


def _project(head: nn.Module, hidden: Tensor, weights: Weights | None) -> Tensor:
    if gathered(head):
        return head(hidden)
    if weights is None or torch.compiler.is_compiling() or weights.are_in(head):
        return head.forward(hidden)
    # Of a functional_call that is over, or replaced since.
    given = {f"head.{name}": tensor for name, tensor in weights.tensors.items()}
    return torch.func.functional_call(_Forward(head), given, (hidden,))


def gathers_itself(head: nn.Module) -> bool:
    """Hooks around each call of the head gather its weights from the ranks; accelerate's offloading is a forward of its
    own instead."""
    return gathered(head) and OFFLOADED not in vars(head) and not torch.compiler.is_compiling()


def in_one_call(head: nn.Module, compute: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """compute(hidden) as the forward of the head and its parts, whose hooks gather the weights for it, and again for
    its backward pass.

    Each call gathers, and ranks that called a head different numbers of times would wait for each other forever.
    """

    def whole(rows: Tensor) -> Any:
        with held(head):
            return compute(rows)

    for part in reversed(gathering(head)):
        whole = partial(_as_forward, part, whole)
    return whole(hidden)


def _as_forward(module: nn.Module, compute: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    own, waiting = vars(module).get("forward"), [compute]

    def forward(rows: Tensor) -> Any:
        _put_back(module, own)
        return waiting.pop()(rows)

    module.forward = forward
    try:
        return module(hidden)
    finally:
        if waiting:
            _put_back(module, own)


def _put_back(module: nn.Module, own: Any) -> None:
    del module.forward
    if own is not None:
        module.forward = own
