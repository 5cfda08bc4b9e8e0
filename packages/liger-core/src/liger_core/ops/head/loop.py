# SPDX-License-Identifier: Apache-2.0
"""The walk over the logits of a head: how they are cut for a budget, and their tiles one after the other.

A tile has some rows and some classes. The walk visits all classes of some rows before the next rows.

    schedule  chosen by                  when                                       matmuls  saved
    at once   ChunkOptions.chunks        the upstream gradient is one scalar        3        the gradients' sums
    kept      ChunkOptions.tiles         each row has its own, and the logits fit   3        the logits
    again     ChunkOptions.tiles         each row has its own, and they do not fit  4        the softmax statistics
    derived   ChunkOptions.derivative    they do not fit, and the weight is frozen  2        (N, H), the derivative

* At once: a tile has all classes of its rows. The forward pass computes its loss and, up to the scalar, its gradient.
* Kept: the gradient overwrites the logits in the backward pass.
* Again: the backward pass recomputes the logits. Tiles take all rows and a block of classes: the gradient of weight is
  one matmul a block, rounded once, and only the gradient of hidden, which is small, is summed over the blocks in
  float32. Rows are cut, too, only if that sum does not fit. A cut may keep the first classes and recompute the others.
* Derived: the forward pass sums the gradient of hidden, and the backward pass scales it (derivative.py).

Where the weight is frozen, "at once" and "kept" take two matmuls and "again" takes three.
"""

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
# The most classes of a block. Each block reads and writes the gradient of hidden in float32, which takes 1 % of a step
# on an H200; 64 classes for each of its 132 processors fill these with whole waves of tiles (8192: 3 % slower).
BLOCK = 8448
# The fewest blocks; rows are cut only if a block would have fewer classes than NARROW.
BLOCKS, NARROW = 4, 2048
# The classes of a block are a multiple of this.
MULTIPLE = 128
# A sum in float32 beside a block gets one part in SUMMED of the budget, and at most so many rows: on one H200, 16384
# rows × 64128 classes are 2 % faster than 32768 × 25728.
SUMMED, SUMMED_ROWS = 4, 16384
# Blocks of the gradient where all logits are kept and must stay.
KEPT_BLOCKS = 8
# Rows of a batch-invariant matmul on a GPU, which take about as long as reading the weight. On the CPU it is one row,
# because libraries may treat the last rows of a matrix differently.
GROUP = 256


