# SPDX-License-Identifier: Apache-2.0
"""The checks of a linear layer with a low-rank adapter, for the ops that compute one or several."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import accumulator, autocast_dtype


def check_shapes(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    base: Tensor | None,
    suffix: str = "",
) -> None:
    """Check the shapes of a layer and its adapter; `suffix` follows the names of the layer's tensors."""
    if a.dim() != 2 or a.shape[1] != x.shape[-1]:
        wanted = f"a{suffix} must have shape (rank, {x.shape[-1]}) to match x {checks.shape(x)}"
        checks.fail(ShapeError, op, f"{wanted}, got {checks.shape(a)}")
    if b.dim() != 2 or b.shape[1] != a.shape[0]:
        wanted = f"b{suffix} must have shape (outputs, {a.shape[0]}) to match a{suffix} {checks.shape(a)}"
        checks.fail(ShapeError, op, f"{wanted}, got {checks.shape(b)}")
    if (weight is None) == (base is None):
        got = "neither" if base is None else "both"
        checks.fail(OptionError, op, f"either weight{suffix} or base{suffix} must be given, got {got}")
    if weight is not None and weight.shape != (b.shape[0], x.shape[-1]):
        wanted = f"weight{suffix} must have shape {(b.shape[0], x.shape[-1])} to match b{suffix} and x"
        checks.fail(ShapeError, op, f"{wanted}, got {checks.shape(weight)}")
    if base is not None and base.shape != (*x.shape[:-1], b.shape[0]):
        wanted = f"base{suffix} must have shape {(*x.shape[:-1], b.shape[0])} to match x and b{suffix}"
        checks.fail(ShapeError, op, f"{wanted}, got {checks.shape(base)}")
    checks.vector(op, f"bias{suffix}", bias, b.shape[0], f"b{suffix}", b)


def no_bias_beside(op: str, bias: Tensor | None, base: Tensor | None, suffix: str = "") -> None:
    if base is not None and bias is not None:
        checks.fail(OptionError, op, f"bias{suffix} must be None where base{suffix} is given, which has it already")


def check_dtypes(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    base: Tensor | None,
    suffix: str = "",
) -> None:
    low = autocast_dtype(x.device.type)
    if low is None:
        checks.same_dtype(op, "x", x, **{f"weight{suffix}": weight, f"bias{suffix}": bias})
    expected = low or x.dtype
    if base is not None and base.dtype not in (expected, accumulator(expected)):
        checks.fail(
            DtypeError,
            op,
            f"base{suffix} must have dtype {expected} like x, or {accumulator(expected)}, got {base.dtype}; cast it",
        )
    # Outside autocast, b has the dtype of a.
    for factor in (a,) if low is None else (a, b):
        if factor.dtype not in (expected, accumulator(expected)) and not (
            low is not None and factor.dtype in (torch.float32, x.dtype)
        ):
            sentence = (
                f"a{suffix} and b{suffix} must have dtype {expected} like x, or {accumulator(expected)}, "
                f"got {factor.dtype}; cast them"
            )
            checks.fail(DtypeError, op, sentence)
