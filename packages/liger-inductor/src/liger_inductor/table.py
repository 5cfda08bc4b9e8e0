# SPDX-License-Identifier: Apache-2.0
"""op → implementation: the ops whose time goes to reading and writing memory, which a fused loop does once."""

from __future__ import annotations

import liger_core
from liger_core.backend import Implementations
from liger_inductor.compiled import compiled

# Not those whose time goes to matmuls, which Inductor leaves to the same library as the reference, nor swiglu and geglu: on a CPU, the exponential
# that Inductor generates is slower than PyTorch's (forward at 512 × 1024: 0.75 to 1.1 of the speed of plain PyTorch in two runs).
TABLE: Implementations = {
    op: compiled(op)
    for op in (
        liger_core.rms_norm,
        liger_core.add_rms_norm,
        liger_core.layer_norm,
        liger_core.rope,
        liger_core.qk_norm_rope,
        liger_core.relu_squared,
    )
}
