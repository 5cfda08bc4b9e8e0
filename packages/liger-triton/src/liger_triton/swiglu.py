# SPDX-License-Identifier: Apache-2.0
"""swiglu in Triton."""

import math

from torch import Tensor

from liger_triton._gated import PLAIN, SILU, gated
from liger_triton.launch import supported


def swiglu(
    gate: Tensor, up: Tensor | None = None, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0,
    gate_scale: float = 1.0, scale: float = 1.0, overwrite: bool = False,
) -> Tensor:  # fmt: skip
    supported(gate)
    numbers = PLAIN
    if limit is not None or not alpha == gate_scale == scale == 1.0 or shift:
        numbers = [
            math.inf if limit is None else float(limit),
            float(alpha),
            float(shift),
            float(gate_scale),
            float(scale),
        ]
    return _swiglu(gate, up, SILU, numbers, overwrite)


_swiglu = gated("swiglu")
