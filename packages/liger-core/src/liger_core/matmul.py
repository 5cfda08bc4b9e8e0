# SPDX-License-Identifier: Apache-2.0
"""The matmuls of the ops.

A processor without instructions for a 16-bit dtype multiplies in float32, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_core.private_torch import multiplies_bfloat16, multiplies_float16

# 4 MiB in float32. Of the powers of two from 256 to 4096, this is the fastest one for heads on a CPU with AVX2.
TILE = 1024


def _emulated() -> frozenset[torch.dtype]:
    """The 16-bit dtypes that PyTorch multiplies slowly on this processor; none where it cannot say."""
    if not torch.backends.mkldnn.is_available():
        return frozenset({torch.bfloat16, torch.float16})
    multiplies = {torch.bfloat16: multiplies_bfloat16(), torch.float16: multiplies_float16()}
    processor: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    # oneDNN takes bfloat16 on every processor with AVX-512; without AVX512_BF16 that takes five times as long as
    # float32.
    if processor.get("avx512_f") and not processor.get("avx512_bf16"):
        multiplies[torch.bfloat16] = False
    return frozenset(dtype for dtype, fast in multiplies.items() if not fast)


EMULATED = _emulated()


@contextmanager
def plain_matmuls() -> Iterator[None]:
    """Multiply in the dtype of the operands on every processor, in all threads.

    For results that others are compared with: their error is that of plain PyTorch in that dtype.
    """
    global EMULATED
    before, EMULATED = EMULATED, frozenset()
    try:
        yield
    finally:
        EMULATED = before


def multiply(out: Tensor, a: Tensor, b: Tensor, base: Tensor | None = None) -> None:
    """out = base + a @ b, summed in the dtype of out or a wider one; base is a row, a matrix, or out itself."""
    if EMULATED and a.dtype in EMULATED and a.is_cpu:
        _multiply_in_float32(out, a, b, base)
    elif out.dtype == a.dtype:
        _ = torch.mm(a, b, out=out) if base is None else torch.addmm(base, a, b, out=out)
    elif out.dtype == torch.float32 and a.is_cuda:
        if base is None:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(base, a, b, out_dtype=torch.float32, out=out)
    else:
        multiply(out, a.to(out.dtype), b.to(out.dtype), base)


def _multiply_in_float32(out: Tensor, a: Tensor, b: Tensor, base: Tensor | None) -> None:
    """Convert one tile of each operand at a time: a copy of a whole weight in float32 may not fit."""
    wide = torch.promote_types(out.dtype, torch.float32)
    for rows in _tiles(out.shape[0]):
        for columns in _tiles(out.shape[1]):
            tile = out[rows, columns]
            total = tile if tile.dtype == wide else torch.empty_like(tile, dtype=wide)
            if base is None:
                total.zero_()
            elif base is not out or total is not tile:
                total.copy_(base[columns] if base.dim() == 1 else base[rows, columns])
            for inner in _tiles(a.shape[1]):
                total.addmm_(a[rows, inner].to(wide), b[inner, columns].to(wide))
            if total is not tile:
                tile.copy_(total)


def _tiles(size: int) -> list[slice]:
    return [slice(start, min(start + TILE, size)) for start in range(0, size, TILE)]
