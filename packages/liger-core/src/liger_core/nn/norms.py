# SPDX-License-Identifier: Apache-2.0
"""Norms, and activations that replace or contain them."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_core import checks, ops
from liger_core.checks import Cast
from liger_core.ops.gated_rms_norm import Activation


class RMSNorm(nn.Module):
    """Scale every row to unit root mean square, then by a weight; see `rms_norm`.

    width               size of the last dimension of x
    eps                 added to the mean square
    elementwise_affine  False for no weight
    weight_offset       1.0 for checkpoints that store weight - 1, such as Gemma's
    cast                "input" to round the scaled row before the weight (Llama), "float32" after it (Gemma)
    device, dtype       of the weight

    x        (..., width)   any floating dtype
    returns  (..., width)   dtype of x
    weight   (width,)       1 - weight_offset at first

    Example:

        >>> norm = nn.RMSNorm(64)
        >>> norm(torch.randn(2, 9, 64)).shape
        torch.Size([2, 9, 64])
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        cast: Cast = "input",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.integer(type(self).__name__, "width", width)
        self.width, self.eps, self.weight_offset, self.cast = width, eps, weight_offset, cast
        weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def extra_repr(self) -> str:
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.width}, eps={self.eps}{affine}, weight_offset={self.weight_offset}"

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, weight_offset=self.weight_offset, cast=self.cast)


class AddRMSNorm(RMSNorm):
    """Add x to the residual stream and normalize the sum; see `add_rms_norm`.

    The constructor and the weight are those of `RMSNorm`.

    x, residual  (..., width)   any floating dtype
    returns      the norm of x + residual, and x + residual

    Example:

        >>> norm = nn.AddRMSNorm(64)
        >>> x, residual = norm(torch.randn(2, 9, 64), torch.randn(2, 9, 64))
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return ops.add_rms_norm(x, residual, self.weight, self.eps, weight_offset=self.weight_offset, cast=self.cast)


class GatedRMSNorm(RMSNorm):
    """Scale every row, or every group of a row, to unit root mean square, with a gate; see `gated_rms_norm`.

    width               size of the last dimension of x
    eps                 added to the mean square
    elementwise_affine  False for no weight
    weight_offset       1.0 for checkpoints that store weight - 1
    activation          of the gate, "silu" or "sigmoid"
    gate_first          True if the gate comes before the norm (Mamba 2), False if it comes after (Qwen3-Next)
    group_size          number of columns of a group; the whole row by default
    device, dtype       of the weight

    x, gate  (..., width)   any floating dtype
    returns  (..., width)   dtype of x
    weight   (width,)       1 - weight_offset at first

    Example:

        >>> norm = nn.GatedRMSNorm(64, group_size=16)
        >>> norm(torch.randn(2, 9, 64), torch.randn(2, 9, 64)).shape
        torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        activation: Activation = "silu",
        gate_first: bool = False,
        group_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            width, eps, elementwise_affine=elementwise_affine, weight_offset=weight_offset, device=device, dtype=dtype
        )
        self.options: Any = {"activation": activation, "gate_first": gate_first, "group_size": group_size}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return ops.gated_rms_norm(x, gate, self.weight, self.eps, weight_offset=self.weight_offset, **self.options)


class LayerNorm(nn.LayerNorm):
    """Shift and scale every row to mean 0 and variance 1, then by weight and bias; see `layer_norm`.

    width               size of the last dimension of x; torch's module also takes several dimensions
    eps                 added to the variance
    elementwise_affine  False for no weight and no bias
    bias                False for no bias
    device, dtype       of the parameters

    x        (..., width)   any floating dtype
    returns  (..., width)   dtype of x
    weight   (width,)       1 at first
    bias     (width,)       0 at first

    Example:

        >>> norm = nn.LayerNorm(64)
        >>> norm(torch.randn(2, 9, 64)).shape
        torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.integer(type(self).__name__, "width", width)
        super().__init__(width, eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class AddLayerNorm(LayerNorm):
    """Add x to the residual stream and normalize the sum; see `add_layer_norm`.

    The constructor and the parameters are those of `LayerNorm`.

    x, residual  (..., width)   any floating dtype
    returns      the norm of x + residual, and x + residual

    Example:

        >>> norm = nn.AddLayerNorm(64)
        >>> x, residual = norm(torch.randn(2, 9, 64), torch.randn(2, 9, 64))
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class GroupNorm(nn.GroupNorm):
    """Normalize groups of neighboring channels of each sample; see `group_norm`.

    The constructor and the parameters are those of `torch.nn.GroupNorm`.

    x        (samples, num_channels, ...)   any floating dtype
    returns  the shape and dtype of x, dense: also of a channels_last x, as torch does on a GPU

    Example:

        >>> norm = nn.GroupNorm(4, 64)
        >>> norm(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    def forward(self, x: Tensor) -> Tensor:
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class PolyNorm(nn.Module):
    """Sum the first three powers of x with weights, each normalized over its row; see `poly_norm`.

    eps            added to the mean square of each power
    device, dtype  of the parameters

    x        (..., width)   any floating dtype and any width
    returns  (..., width)   dtype of x
    weight   (3,)           1/3 at first, as in the paper; the factor of the cube comes first
    bias     (1,)           0 at first

    Example:

        >>> activation = nn.PolyNorm()
        >>> activation(torch.randn(2, 9, 64)).shape
        torch.Size([2, 9, 64])
    """

    def __init__(
        self, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
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


class DyT(nn.Module):
    """Compute tanh(alpha · x) · weight + bias, which replaces a norm; see `dyt`.

    width          size of the last dimension of x
    alpha          initial value of the parameter alpha, 0.5 as in the paper
    bias           False for no bias
    device, dtype  of the parameters alpha (1,), weight (width,), 1 at first, and bias (width,), 0 at first

    x        (..., width)   any floating dtype
    returns  (..., width)   dtype of x

    Example:

        >>> norm = nn.DyT(64)
        >>> norm(torch.randn(2, 9, 64)).shape
        torch.Size([2, 9, 64])
    """

    bias: nn.Parameter | None

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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.initial_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1, **factory))
        self.weight = nn.Parameter(torch.empty(width, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(width, **factory)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.initial_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dyt(x, self.alpha, self.weight, self.bias)
