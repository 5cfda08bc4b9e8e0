# SPDX-License-Identifier: Apache-2.0
"""How a norm that takes a gate, or that works on groups of its row, is written with the ops; the rule is in norm.py.

    gate after    norm(x) · weight · act(gate)      act is silu or sigmoid
    gate before   norm(x · silu(gate)) · weight

Between the two steps a module keeps float32 or rounds, and so do the forms: those called wide keep it. State-space models have
float32 rows beside a gate in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import rms_norm, swiglu

# A form, as a function of a module, x and its gate.
Form = Callable[[nn.Module, Tensor, Any], Tensor]
Norm = Callable[..., Tensor]


def forms(eps: str, gated: bool, grouped: bool) -> Iterator[tuple[str, Form]]:
    """Those that a norm with or without a gate and groups may have, each with its words."""
    for offset in (0.0, 1.0):
        norm = partial(_in_groups if grouped else _whole, eps=eps, offset=offset)
        words = [*(["groups"] if grouped else []), *(["weight_offset=1"] if offset else [])]
        for name, form in (GATES if gated else {"": _norm}).items():
            yield ", ".join([*words, *([name] if name else [])]), partial(_bound, form, norm)


def fits(weight: Tensor, x: Tensor, gate: Any, gated: bool) -> bool:
    """A call like those of the check: all in one dtype, or float32 rows beside a weight and a gate in another."""
    if x.dtype not in (weight.dtype, torch.float32):
        return False
    return not gated or (isinstance(gate, Tensor) and gate.shape == x.shape and gate.dtype == weight.dtype)


def _bound(form: Callable[..., Tensor], norm: Norm, module: nn.Module, x: Tensor, gate: Any) -> Tensor:
    return form(partial(norm, module), x, gate)


def _whole(module: Any, x: Tensor, *, eps: str, offset: float) -> Tensor:
    return rms_norm(x, module.weight, getattr(module, eps), weight_offset=offset)


def _in_groups(module: Any, x: Tensor, *, eps: str, offset: float) -> Tensor:
    rows = rms_norm(x.unflatten(-1, (-1, module.group_size)), eps=getattr(module, eps)).flatten(-2)
    return rows * (module.weight.to(x.dtype) + offset if offset else module.weight)


def _norm(norm: Norm, x: Tensor, gate: None) -> Tensor:
    return norm(x.float()).to(x.dtype)


def _silu_after(norm: Norm, x: Tensor, gate: Tensor) -> Tensor:
    return swiglu(gate.to(x.dtype), norm(x))


def _sigmoid_after_wide(norm: Norm, x: Tensor, gate: Tensor) -> Tensor:
    return (norm(x.float()) * gate.float().sigmoid()).to(x.dtype)


def _silu_before_wide(norm: Norm, x: Tensor, gate: Tensor) -> Tensor:
    return norm(swiglu(gate.float(), x.float())).to(x.dtype)


GATES: dict[str, Callable[..., Tensor]] = {
    "silu of the gate after": _silu_after,
    "sigmoid of the gate after, wide": _sigmoid_after_wide,
    "silu of the gate before, wide": _silu_before_wide,
}
