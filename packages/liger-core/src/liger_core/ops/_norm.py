# SPDX-License-Identifier: Apache-2.0
"""The wrong calls of scale and weight that rms_norm and add_rms_norm share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import Misuse
from liger_core.ops._inputs import misuses_of

Cast = Literal["input", "float32"]


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
