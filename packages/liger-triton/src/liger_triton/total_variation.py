# SPDX-License-Identifier: Apache-2.0
"""total_variation in Triton: the row passes of the divergences."""

from liger_core.ops.total_variation import total_variation as composed
from liger_triton._divergence import PASSES
from liger_triton.launch import TritonKernel, supported

total_variation = composed.implementation(PASSES, TritonKernel, supported)
