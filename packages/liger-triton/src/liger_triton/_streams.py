# SPDX-License-Identifier: Apache-2.0
"""The residual streams of mix_streams and merge_streams and their coefficients, read through their strides."""

from torch import Tensor

from liger_core import Unsupported
from liger_triton.launch import power_of_two

# The most streams whose coefficients, one for each pair, fit in registers.
MOST = 8
# Columns of a tile, 16 bytes of bfloat16 for each of 128 threads, which then sums all streams of its columns alone.
BLOCK, WARPS = 1024, 4
# Neighboring columns that a thread adds before the running sums, which would otherwise fill its registers.
FOLD = 8


def check_streams(x: Tensor) -> int:
    """Return the block of streams, a power of two; decline more than MOST streams."""
    if x.shape[-2] > MOST:
        raise Unsupported(f"{x.shape[-2]} streams, more than {MOST}")
    return power_of_two(x.shape[-2])


def positions(tensor: Tensor, trailing: int, adjacent: bool = False) -> Tensor:
    """Return a tensor as (positions, its last dimensions), copied if its strides or `adjacent` columns require it."""
    shape = (tensor.shape[: tensor.dim() - trailing].numel(), *tensor.shape[tensor.dim() - trailing :])
    if adjacent and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor.reshape(shape)
