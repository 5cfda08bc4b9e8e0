# SPDX-License-Identifier: Apache-2.0
"""Float8 linear layers that take the memory of torchao's compiled ones, for plans, which need no torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_train.float8 import RECIPES, chosen_layers, gathers_in_float8
from liger_train.setup import Setup

EIGHT_BITS = torch.float8_e4m3fn


def in_float8(model: Any, setup: Setup, notes: list[str]) -> None:
    """Replace linear layers, like liger_train.float8.convert."""
    for name in chosen_layers(model, setup, notes):
        layer = model.get_submodule(name)
        is_gathered = gathers_in_float8(setup, layer.out_features)
        model.set_submodule(name, Float8(layer, RECIPES[setup.precision] == "rowwise", is_gathered))


class Float8(nn.Linear):
    """A linear layer that saves its input in 8 bits for the backward pass.

    twice        with a scale per row, an operand of two matmuls is cast twice, along its rows and along its columns
    is_gathered  whether FSDP2 gathers the weight in 8 bits
    """

    def __init__(self, layer: nn.Linear, twice: bool, is_gathered: bool = False) -> None:
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight, self.bias, self.twice, self.is_gathered = layer.weight, layer.bias, twice, is_gathered

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        y: Tensor = _Matmul.apply(x, self.weight, self.twice, self.is_gathered)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, twice: bool, is_gathered: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        first = rows.to(EIGHT_BITS)
        saved = rows.to(EIGHT_BITS) if twice else first
        cast = None if is_gathered else weight.to(EIGHT_BITS)
        ctx.save_for_backward(saved, weight)
        ctx.twice, ctx.shape = twice, x.shape
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        del first, cast
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight: Tensor
        _, weight = ctx.saved_tensors
        first = grad.to(EIGHT_BITS)
        second = grad.to(EIGHT_BITS) if ctx.twice else first
        # Or a gathered weight in the other order of memory.
        cast = weight.to(EIGHT_BITS)
        grad_x = grad.new_empty(ctx.shape)
        del cast, first
        # In the dtype of activations; autograd casts it to the dtype of the weight.
        grad_weight = grad.new_empty(weight.shape)
        del second
        return grad_x, grad_weight, None, None
