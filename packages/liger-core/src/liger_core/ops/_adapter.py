# SPDX-License-Identifier: Apache-2.0
"""The checks of a linear layer with a low-rank adapter, for the ops that compute one or several."""

from typing import NoReturn

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError
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
        checks.mismatch(op, f"a{suffix}", a, f"(rank, {x.shape[-1]})", "x", x)
    if b.dim() != 2 or b.shape[1] != a.shape[0]:
        checks.mismatch(op, f"b{suffix}", b, f"(outputs, {a.shape[0]})", f"a{suffix}", a)
    if (weight is None) == (base is None):
        got = "neither" if base is None else "both"
        checks.fail(OptionError, op, f"either weight{suffix} or base{suffix} must be given, got {got}")
    if weight is not None and weight.shape != (b.shape[0], x.shape[-1]):
        wanted = (b.shape[0], x.shape[-1])
        checks.misshapen(op, f"weight{suffix} must have shape {wanted} to match b{suffix} and x", weight)
    if base is not None and base.shape != (*x.shape[:-1], b.shape[0]):
        rows = (*x.shape[:-1], b.shape[0])
        checks.misshapen(op, f"base{suffix} must have shape {rows} to match x and b{suffix}", base)
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
        fail_dtype(op, f"base{suffix}", expected, base)
    # Outside autocast, b has the dtype of a.
    for factor in (a,) if low is None else (a, b):
        if factor.dtype not in (expected, accumulator(expected)) and not (
            low is not None and factor.dtype in (torch.float32, x.dtype)
        ):
            fail_dtype(op, f"a{suffix} and b{suffix}", expected, factor, "them")


def fail_dtype(op: str, names: str, expected: torch.dtype, tensor: Tensor, them: str = "it") -> NoReturn:
    wanted = f"{expected} like x, or {accumulator(expected)}"
    checks.fail(DtypeError, op, f"{names} must have dtype {wanted}, got {tensor.dtype}; cast {them}")
