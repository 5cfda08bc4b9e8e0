# SPDX-License-Identifier: Apache-2.0
"""op → implementation: the ops whose time goes to reading and writing memory, which a fused loop does once."""

import liger_core
from liger_core.backend import Implementations
from liger_inductor.compiled import compiled

# benchmarks/results/2026-11-23-cpu-inductor has their speed beside plain PyTorch; the package's README says why each of
# the other ops is not here. layer_norm is slower than F.layer_norm, but the reference, which would run instead, takes 2
# to 7 times as long.
TABLE: Implementations = {
    op: compiled(op)
    for op in (
        liger_core.rms_norm,
        liger_core.add_rms_norm,
        liger_core.gated_rms_norm,
        liger_core.layer_norm,
        liger_core.rope,
        liger_core.qk_norm_rope,
        liger_core.relu_squared,
        liger_core.mix_streams,
        liger_core.attention_residual,
    )
}
