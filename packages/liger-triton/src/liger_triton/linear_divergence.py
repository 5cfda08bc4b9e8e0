# SPDX-License-Identifier: Apache-2.0
"""linear_divergence in Triton: core's chunk loop, cuBLAS matmuls, and the row passes of the divergences."""

from liger_core.ops.linear_divergence import linear_divergence as composed
from liger_triton._divergence import PASSES
from liger_triton.launch import TritonKernel, supported

linear_divergence = composed.implementation(PASSES, TritonKernel, supported)
