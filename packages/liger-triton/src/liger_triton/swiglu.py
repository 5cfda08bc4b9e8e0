# SPDX-License-Identifier: Apache-2.0
"""swiglu in Triton."""

from __future__ import annotations

from torch import Tensor

from liger_triton._gated import SILU, gated
from liger_triton.launch import supported


def swiglu(gate: Tensor, up: Tensor | None = None, *, overwrite: bool = False) -> Tensor:
    supported(gate)
    result: Tensor = _swiglu(gate, up, SILU, overwrite)
    return result


_swiglu = gated("swiglu")
