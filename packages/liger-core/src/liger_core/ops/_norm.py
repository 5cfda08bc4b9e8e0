# SPDX-License-Identifier: Apache-2.0
"""The checks of scale and weight that rms_norm and add_rms_norm share, and their wrong calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import Misuse
from liger_core.ops._inputs import misuses_of

Cast = Literal["input", "float32"]


def check_scaling(op: str, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str) -> None:
    """Check the rows and how they are scaled."""
    checks.floating(op, x=x, weight=weight)
    checks.at_least_one_dimension(op, "x", x)
    checks.vector(op, "weight", weight, x.shape[-1], "x", x)
    checks.positive(op, "eps", eps)
    checks.choice(op, "cast", cast, ("input", "float32"))
    if weight_offset != 0.0:
        checks.finite(op, "weight_offset", weight_offset)
    if weight is None and weight_offset != 0.0:
        checks.fail(OptionError, op, f"weight_offset must be 0 without a weight, got {weight_offset}")


def scaling_misuses(op: str, device: torch.device, inputs: int) -> Iterator[Misuse]:
    """Yield wrong calls with `inputs` tensors of rows before the weight."""
    misuse = misuses_of(op)

    def rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        return (torch.zeros(shape, device=device, dtype=dtype),) * inputs

    x, weight = rows(2, 4), torch.zeros(4, device=device)
    message = "weight must have shape (64,) to match x (2, 512, 64), got (4,)"
    yield misuse("weight_shape", (*rows(2, 512, 64), weight), ShapeError, message)
    yield misuse("scalar", rows(), ShapeError, "x must have at least one dimension, got a scalar")
    yield misuse("integers", rows(2, 4, dtype=torch.int64), DtypeError, "x must have a floating dtype, got torch.int64")
    yield misuse("eps_zero", (*x, weight, 0.0), OptionError, "eps must be a finite number > 0, got 0.0")
    yield misuse("eps_text", (*x, weight, "a"), OptionError, "eps must be a finite number > 0, got 'a'")
    yield misuse("no_tensor", (None, *x[1:]), DtypeError, "x must be a tensor, got NoneType")
    yield misuse("weight_list", (*x, [1.0] * 4), DtypeError, "weight must be a tensor, got list")
    yield misuse("cast", (*x, weight), OptionError, "cast must be one of 'input', 'float32', got 'bf16'", cast="bf16")
    yield misuse("offset", x, OptionError, "weight_offset must be 0 without a weight, got 1.0", weight_offset=1.0)
