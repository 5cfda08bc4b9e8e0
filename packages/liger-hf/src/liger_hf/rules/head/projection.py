# SPDX-License-Identifier: Apache-2.0
"""Compute the projection of an output head and the steps after it, or read the steps as a scale and a cap."""

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_hf.private_transformers import OFFLOADED
from liger_hf.rules.head.weights import HeadWeights, gathered, gathering, held

# A key of FUNCTIONS, and its second argument if it has one.
LogitsStep = tuple[Any, ...]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mul": operator.mul, "div": operator.truediv, "add": operator.add, "tanh": torch.tanh, "to": Tensor.to
}  # fmt: skip


def replay(logits: Any, steps: tuple[LogitsStep, ...]) -> Any:
    """Apply the recorded steps exactly as they were written."""
    for kind, *value in steps:
        logits = FUNCTIONS[kind](logits, *value)
    return logits


def scale_and_cap(steps: tuple[LogitsStep, ...]) -> tuple[float, float | None, Tensor | None] | None:
    """Return (logit_scale, softcap, bias), or None if the steps have another form.

    The form is `softcap · tanh(logit_scale · (z + bias) / softcap)`.
    """
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
            # int, because the compiler of torch 2.11 accepts no bool as an index.
            (after if capped else before)[int(kind == "div")] *= value[0]
    if not capped:
        return before[0] / before[1], None, bias
    cap = after[0] / after[1]
    if cap == 0.0 or before[0] == 0.0:
        return None
    # One division: (1 / cap) · cap need not be 1.
    return (before[0] * after[0]) / (before[1] * after[1]), abs(cap), bias


class ModelForward:
    """One forward pass of a model, which runs or has ended."""

    def __init__(self) -> None:
        self.runs = True


class LazyHead(threading.local):
    """The head from which this thread's model forward wants lazy logits, and that forward; None in compiled code."""

    def __init__(self) -> None:
        self.head: nn.Module | None = None
        self.forward: ModelForward | None = None


LAZY = LazyHead()


class _WithoutHooks(nn.Module):
    """Run the forward of a head without its hooks, which have run already."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head.forward(hidden)


def compute(
    head: nn.Module, hidden: Tensor, weights: HeadWeights | None, autocast: tuple[str, torch.dtype] | None
) -> Tensor:
    """Compute the head's own projection, with the weights and the autocast of its call."""
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
    """Make heads return real logits within this context.

    Enter it outside a checkpoint, because torch.compile allows no side effects within one.
    """
    before, LAZY.head = LAZY.head, None
    try:
        yield
    finally:
        LAZY.head = before


def _project(head: nn.Module, hidden: Tensor, weights: HeadWeights | None) -> Tensor:
    if gathered(head):
        return head(hidden)
    if weights is None or torch.compiler.is_compiling() or weights.are_in(head):
        return head.forward(hidden)
    # The call was within a functional_call that has ended, or the weights were replaced since.
    tensors = {f"head.{name}": tensor for name, tensor in weights.tensors.items()}
    return torch.func.functional_call(_WithoutHooks(head), tensors, (hidden,))


def gathers_itself(head: nn.Module) -> bool:
    """Return whether hooks around each call of the head gather its weights; accelerate replaces its forward instead."""
    return gathered(head) and OFFLOADED not in vars(head) and not torch.compiler.is_compiling()


def in_one_call(head: nn.Module, compute: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """Run compute(hidden) as the forward of the head and its parts, whose hooks gather the weights for it.

    Its backward pass gathers them once more. Every call gathers, so ranks that called a head different numbers of times
    would wait for each other forever.
    """

    def whole(rows: Tensor) -> Any:
        with held(head):
            return compute(rows)

    for module in reversed(gathering(head)):
        whole = partial(_as_forward, module, whole)
    return whole(hidden)


def _as_forward(module: nn.Module, compute: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    previous, waiting = vars(module).get("forward"), [compute]

    def forward(rows: Tensor) -> Any:
        _restore(module, previous)
        return waiting.pop()(rows)

    module.forward = forward
    try:
        return module(hidden)
    finally:
        if waiting:
            _restore(module, previous)


def _restore(module: nn.Module, previous: Any) -> None:
    del module.forward
    if previous is not None:
        module.forward = previous
