# SPDX-License-Identifier: Apache-2.0
"""Norms, and what takes their place, with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_core import ops
from liger_core.layout import Layout
from liger_core.nn.arguments import arguments_of, check_options
from liger_core.op import Op


class Norm(nn.Module):
    """An op on rows with weights of their width: `module(rows)` is `op(rows, weights, eps, **options)`.

    elementwise_affine  without it there are no weights
    bias                without it there is no bias, for an op that has one
    """

    op: ClassVar[Op[..., Any]]
    rows: ClassVar[tuple[str, ...]]
    weights: ClassVar[tuple[str, ...]]
    known: ClassVar[Mapping[str, Any]]
    weight: Any

    def __init__(
        self,
        width: int,
        eps: float | None = None,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(type(self).__name__, options, self.known)
        self.width, self.eps, self.options = width, self.op.signature.parameters["eps"].default if eps is None else eps, options
        for name in self.weights:
            wanted = elementwise_affine and (bias or name != "bias")
            self.register_parameter(name, nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows are scaled by 1, and no bias is added."""
        for name, weight in self.named_parameters(recurse=False):
            nn.init.constant_(weight, 0.0 if name == "bias" else 1.0 - self.options.get("weight_offset", 0.0))

    def forward(self, *rows: Tensor, **named: Tensor) -> Any:
        weights = {name: getattr(self, name) for name in self.weights}
        return self.op(**arguments_of(self, self.rows, rows, named), **weights, eps=self.eps, **self.options)

    def extra_repr(self) -> str:
        return ", ".join([str(self.width), f"eps={self.eps}", *(f"{name}={value!r}" for name, value in self.options.items())])


def norm_module(name: str, op: Op[..., Any]) -> type[Norm]:
    """The class of an op on rows: its layout says which arguments are rows and which are weights of their width."""
    assert isinstance(op.layout, Layout)
    of_width = {argument: dimensions == "(width)" for argument, dimensions in op.layout.arguments.items()}
    options = {p.name: p for p in op.signature.parameters.values() if p.name not in of_width and p.name != "eps"}
    body = {"op": op, "rows": tuple(a for a, own in of_width.items() if not own), "weights": tuple(a for a, own in of_width.items() if own)}
    return type(name, (Norm,), {"__doc__": op.__doc__, "__module__": __name__, **body, "known": options})


RMSNorm = norm_module("RMSNorm", ops.rms_norm)
AddRMSNorm = norm_module("AddRMSNorm", ops.add_rms_norm)
LayerNorm = norm_module("LayerNorm", ops.layer_norm)
AddLayerNorm = norm_module("AddLayerNorm", ops.add_layer_norm)
GatedRMSNorm = norm_module("GatedRMSNorm", ops.gated_rms_norm)
ModulatedRMSNorm = norm_module("ModulatedRMSNorm", ops.modulated_rms_norm)
ModulatedLayerNorm = norm_module("ModulatedLayerNorm", ops.modulated_layer_norm)


class GroupNorm(nn.GroupNorm):
    """torch's module with the op `group_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class PolyNorm(nn.Module):
    """`poly_norm` with its weights, an activation; all powers begin with the same share, as in the paper."""

    def __init__(self, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class DyT(nn.Module):
    """`dyt` with its weights, for the place of a norm; alpha begins at 0.5, as in the paper."""

    def __init__(
        self,
        width: int,
        alpha: float = 0.5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.first_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1, **place))
        self.weight = nn.Parameter(torch.empty(width, **place))
        self.bias = nn.Parameter(torch.empty(width, **place)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.first_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        return str(self.weight.shape[0])
