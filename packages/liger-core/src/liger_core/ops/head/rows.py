# SPDX-License-Identifier: Apache-2.0
"""The rows whose target counts: matmuls leave out the others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Where a matmul takes less than this, about 0.15 ms on an H200, waiting for the number of ignored rows costs more than
# they do.
PACK_FLOPS = 10**11
# Packed rows come in whole tiles of a matmul, and copying the others' rows pays from 1/32 of ignored ones on.
PACK_TILE = 128
PACK_SHARE = 32


class CountedRows:
    """The rows of hidden whose target counts.

    Their number is requested at once and waited for when `index` is first read.

    classes  of a row of logits on each rank
    number   of rows that count, where an earlier pass knows it; -1 if all rows are taken
    """

    def __init__(
        self, hidden: Tensor, target: Tensor, ignore_index: int, classes: int, pack: bool, number: int | None = None
    ) -> None:
        self.mask: Tensor | None = None
        self.number = -1 if number is None else number
        self.arriving: Tensor | None = None
        if not pack or number == -1:
            return
        if target.is_cuda:
            # A CUDA graph cannot wait, so it keeps all rows.
            if 2 * hidden.numel() * classes < PACK_FLOPS or torch.cuda.is_current_stream_capturing():
                return
            self.mask = target != ignore_index
            if number is None:
                self.arriving = self.mask.sum().to("cpu", non_blocking=True)
                self.arrived = torch.cuda.Event()
                self.arrived.record()
        elif target.device.type == "cpu":
            self.mask = target != ignore_index

    @cached_property
    def index(self) -> Tensor | None:
        """The rows to take, or None for all of them."""
        if self.mask is None:
            self.number = -1
            return None
        rows = self.mask.shape[0]
        if not self.mask.is_cuda:
            index = self.mask.nonzero()[:, 0]
            self.number = index.shape[0]
            return index if self.number < rows else None
        if self.arriving is not None:
            self.arrived.synchronize()
            self.number = int(self.arriving)
        whole = -(-self.number // PACK_TILE) * PACK_TILE
        if whole > rows - rows // PACK_SHARE:
            return None
        # Ignored rows fill the last tile; they have neither loss nor gradient.
        return self.mask.to(torch.uint8).argsort(descending=True, stable=True)[:whole]

    def take(self, full: Any) -> Any:
        """The rows that count of a tensor, or of each field of a tuple; None stays None."""
        if self.index is None or full is None:
            return full
        return full[self.index] if isinstance(full, Tensor) else type(full)._make(map(self.take, full))

    def like(self, full: Any) -> Any:
        """Return memory for the counted rows that stands for `full`; `full` itself if none is left out."""
        if self.index is None or full is None:
            return full
        if isinstance(full, Tensor):
            return full.new_empty(self.index.shape[0], *full.shape[1:])
        return type(full)._make(map(self.like, full))

    def scatter(self, taken: Any, full: Any) -> None:
        """Put results of the rows that count in their places. Other rows get 0, or -1 where the results are classes."""
        if self.index is None or taken is None or full is None:
            return
        if isinstance(full, Tensor):
            full.fill_(0 if full.is_floating_point() else -1).index_copy_(0, self.index, taken)
            return
        for source, target in zip(taken, full, strict=True):
            self.scatter(source, target)


def slices(rows: slice, most: int) -> Iterator[slice]:
    """Yield parts of the rows, at most so many at a time."""
    for start in range(rows.start, rows.stop, most):
        yield slice(start, min(start + most, rows.stop))
