# SPDX-License-Identifier: Apache-2.0
"""The checks and workloads of residual streams (..., streams, width), which the ops of hyper-connections share."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.op import Workload
from liger_core.ops._inputs import ROWS, WIDTHS, workloads_of

Maker = Callable[[torch.device, torch.dtype, int, int, int], tuple[Tensor, ...]]


def check(name: str, x: Tensor) -> None:
    if x.dim() < 2:
        checks.misshapen(name, "x must have the dimensions (..., streams, width)", x)


def check_shape(name: str, argument: str, value: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    """Check that an argument, if not None, has this shape, which follows from that of x."""
    if value is not None and value.shape != shape:
        checks.mismatch(name, argument, value, tuple(shape), "x", x)


def workloads(make: Maker) -> Iterator[Workload]:
    """Yield workloads of tokens × streams × hidden size: DeepSeek V4's, and series over tokens and hidden size."""
    of_size = workloads_of(make, "NSH")
    yield of_size(256, 4, 512, quick=True)
    for tokens, hidden in ((16384, 4096), (8192, 7168)):
        yield of_size(tokens, 4, hidden)
    for tokens in ROWS[:-1]:
        yield of_size(tokens, 4, 4096, axis="N", quick=tokens <= 1024)
    for hidden in WIDTHS[:-2]:
        yield of_size(8192, 4, hidden, axis="H", quick=hidden <= 512)
