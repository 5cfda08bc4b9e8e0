# SPDX-License-Identifier: Apache-2.0
"""What every launcher shares: the device guard, row views, and the dtypes that the kernels take."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from liger_core import Unsupported
from liger_core.kernels import Kernel, Outputs
from torch import Tensor
from triton import knobs

from liger_triton.interpreter import round_to_nearest

if knobs.runtime.interpret:
    round_to_nearest()

NAMESPACE = "liger_triton"
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Programs of a persistent grid in the interpreter, where a program costs milliseconds and there is no device to fill.
INTERPRETER_PROCESSORS = 2


class TritonKernel(Kernel):
    """A Kernel that launches on the device of its tensors, whichever device is current."""

    def __init__(self, schema: str, allocate: Any, launch: Any) -> None:
        super().__init__(NAMESPACE, schema, allocate, launch)
        self.anchor = next(i for i, a in enumerate(self.schema.arguments) if str(a.type) == "Tensor")

    def execute(self, args: tuple[Any, ...]) -> Outputs:
        device = args[self.anchor].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return super().execute(args)
        return super().execute(args)


def supported(*tensors: Tensor | None) -> None:
    """Decline dtypes that the kernels do not compute in."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            raise Unsupported(f"the Triton kernels take float32, bfloat16 and float16, got {tensor.dtype}")


def rows_of(x: Tensor) -> Tensor:
    """x as (rows, width) with adjacent columns, read in place where its strides allow, else copied once."""
    if x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1):
        return x
    if x.stride(-1) == 1 or x.is_contiguous():
        try:
            return x.view(-1, x.shape[-1])
        except RuntimeError:
            pass
    return x.contiguous().view(-1, x.shape[-1])


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
