# SPDX-License-Identifier: Apache-2.0
"""The projection of an output head and the steps between it and the loss: computed as written, or read as scale and cap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
    """(logit_scale, softcap, bias) with which the steps are `softcap · tanh(logit_scale · (z + bias) / softcap)`; None if they are not."""
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


def gathered(head: nn.Module) -> bool:
    """The head's weights are whole only while its hooks have gathered them (ZeRO-3, a head sharded or offloaded by itself)."""
    return any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") or p.is_meta for p in head.parameters())


def compute(head: nn.Module, hidden: Tensor, autocast: tuple[str, torch.dtype] | None) -> Tensor:
    """The head's own projection, under the autocast that its call saw."""
    lazy, head.liger_lazy = head.liger_lazy, False  # type: ignore[assignment]
    try:
        if autocast is None:
            return head(hidden) if gathered(head) else head.forward(hidden)
        with torch.autocast(autocast[0], dtype=autocast[1]):
            return head(hidden) if gathered(head) else head.forward(hidden)
    finally:
        head.liger_lazy = lazy


def version_of(head: nn.Module) -> int | None:
    """The version counters of its plain weights, adapters too, by which a later update is noticed; compiled code carries none."""
    if torch.compiler.is_compiling() or gathered(head) or not all(isinstance(p, nn.Parameter) for p in head.parameters()):
        return None
    return sum(p._version for p in head.parameters())
