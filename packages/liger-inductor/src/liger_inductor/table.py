# SPDX-License-Identifier: Apache-2.0
"""op → implementation: the ops whose time goes to reading and writing memory, which a fused loop does once."""

from __future__ import annotations

import liger_core
from liger_core.backend import Implementations
from liger_inductor.compiled import compiled

# benchmarks/results/2026-11-23-cpu-inductor has their speed beside plain PyTorch. Not here:
# - what spends its time in matmuls, which Inductor leaves to the same library, and losses, whose references have derivatives of their own;
# - what was not faster in both passes (candidates.csv there): swiglu, geglu, dyt, softmax, group_norm, add_layer_norm, merge_streams, which PyTorch
#   already runs in few fast loops; sparsemax and sinkhorn, which sort and iterate; the modulated norms, which are slower in small calls;
# - poly_norm, whose bias gradient has up to 14 times the error of the reference's, and which cannot be traced without a bias.
# layer_norm is slower than F.layer_norm, but the reference, which would run in its place, takes 2 to 7 times as long.
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
