# SPDX-License-Identifier: Apache-2.0
"""The walk over the logits of a head: how they are cut for a budget, and their tiles one after the other.

Tiles have some rows and some classes; all classes of some rows come before the next rows. The schedules:

* At once: the upstream gradient is known but for a factor of all rows. A tile has all classes of its rows, and its loss
  and its gradient are computed in the forward pass: three matmuls.
* Kept: the upstream gradients of rows arrive later. Logits that fit the budget are kept until then, and their gradient
  overwrites them: three matmuls.
* Again: logits that do not fit are recomputed in the backward pass: four matmuls. Tiles take all rows and a block of
  classes: the gradient of weight is then one matmul a block, rounded once, and what is summed over the blocks in
  float32 is the gradient of hidden, which is small. Only if that sum does not fit are rows cut, too.

A cut may keep the first classes and compute the others again. A frozen head has a fourth (derivative.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from liger_core.kernels import multiply, slices
from liger_core.op import accumulator
from liger_core.ops._token_passes import REFERENCE_BLOCK
from liger_core.ops.head.head import Chunk, Head
from liger_core.ops.head.shards import Vocabulary

MiB = 1 << 20

# One H200, V=128256: chunks of 2048 rows and more run all three matmuls at full rate; a float32 dW costs 20 % at 2048
# rows, 5 % at 4096 and nothing in a single chunk or at 8192, so the default buys one chunk, or several as long.
CHUNK_BYTES = 2150 * MiB
CPU_BYTES = 64 * MiB
LONG_CHUNK = 2048
HALF_CHUNK = 4096
# Classes of a block, of which there are BLOCKS at least, fewer classes before rows are cut, and what their number is a
# multiple of. The gradient of hidden is read and written in float32 once a block, which takes 1 % of a step on an H200;
# 64 classes for each of its 132 processors fill these with whole waves of tiles (8192: 3 % slower).
BLOCK, NARROW, BLOCKS, MULTIPLE = 8448, 2048, 4, 128
# A sum in float32 beside a block gets one part in SUMMED of the budget.
SUMMED = 4
# Blocks of the gradient where all logits are kept and must stay.
KEPT_BLOCKS = 8


class Cut(NamedTuple):
    """How logits are cut into tiles.

    rows          of a tile
    classes       of a tile
    kept_classes  classes before the first tile, whose logits are kept for the backward pass
    dtype         in which gradients of weight are summed over groups of rows
    wide          whether the matmul writes logits in float32
    derives       whether the forward pass sums the derivative by hidden
    """

    rows: int
    classes: int
    kept_classes: int
    dtype: torch.dtype
    wide: bool = False
    derives: bool = False

    def blocks(self, classes: int, stays: int = 0) -> list[slice]:
        """Return the classes that are kept and those of each tile, of so many; none reaches over the class `stays`.

        Without any class there is an empty tile: the other ranks wait for this one.
        """
        middle = max(self.kept_classes, stays)
        starts = [
            *([0] if self.kept_classes else []),
            *range(self.kept_classes, middle, self.classes),
            *range(middle, classes, self.classes),
        ]
        return list(map(slice, starts, [*starts[1:], classes])) or [slice(0, 0)]

    def tile(self, rows: int) -> int:
        """Return the number of logits that fit the memory of a tile, of a head with so many rows."""
        return min(self.rows, rows) * self.classes

    def scratch(self, head: Head, needs: list[bool], blocks: int, *, slopes: bool) -> int:
        """Return the bytes of a walk: its tile, unless all logits are kept, and the gradient of hidden that several
        tiles add to; on the CPU also what the passes and matmuls of the reference allocate.

        blocks  float32 blocks of logits that these passes hold
        slopes  whether the gradient of logits is computed
        """
        (rows, width), classes, dtype = head.hidden.shape, head.weight.shape[0], head.hidden.dtype
        total, length, copied = accumulator(dtype), min(self.rows, rows), 0
        logit = total if self.wide else dtype
        held = 0 if self.kept_classes == classes else self.tile(rows) * logit.itemsize
        if slopes and logit != dtype:
            held += self.tile(rows) * dtype.itemsize
        if slopes and needs[0] and self.classes < classes and dtype != total:
            held += length * width * total.itemsize
            copied = self.classes * (length + width)
        if slopes and needs[1] and self.dtype != dtype:
            copied = max(copied, length * (self.classes + width))
        if head.hidden.is_cpu:
            # A matmul that is summed in another dtype copies what it multiplies.
            held += 4 * max(copied, blocks * min(length * max(self.kept_classes, self.classes), REFERENCE_BLOCK))
        return held


def chunking(
    rows: int, width: int, classes: int, dtype: torch.dtype, device: str, *,
    chunk: int = 0, budget: int = 0, accumulate_dtype: torch.dtype | None = None,
) -> Cut:  # fmt: skip
    """Chunks of `chunk` rows, by the report's formula for -1, or for 0 those that fit a budget in bytes beyond inputs
    and gradients.

    The gradients that are required make no difference: matmuls of other sizes round differently, and recomputed logits
    must match their statistics. A single chunk writes dW in its own dtype, which is exact and takes least. With
    several, dW is summed in float32 where the budget holds that sum beside a long chunk, else in its own dtype (in
    float32 always for float16, which overflows before it is scaled).
    """
    wide = accumulate_dtype or accumulator(dtype)
    once = accumulate_dtype or (accumulator(dtype) if dtype == torch.float16 else dtype)
    count, row = max(rows, 1), classes * dtype.itemsize
    if chunk > 0:
        length = min(chunk, count)
    elif chunk == -1:
        length = 1 << max(0, -(-rows // max(1, -(-classes // width))) - 1).bit_length()
    elif count * row <= held_bytes(budget, device):
        length = count
        half = -(-count // 2)
        saves = (count - half) * row > classes * width * (wide.itemsize - once.itemsize)
        if not budget and device != "cpu" and half >= HALF_CHUNK and saves:
            # Two halves that share a buffer and the float32 sum take less memory than one chunk, and hardly more time.
            length = half
    elif not budget:
        length = max(1, CPU_BYTES // row) if device == "cpu" else _power_below(CHUNK_BYTES // row)
    else:
        # The sum exists beside the chunks, and at the end beside the gradient that it becomes.
        beside = classes * width * (wide.itemsize - dtype.itemsize)
        holds = budget >= max(beside + LONG_CHUNK * row, classes * width * wide.itemsize)
        if accumulate_dtype is None and dtype != torch.float16 and not holds:
            wide, beside = once, 0
        length = _power_below((budget - beside) // row)
    return Cut(length, classes, 0, once if count <= length else wide)


def _power_below(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def tiling(
    rows: int, width: int, classes: int, dtype: torch.dtype, device: str, wide: bool, *,
    chunk: int = 0, budget: int = 0, accumulate_dtype: torch.dtype | None = None,
) -> Cut:  # fmt: skip
    """The tiles for a budget in bytes beyond inputs and gradients, or chunks of rows with all classes where they are
    asked for."""
    total, once, count = accumulator(dtype), accumulate_dtype or dtype, max(rows, 1)
    if chunk:
        cut = chunking(rows, width, classes, dtype, device, chunk=chunk, accumulate_dtype=accumulate_dtype)
        return cut._replace(rows=min(cut.rows, count))
    held = held_bytes(budget, device)
    # The numbers of a row.
    held -= min(64 * count, held // 64)
    # Logits in float32 are not overwritten by a gradient in another dtype.
    logit = total.itemsize if wide else dtype.itemsize
    item = logit + dtype.itemsize if logit != dtype.itemsize else logit
    if count * classes * item <= held:
        return Cut(count, classes, classes, once)
    beside = width * total.itemsize if total != dtype else 0
    wanted = min(BLOCK, -(-classes // BLOCKS))
    spare = (held - count * beside) // (count * item)
    if spare >= min(wanted, NARROW):
        room = (spare - wanted) * item // logit
        kept_classes = _rounded(room, classes - wanted) if room > 0 else 0
        return Cut(count, min(wanted, _rounded(spare, classes)), kept_classes, once)
    length = _rounded(held // (beside + wanted * item), count)
    block = _rounded((held - length * beside) // (length * item), classes)
    wide_sum = dtype == torch.float16 or held >= 4 * classes * width * total.itemsize
    summed = accumulate_dtype or (total if wide_sum else dtype)
    return Cut(length, block, 0, summed if length < count else once)


def held_bytes(budget: int, device: str) -> int:
    """Return the budget, or that of the device if it is 0."""
    return budget or (CPU_BYTES if device == "cpu" else CHUNK_BYTES)


def _rounded(classes: int, most: int) -> int:
    """Return the classes of a block, in whole tiles of a matmul where there are as many."""
    return min(most, max(1, classes // MULTIPLE * MULTIPLE or classes))


class ChunkOptions(NamedTuple):
    """How many rows of logits are held at a time, as kernels take it: chunk 0 for the budget and -1 for the formula
    of the report, budget 0 for the default.

    main_grad  a sum over batches to which the gradient of weight is added, in its place
    wide       the matmul writes logits in float32
    """

    accumulate_dtype: torch.dtype | None
    chunk: int
    budget: int
    pack: bool
    main_grad: Tensor | None
    wide: bool

    @classmethod
    def from_arguments(
        cls, accumulate_dtype: torch.dtype | None, chunk: Chunk, budget: int | None, pack: bool,
        main_grad: Tensor | None, wide: bool = False,
    ) -> Self:  # fmt: skip
        """Make them from the options of an op."""
        rows = 0 if chunk is None else -1 if chunk == "report" else chunk
        return cls(accumulate_dtype, rows, budget or 0, pack, main_grad, wide)

    def chunks(self, hidden: Tensor, classes: int) -> Cut:
        """Cut for gradients that are computed at once."""
        rows, width = hidden.shape
        return chunking(rows, width, classes, hidden.dtype, hidden.device.type, **self._limits())

    def derivative(self, head: Head, vocab: Vocabulary) -> Cut | None:
        """Cut for a derivative by hidden that the forward pass sums (derivative.py); None where all logits can be kept
        instead, which takes as few matmuls, or where the sum does not fit.

        What is kept for one class a row counts as the gradient that it becomes. Ranks decide alike.
        """
        (rows, width), dtype, device = head.hidden.shape, head.hidden.dtype, head.hidden.device.type
        classes, shared, several = vocab.usual(), vocab.group is not None, head.target.shape[1] > 1
        fits = tiling(rows, width, classes, dtype, device, False, budget=self.budget).kept_classes == classes
        if self.chunk or (shared and several) or fits:
            return None
        wide, held = accumulator(dtype), held_bytes(self.budget, device)
        held -= min(64 * rows, held // 64) + (rows * width * wide.itemsize if several else 0)
        beside, block = 0 if several or wide == dtype else width * wide.itemsize, min(BLOCK, -(-classes // BLOCKS))
        # The sum is read and written once a block: fewer rows with more classes each take less time.
        most = held // SUMMED // beside if beside else held // (block * dtype.itemsize)
        length = rows if several or shared else _rounded(max(0, most), rows)
        room = (held - length * beside) // max(1, length * dtype.itemsize)
        if room < min(NARROW, -(-classes // BLOCKS)):
            return None
        return Cut(length, _rounded(room, classes if beside else block), 0, dtype, derives=True)

    def tiles(self, head: Head, vocab: Vocabulary) -> Cut:
        """Cut for gradients that arrive later."""
        (rows, width), hidden, mine = head.hidden.shape, head.hidden, vocab.mine(head.weight.shape[0])

        def cut(classes: int) -> Cut:
            sizes = rows, width, max(1, classes), hidden.dtype, hidden.device.type
            return tiling(*sizes, self.wide, **self._limits())._replace(wide=self.wide)

        if vocab.group is None:
            return cut(mine)
        # Ranks meet once for each group of rows, so that these must be the same on all, however uneven their shards
        # are.
        tiles = cut(mine)._replace(rows=cut(vocab.usual()).rows)
        return tiles if mine else tiles._replace(kept_classes=0)

    def _limits(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "budget": self.budget, "accumulate_dtype": self.accumulate_dtype}


class Tile(NamedTuple):
    """Logits of some rows and classes, and the memory for their gradient, which mostly is the same."""

    rows: slice
    classes: slice
    logits: Tensor
    slope: Tensor


class Tiles:
    """The logits of a head, a tile at a time, in memory that the tiles share.

    kept_logits  the logits of the first `cut.kept_classes` classes, or memory for them; None if no logits are kept
    """

    def __init__(self, head: Head, cut: Cut, kept_logits: Tensor | None = None) -> None:
        self.head, self.kept_logits = head, kept_logits
        self.rows, self.classes = head.hidden.shape[0], head.weight.shape[0]
        self.cut = cut._replace(kept_classes=0) if kept_logits is None else cut
        self.dtype = head.hidden.dtype
        self.memory: dict[torch.dtype, Tensor] = {}

    def __iter__(self) -> Iterator[Tile]:
        """Compute each tile; logits that are kept in their place."""
        for rows, classes in self._places():
            memory = None if self.kept_logits is None or classes.start else self.kept_logits[rows]
            logits = self.logits(rows, classes, memory)
            yield Tile(rows, classes, logits, logits)

    def again(self, overwrite: bool) -> Iterator[Tile]:
        """Take each tile for its gradient: kept logits as they are, recomputed ones else.

        The gradient may overwrite kept logits, or has memory of its own.
        """
        stays = 0
        if self.kept_logits is not None and not overwrite:
            # Logits that must stay are taken block by block.
            stays, self.cut = self.cut.kept_classes, self.cut._replace(kept_classes=0)
            if self.cut.classes == self.classes and self.kept_logits.dtype == self.dtype:
                self.cut = self.cut._replace(classes=_rounded(-(-self.classes // KEPT_BLOCKS), self.classes))
        for rows, classes in self._places(stays):
            memory = self.kept_logits if classes.stop <= max(stays, self.cut.kept_classes) else None
            logits = self.logits(rows, classes) if memory is None else memory[rows, classes]
            in_place = logits.dtype == self.dtype and (memory is None or not stays)
            yield Tile(rows, classes, logits, logits if in_place else self._view(rows, classes, self.dtype))

    def _places(self, stays: int = 0) -> Iterator[tuple[slice, slice]]:
        return itertools.product(slices(slice(0, self.rows), self.cut.rows), self.cut.blocks(self.classes, stays))

    def logits(self, rows: slice, classes: slice, out: Tensor | None = None) -> Tensor:
        """Compute the logits of a tile, in the shared memory if none is given."""
        if out is None:
            out = self._view(rows, classes, accumulator(self.dtype) if self.cut.wide else self.dtype)
        weight, bias = self.head.weight, self.head.bias
        if classes.stop - classes.start < self.classes:
            weight, bias = weight[classes], None if bias is None else bias[classes]
        if out.dtype == weight.dtype:
            multiply(out, self.head.hidden[rows], weight.t(), bias)
            return out
        multiply(out, self.head.hidden[rows], weight.t())
        return out if bias is None else out.add_(bias)

    def _view(self, rows: slice, classes: slice, dtype: torch.dtype) -> Tensor:
        """The beginning of the shared memory as a dense matrix."""
        if dtype not in self.memory:
            size = self.cut.tile(self.rows)
            self.memory[dtype] = torch.empty(size, dtype=dtype, device=self.head.hidden.device)
        count, width = rows.stop - rows.start, classes.stop - classes.start
        return self.memory[dtype][: count * width].view(count, width)