class Cut(NamedTuple):
    """How logits are cut into tiles.

    rows          of a tile
    classes       of a tile
    kept_classes  the leading classes, whose logits are kept for the backward pass; they are the first tile
    dtype         in which gradients of weight are summed over groups of rows
    wide          whether the matmul writes logits in float32
    derives       whether the forward pass sums the derivative by hidden
    group         the rows of every matmul that computes logits, with padding; 0 multiplies a tile at once
    """

    rows: int
    classes: int
    kept_classes: int
    dtype: torch.dtype
    wide: bool = False
    derives: bool = False
    group: int = 0

    def blocks(self, classes: int, stays: int = 0) -> list[slice]:
        """Split the classes into the kept ones and blocks, none of which crosses the class `stays`.

        A shard without classes has one empty tile, since the other ranks wait for this one.
        """
        middle = max(self.kept_classes, stays)
        starts = [
            *([0] if self.kept_classes else []),
            *range(self.kept_classes, middle, self.classes),
            *range(middle, classes, self.classes),
        ]
        return list(map(slice, starts, [*starts[1:], classes])) or [slice(0, 0)]

    def tile(self, rows: int) -> int:
        """Return the number of logits in the memory of a tile, for a head with so many rows."""
        return min(self.rows, rows) * self.classes

    def scratch(self, head: Head, needs: list[bool], blocks: int, *, slopes: bool) -> int:
        """Return the bytes that a walk allocates: a tile, unless all logits are kept, and the gradient of hidden if
        several tiles add to it. On the CPU these include what passes and matmuls of the reference allocate.

        blocks  float32 blocks of logits that these passes hold
        slopes  whether the gradient of logits is computed
        """
        (rows, width), classes, dtype = head.hidden.shape, head.weight.shape[0], head.hidden.dtype
        total, length, copied = accumulator(dtype), min(self.rows, rows), 0
        logit = total if self.wide else dtype
        held = 0 if self.kept_classes == classes else self.tile(rows) * logit.itemsize
        held += self.group * (width * dtype.itemsize + classes * logit.itemsize)
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
    """Cut into chunks of `chunk` rows. -1 takes the formula of the Liger Kernel report. 0 takes chunks that fit a
    budget in bytes beyond inputs and gradients.

    The cut does not depend on which gradients are required, so that forward and backward always cut alike: matmuls of
    other sizes round differently, and recomputed logits must match their statistics.

    A single chunk writes dW in its own dtype: one rounding, and the least memory. Several chunks sum dW in float32 if
    the budget holds that sum beside a long chunk, and in its own dtype otherwise. In float16, where unscaled sums would
    overflow, they always sum in float32.
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
    chunk: int = 0, budget: int = 0, accumulate_dtype: torch.dtype | None = None, whole: bool = False,
) -> Cut:  # fmt: skip
    """Cut for upstream gradients that arrive later, within a budget in bytes beyond inputs and gradients.

    Keep all logits if they fit; otherwise recompute blocks of classes of all rows, and keep as many leading classes as
    fit; if the float32 gradient of hidden does not fit beside a block, cut rows, too. `whole` cuts only rows. `chunk`
    takes chunks of rows with all classes instead.
    """
    total, once, count = accumulator(dtype), accumulate_dtype or dtype, max(rows, 1)
    if chunk:
        cut = chunking(rows, width, classes, dtype, device, chunk=chunk, accumulate_dtype=accumulate_dtype)
        return cut._replace(rows=min(cut.rows, count))
    held = held_bytes(budget, device)
    # The statistics of the rows.
    held -= min(64 * count, held // 64)
    # Logits in float32 are not overwritten by a gradient in another dtype.
    logit = total.itemsize if wide else dtype.itemsize
    item = logit + dtype.itemsize if logit != dtype.itemsize else logit
    if count * classes * item <= held:
        return Cut(count, classes, classes, once)
    beside = width * total.itemsize if total != dtype else 0
    wanted = classes if whole else min(BLOCK, -(-classes // BLOCKS))
    spare = (held - count * beside) // (count * item)
    if not whole and spare >= min(wanted, NARROW):
        room = (spare - wanted) * item // logit
        kept_classes = _rounded(room, classes - wanted) if room > 0 else 0
        return Cut(count, min(wanted, _rounded(spare, classes)), kept_classes, once)
    length = _rounded(held // (beside + wanted * item), count)
    block = classes if whole else _rounded((held - length * beside) // (length * item), classes)
    wide_sum = dtype == torch.float16 or held >= 4 * classes * width * total.itemsize
    summed = accumulate_dtype or (total if wide_sum else dtype)
    return Cut(length, block, 0, summed if length < count else once)


def held_bytes(budget: int, device: str) -> int:
    """Return the budget, or the default of the device for 0."""
    return budget or (CPU_BYTES if device == "cpu" else CHUNK_BYTES)


def _rounded(count: int, most: int, multiple: int = MULTIPLE) -> int:
    """Round a number of classes or rows down to a multiple, if it is that large, and to at most `most`."""
    return min(most, max(1, count // multiple * multiple or count))


class ChunkOptions(NamedTuple):
    """The options that decide how many logits are held at a time, as kernels take them: chunk 0 follows the budget, -1
    is the formula of the Liger Kernel report, and budget 0 is the default.

    main_grad        a sum over batches to which the gradient of weight is added, in its place
    wide             the matmul writes logits in float32
    batch_invariant  a row of logits and its sums do not depend on other rows
    """

    accumulate_dtype: torch.dtype | None
    chunk: int
    budget: int
    pack: bool
    main_grad: Tensor | None
    wide: bool
    batch_invariant: bool

    @classmethod
    def from_arguments(
        cls, accumulate_dtype: torch.dtype | None, chunk: Chunk, budget: int | None, pack: bool,
        main_grad: Tensor | None, wide: bool = False, batch_invariant: bool = False,
    ) -> Self:  # fmt: skip
        """Create them from the arguments of an op."""
        rows = 0 if chunk is None else -1 if chunk == "report" else chunk
        return cls(accumulate_dtype, rows, budget or 0, pack, main_grad, wide, batch_invariant)

    def chunks(self, hidden: Tensor, classes: int) -> Cut:
        """Cut for the schedule "at once"."""
        rows, width = hidden.shape
        return chunking(rows, width, classes, hidden.dtype, hidden.device.type, **self._limits())

    def derivative(self, head: Head, vocab: Vocabulary) -> Cut | None:
        """Cut for a derivative by hidden that the forward pass sums (derivative.py).

        Return None if all logits can be kept, which takes as few matmuls, if the sum does not fit, if `chunk` or
        `batch_invariant` is set, or if rows of a sharded head have several targets. With one target a row, the
        derivative becomes the gradient of hidden, so the budget does not pay for it. All ranks decide alike.
        """
        (rows, width), dtype, device = head.hidden.shape, head.hidden.dtype, head.hidden.device.type
        classes, shared, several = vocab.usual(), vocab.group is not None, head.target.shape[1] > 1
        fits = tiling(rows, width, classes, dtype, device, False, budget=self.budget).kept_classes == classes
        if self.chunk or self.batch_invariant or (shared and several) or fits:
            return None
        wide, held = accumulator(dtype), held_bytes(self.budget, device)
        held -= min(64 * rows, held // 64) + (rows * width * wide.itemsize if several else 0)
        beside, block = 0 if several or wide == dtype else width * wide.itemsize, min(BLOCK, -(-classes // BLOCKS))
        # Each block reads and writes the sum: few rows with many classes each take less time than the reverse.
        most = max(0, held // SUMMED // beside if beside else held // (block * dtype.itemsize))
        whole, multiple = several or shared, LONG_CHUNK if most >= LONG_CHUNK else MULTIPLE
        length = rows if whole else _rounded(min(most, SUMMED_ROWS), rows, multiple)
        room = (held - length * beside) // max(1, length * dtype.itemsize)
        if room < min(NARROW, -(-classes // BLOCKS)):
            return None
        widest = _rounded(room, classes if beside else block)
        blocks = -(-classes // widest)
        # A short last block would take more of a wave of tiles than it fills.
        even = -(-classes // (blocks * MULTIPLE)) * MULTIPLE
        return Cut(length, min(widest, even), 0, dtype, derives=True)

    def tiles(self, head: Head, vocab: Vocabulary) -> Cut:
        """Cut for the schedules "kept" and "again"."""
        (rows, width), hidden, mine = head.hidden.shape, head.hidden, vocab.mine(head.weight.shape[0])

        def cut(classes: int) -> Cut:
            sizes = rows, width, max(1, classes), hidden.dtype, hidden.device.type
            tiles = tiling(*sizes, self.wide, whole=self.batch_invariant, **self._limits())
            group = (1 if hidden.is_cpu else GROUP) if self.batch_invariant else 0
            return tiles._replace(wide=self.wide, group=group)

        if vocab.group is None:
            return cut(mine)
        # Ranks meet once for each group of rows, which must be the same on all, however uneven their shards are.
        tiles = cut(mine)._replace(rows=cut(vocab.usual()).rows)
        return tiles if mine else tiles._replace(kept_classes=0)

    def _limits(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "budget": self.budget, "accumulate_dtype": self.accumulate_dtype}


class Tile(NamedTuple):
    """The logits of some rows and classes, and the memory for their gradient, which is mostly the same."""

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
        """Compute each tile; kept logits are written to their memory."""
        for rows, classes in self._places():
            memory = None if self.kept_logits is None or classes.start else self.kept_logits[rows]
            logits = self.logits(rows, classes, memory)
            yield Tile(rows, classes, logits, logits)

    def for_backward(self, overwrite: bool) -> Iterator[Tile]:
        """Yield the tiles of the backward pass: kept logits are reused, others are recomputed.

        overwrite  whether the gradient may overwrite kept logits; otherwise it has memory of its own
        """
        stays = 0
        if self.kept_logits is not None and not overwrite:
            # If the kept logits must stay, their gradient takes memory: a block of classes at a time.
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
        fused = bias if out.dtype == weight.dtype else None
        if self.cut.group:
            self._multiply_groups(out, self.head.hidden[rows], weight.t(), fused)
        else:
            multiply(out, self.head.hidden[rows], weight.t(), fused)
        return out if bias is None or bias is fused else out.add_(bias)

    def _multiply_groups(self, out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Multiply the same number of rows each time, from the same memory: libraries choose a kernel, and so the order
        of a sum, by sizes, strides and alignment."""
        group = hidden.new_zeros(self.cut.group, hidden.shape[1])
        padded = out.new_empty(len(group), out.shape[1])
        for rows in slices(slice(0, len(hidden)), len(group)):
            count = rows.stop - rows.start
            group[:count] = hidden[rows]
            product = out[rows] if 1 < count == len(group) else padded
            multiply(product, group, weight, bias)
            if product is padded:
                out[rows] = padded[:count]

    def _view(self, rows: slice, classes: slice, dtype: torch.dtype) -> Tensor:
        """Return the beginning of the shared memory as a dense matrix."""
        if dtype not in self.memory:
            size = self.cut.tile(self.rows)
            self.memory[dtype] = torch.empty(size, dtype=dtype, device=self.head.hidden.device)
        count, width = rows.stop - rows.start, classes.stop - classes.start
        return self.memory[dtype][: count * width].view(count, width)
