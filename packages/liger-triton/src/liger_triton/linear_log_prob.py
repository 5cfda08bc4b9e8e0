# SPDX-License-Identifier: Apache-2.0
"""linear_log_prob in Triton: core's chunk loop, cuBLAS matmuls, and the row passes of the losses."""

from liger_core.ops.linear_log_prob import linear_log_prob as composed
from liger_triton._softmax_loss import PASSES
from liger_triton.launch import TritonKernel, supported

linear_log_prob = composed.implementation(PASSES, TritonKernel, supported)
