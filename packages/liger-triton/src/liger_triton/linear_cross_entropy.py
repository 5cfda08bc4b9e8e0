# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy in Triton: core's chunk loop, cuBLAS matmuls, and the row passes of the losses."""

from liger_core.ops.linear_cross_entropy import linear_cross_entropy as composed
from liger_triton._softmax_loss import PASSES
from liger_triton.launch import TritonKernel, supported

linear_cross_entropy = composed.implementation(PASSES, TritonKernel, supported)
