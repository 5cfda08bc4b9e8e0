# SPDX-License-Identifier: Apache-2.0
"""Shared by mix_streams and merge_streams: residual streams and their coefficients, read through their strides."""

from __future__ import annotations

from torch import Tensor

from liger_core import Unsupported
from liger_triton.launch import power_of_two

# Streams of a position that fit in registers, with a coefficient for each pair.
MOST = 8
# Columns of a tile, 16 bytes of bfloat16 for each of 128 threads: a thread then has all streams of its columns, and
# sums them alone.
BLOCK, WARPS = 1024, 4
# Neighboring columns that a thread adds up before they enter the running sums, which would fill its registers
# otherwise.
FOLD = 8


def check_streams(x: Tensor) -> int:
    """The block of streams, a power of two."""
    if x.shape[-2] > MOST:
        raise Unsupported(f"{x.shape[-2]} streams, more than {MOST}")
    return power_of_two(x.shape[-2])


def positions(tensor: Tensor, trailing: int, adjacent: bool = False) -> Tensor:
    """The tensor as (positions, its last dimensions), in place where its strides allow, else copied; adjacent: with
    adjacent columns."""
    shape = (tensor.shape[: tensor.dim() - trailing].numel(), *tensor.shape[tensor.dim() - trailing :])
    if adjacent and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    try:
        return tensor.view(shape)
    except RuntimeError:
        return tensor.contiguous().view(shape)
