# SPDX-License-Identifier: Apache-2.0
"""op → implementation: the ops whose time goes to reading and writing memory, which a fused loop does once."""

from __future__ import annotations

import liger_core
from liger_core.backend import Implementations
from liger_inductor.compiled import compiled

# benchmarks/results/2026-11-23-cpu-inductor has their speed beside plain PyTorch. Not here:
# - what spends its time in matmuls, which Inductor leaves to the same library, and losses, whose references have derivatives of their own;
# - what PyTorch already has in one fast loop for a CPU: swiglu, geglu, dyt, softmax, group_norm and merge_streams became no faster or slower;
# - sparsemax and sinkhorn, which sort and iterate, and the modulated norms, which are slower in small calls.
# A fused layer_norm is 3 times as fast as the reference, which would run without it, but slower than F.layer_norm.
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
