# SPDX-License-Identifier: Apache-2.0
"""lora_linears in Triton: core's matmuls of the layers, and the passes of lora_linear for all adapters at once."""

from liger_core.ops.lora_linears import lora_linears as composed
from liger_triton.launch import TritonKernel, supported
from liger_triton.lora_linear import PASSES

lora_linears = composed.implementation(PASSES, TritonKernel, supported)
