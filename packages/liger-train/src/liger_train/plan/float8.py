# SPDX-License-Identifier: Apache-2.0
"""Float8 linear layers that take the memory of torchao's compiled ones, for plans, which need no torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_train.float8 import RECIPES, chosen_layers
from liger_train.setup import Setup

EIGHT_BITS = torch.float8_e4m3fn


def in_float8(model: Any, setup: Setup, notes: list[str]) -> None:
    """Replace linear layers, like liger_train.float8.convert."""
    for name in chosen_layers(model, setup, notes):
        layer = model.get_submodule(name)
        model.set_submodule(name, Float8(layer, RECIPES[setup.precision] == "rowwise"))


class Float8(nn.Linear):
    """A linear layer that saves its input in 8 bits for the backward pass.

    twice  with a scale per row, an operand of two matmuls is cast twice, along its rows and along its columns
    """

    def __init__(self, layer: nn.Linear, twice: bool) -> None:
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight, self.bias, self.twice = layer.weight, layer.bias, twice

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        y: Tensor = _Matmul.apply(x, self.weight, self.twice)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, twice: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        first = rows.to(EIGHT_BITS)
        saved = rows.to(EIGHT_BITS) if twice else first
        cast = weight.to(EIGHT_BITS)
        ctx.save_for_backward(saved, weight)
        ctx.twice, ctx.shape = twice, x.shape
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        del first, cast
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight: Tensor
        _, weight = ctx.saved_tensors
        first = grad.to(EIGHT_BITS)
        second = grad.to(EIGHT_BITS) if ctx.twice else first
        cast = weight.to(EIGHT_BITS)
        grad_x = grad.new_empty(ctx.shape)
        del cast, first
        # In the dtype of activations; autograd casts it to the dtype of the weight.
        grad_weight = grad.new_empty(weight.shape)
        del second
        return grad_x, grad_weight, None
