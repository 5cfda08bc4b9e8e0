# SPDX-License-Identifier: Apache-2.0
"""kl_div in Triton: the row passes of the divergences."""

from liger_core.ops.kl_div import kl_div as composed
from liger_triton._divergence import PASSES
from liger_triton.launch import TritonKernel, supported

kl_div = composed.implementation(PASSES, TritonKernel, supported)
