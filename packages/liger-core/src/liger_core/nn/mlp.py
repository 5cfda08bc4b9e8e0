# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from liger_core import ops
from liger_core.errors import OptionError

_GATES: dict[str, Callable[..., Tensor]] = {"silu": ops.swiglu, "gelu_tanh": ops.geglu, "gelu": partial(ops.geglu, approximate="none")}


class GatedMLP(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, with the names of Llama, or of Phi-3 if gate and up are packed.

    activation  "silu", "gelu_tanh" or "gelu"
    packed      gate and up are one Linear, `gate_up_proj`
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    gate_up_proj: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Literal["silu", "gelu_tanh", "gelu"] = "silu",
        bias: bool = False,
        packed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _GATES:
            raise OptionError(f"GatedMLP: activation must be one of {', '.join(map(repr, _GATES))}, got {activation!r}")
        self.activation, self.packed = activation, packed
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        for name in ("gate_up_proj",) if packed else ("gate_proj", "up_proj"):
            self.add_module(name, nn.Linear(hidden_size, (2 if packed else 1) * intermediate_size, **place))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.gate_up_proj(x),) if self.packed else (self.gate_proj(x), self.up_proj(x))
        result: Tensor = self.down_proj(_GATES[self.activation](*projected))
        return result

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
