# SPDX-License-Identifier: Apache-2.0
"""geglu in Triton."""

from typing import Literal

from torch import Tensor

from liger_triton._gated import GELU_ERF, GELU_TANH, PLAIN, gated
from liger_triton.launch import supported


def geglu(
    gate: Tensor, up: Tensor | None = None, *, approximate: Literal["tanh", "none"] = "tanh", overwrite: bool = False
) -> Tensor:
    supported(gate)
    return _geglu(gate, up, GELU_TANH if approximate == "tanh" else GELU_ERF, PLAIN, overwrite)


_geglu = gated("geglu")
