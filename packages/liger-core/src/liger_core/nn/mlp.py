# SPDX-License-Identifier: Apache-2.0
"""The gated MLP and the experts of a mixture."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from liger_core import checks, ops

# Activation → its op, and the options of the op that the name stands for.
GATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "silu": (ops.swiglu, {}),
    "gelu_tanh": (ops.geglu, {"approximate": "tanh"}),
    "gelu_pytorch_tanh": (ops.geglu, {"approximate": "tanh"}),
    "gelu": (ops.geglu, {"approximate": "none"}),
    "relu_squared": (ops.relu_squared, {}),
}


class GatedMLP(nn.Module):
    """Compute `down_proj(activation(gate_proj(x)) * up_proj(x))`; see `swiglu`, `geglu` and `relu_squared`.

    The parameters have the names of Llama's MLP, or of Phi-3's if gate and up are packed.

    hidden_size        size of the last dimension of x and of the result
    intermediate_size  size between the projections
    activation         "silu", "gelu", "gelu_tanh" (also called "gelu_pytorch_tanh") or "relu_squared"
    bias               True if the projections have one
    packed             True if gate and up are one Linear, gate_up_proj
    device, dtype      of the parameters
    options            those of the activation's op, which checks them in each call: gpt-oss has limit=7.0, alpha=1.702
                       and shift=1.0, Falcon-H1 gate_scale and scale

    x        (..., hidden_size)   any floating dtype
    returns  (..., hidden_size)   dtype of x

    Example:

        >>> mlp = nn.GatedMLP(64, 192)
        >>> mlp(torch.randn(2, 9, 64)).shape
        torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Literal["silu", "gelu_tanh", "gelu_pytorch_tanh", "gelu", "relu_squared"] = "silu",
        bias: bool = False,
        packed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.choice("GatedMLP", "activation", activation, tuple(GATES))
        self.activation, self.packed, self.options = activation, packed, options
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        if packed:
            self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, **factory)
        else:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, **factory)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **factory)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in {"activation": self.activation, **self.options}.items())

    def forward(self, x: Tensor) -> Tensor:
        op, fixed = GATES[self.activation]
        projected = (self.gate_up_proj(x),) if self.packed else (self.gate_proj(x), self.up_proj(x))
        if self.packed and op is ops.relu_squared:
            # One tensor is a squared ReLU without a gate.
            projected = projected[0].chunk(2, dim=-1)
        result: Tensor = self.down_proj(op(*projected, **fixed, **self.options))
        return result


class Experts(nn.Module):
    """Run each token through the experts that it is routed to, and sum their outputs; see `experts`.

    The parameters have the names and shapes of the experts in Transformers, such as Mixtral's.

    num_experts        number of experts
    hidden_size        size of the last dimension of x and of the result
    intermediate_size  size between the projections of an expert
    device, dtype      of the parameters
    options            those of `experts`, such as activation and limit

    x        (tokens, hidden_size)   any floating dtype
    index    (tokens, k)             the experts of each token
    weight   (tokens, k)             the router's weight of each
    returns  (tokens, hidden_size)   dtype of x

    gate_up_proj   (num_experts, 2·intermediate_size, hidden_size)   each expert begins as two `torch.nn.Linear`s
    down_proj      (num_experts, hidden_size, intermediate_size)

    Example:

        >>> experts, router = nn.Experts(8, 64, 192), torch.nn.Linear(64, 8)
        >>> x = torch.randn(9, 64)
        >>> weight, index = router(x).softmax(-1).topk(2)
        >>> experts(x, index, weight).shape
        torch.Size([9, 64])
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = options
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size, **factory))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{experts}, {hidden_size}, {intermediate_size}"

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return ops.experts(x, self.gate_up_proj, self.down_proj, index, weight, **self.options)
