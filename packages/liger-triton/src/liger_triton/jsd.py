# SPDX-License-Identifier: Apache-2.0
"""jsd in Triton: the row passes of the divergences."""

from liger_core.ops.jsd import jsd as composed
from liger_triton._divergence import PASSES
from liger_triton.launch import TritonKernel, supported

jsd = composed.implementation(PASSES, TritonKernel, supported)
