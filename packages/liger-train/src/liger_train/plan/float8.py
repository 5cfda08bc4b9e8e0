# SPDX-License-Identifier: Apache-2.0
"""Float8 linear layers that take the memory of torchao's compiled ones, for plans, which need no torchao."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from liger_core.kernels import define, library_of
from liger_train.float8 import RECIPES, chosen_layers, gathers_in_float8
from liger_train.setup import Setup

EIGHT_BITS = torch.float8_e4m3fn


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


# A matmul in float8, whose operands are given in the dtype of the result.
multiply = define(library_of("liger_plan"), "float8_matmul", "(Tensor a, Tensor b) -> Tensor", _product)
library_of("liger_plan").impl("float8_matmul", _product, "CompositeExplicitAutograd")


def _transposed(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape, dtype=EIGHT_BITS)


# A weight in the order of memory of the backward pass's matmul, which the compiler saves.
transpose = define(library_of("liger_plan"), "float8_transposed", "(Tensor weight) -> Tensor", _transposed)
library_of("liger_plan").impl("float8_transposed", _transposed, "CompositeExplicitAutograd")


@register_flop_formula(multiply.overloadpacket)
def _operations(a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    """Return half of the operations, since a GPU does twice as many in float8."""
    return a[0] * a[1] * b[1]


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
        # A compiled layer saves the transposed copies of most gathered weights: in Llama 3 8B, those of v, gate, up and
        # down, 172 of 208 MiB. The matmul reads the copy here, so that the compiler does not move it.
        ctx.is_transposed = is_gathered and torch.compiler.is_compiling()
        weight = transpose(weight) if ctx.is_transposed else weight
        ctx.save_for_backward(saved, weight)
        ctx.twice, ctx.shape = twice, x.shape
        y = multiply(rows, weight.t()).view(*x.shape[:-1], len(weight))
        del first, cast
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        first = grad.to(EIGHT_BITS)
        second = grad.to(EIGHT_BITS) if ctx.twice else first
        # Or a gathered weight in the other order of memory.
        cast = None if ctx.is_transposed else weight.to(EIGHT_BITS)
        grad_x = multiply(flat, weight).view(ctx.shape)
        del cast, first
        # In the dtype of activations; autograd casts it to the dtype of the weight.
        grad_weight = multiply(flat.t(), rows)
        del second
        return grad_x, grad_weight, None, None
