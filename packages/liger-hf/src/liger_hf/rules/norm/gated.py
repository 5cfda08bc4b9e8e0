# SPDX-License-Identifier: Apache-2.0
"""Forms of norms that take a gate or normalize groups of a row, written with the ops; the rule is in rule.py.

    gate after    norm(x) · weight · act(gate)      act is silu or sigmoid
    gate before   norm(x · act(gate)) · weight

State-space models have float32 rows beside a gate in the model's dtype.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import Op, gated_rms_norm, rms_norm

# A function of a module, x and its gate.
NormFunction = Callable[[nn.Module, Tensor, Any], Tensor]
GATES: dict[str, dict[str, Any]] = {
    "silu of the gate after": {},
    "sigmoid of the gate after": {"activation": "sigmoid"},
    "silu of the gate before": {"gate_first": True},
    "sigmoid of the gate before": {"gate_first": True, "activation": "sigmoid"},
}


def forms(eps: str, gated: bool, grouped: bool) -> Iterator[tuple[Op[..., Any], str, NormFunction]]:
    """Yield the possible forms of a norm with or without a gate and groups, each with its op and its description."""
    for offset, (name, options) in product((0.0, 1.0), GATES.items() if gated else (("", {}),)):
        words = [*(["groups"] if grouped else []), *(["weight_offset=1"] if offset else []), *([name] if name else [])]
        if gated:
            function = partial(_gated, eps=eps, grouped=grouped, weight_offset=offset, **options)
            yield gated_rms_norm, ", ".join(words), function
        else:
            yield rms_norm, ", ".join(words), partial(_in_groups, eps=eps, offset=offset)


def fits(weight: Tensor, x: Tensor, gate: Any, gated: bool) -> bool:
    """Return whether the check covers the dtypes of a call: all equal, or float32 rows and one dtype for the rest."""
    if x.dtype not in (weight.dtype, torch.float32):
        return False
    return not gated or (isinstance(gate, Tensor) and gate.shape == x.shape and gate.dtype == weight.dtype)


def _gated(module: Any, x: Tensor, gate: Tensor, *, eps: str, grouped: bool, **options: Any) -> Tensor:
    return gated_rms_norm(
        x, gate, module.weight, getattr(module, eps), group_size=module.group_size if grouped else None, **options
    )


def _in_groups(module: Any, x: Tensor, gate: None, *, eps: str, offset: float) -> Tensor:
    rows = rms_norm(x.float().unflatten(-1, (-1, module.group_size)), eps=getattr(module, eps)).flatten(-2)
    return (rows * (module.weight.float() + offset if offset else module.weight)).to(x.dtype)
