# SPDX-License-Identifier: Apache-2.0
"""The derivative of log-probabilities by hidden, summed in the forward pass: two matmuls where the weight is frozen,
and none in the backward pass.

For chosen classes k of a row, with s′ the derivative of x by the logit:

    ∂ log p_k / ∂ hidden = s′_k W_k - E,   E = Σ_v p_v s′_v W_v

A tile of logits is overwritten by e^(x - m) · s′, where m is the largest x so far, and one matmul adds it to E. If a
tile raises the m of a row, that row of E is rescaled first. The b-th block of classes raises m for about one row in b;
the other rows are not read.

If the model is certain, s′_k W_k and E nearly cancel. The largest class has e^0, which is exact, and s′_k is rounded as
in the tile. For one class a row the difference is kept, rounded once. For several classes E is kept, not rounded.

This holds for log-probabilities alone: a gradient through the entropy also needs Σ p (x - m) W, and the gradient of
weight needs the logits.
"""

import torch
from torch import Tensor

from liger_core.kernels import multiply
from liger_core.op import accumulator
from liger_core.ops._token_passes import RowOptions, TokenPasses
from liger_core.ops.head.head import Head
from liger_core.ops.head.loop import Cut, Tile
from liger_core.ops.head.shards import RowSum


class HeadDerivative:
    """Sums the derivative by hidden while tiles go by.

    memory  for the derivative, of one chosen class a row, or for E of several
    local   the chosen classes (N, K) of this shard; others are outside
    """

    def __init__(
        self, passes: TokenPasses, head: Head, options: RowOptions, cut: Cut, memory: Tensor, local: Tensor,
        ranks: RowSum,
    ) -> None:  # fmt: skip
        self.passes, self.head, self.options, self.local, self.ranks = passes, head, options, local, ranks
        self.memory = memory[: head.hidden.shape[0]]
        wide = accumulator(memory.dtype)
        self.total = self.memory if memory.dtype == wide else torch.empty_like(self.memory[: cut.rows], dtype=wide)
        self.top = self.total.new_zeros(self.memory.shape[0])

    def sum_of(self, rows: slice) -> Tensor:
        """Return the memory of E for these rows."""
        return self.memory[rows] if self.total is self.memory else self.total[: rows.stop - rows.start]

    def add(self, tile: Tile, options: RowOptions, moments: Tensor) -> None:
        """Add the classes of a tile to the sums of its rows and to E; the tile's logits are overwritten."""
        total, first = self.sum_of(tile.rows), tile.classes.start
        self.passes.exponentials(tile.logits, self.head.target[tile.rows], options, moments, total, first)
        self.top[tile.rows] = moments[:, 0]
        multiply(total, tile.logits, self.head.weight[tile.classes], None if first == 0 else total)

    def finish(self, rows: slice, moments: Tensor, selected: Tensor) -> None:
        """Turn the sums of these rows into the derivative, from their moments over all shards and the targets' x."""
        total, derivative, local = self.sum_of(rows), self.memory[rows], self.local[rows]
        options = self.options.of(rows, slice(None))
        factor = (self.top[rows] - moments[:, 0]).exp() / moments[:, 1] * options.unit(moments[:, 0])
        if not self.head.weight.shape[0]:
            total.zero_()
        # An ignored row has no gradient, whatever its logits are.
        counted = self.head.target[rows]
        index = torch.where(counted[:, None], local, -1) if local.shape[1] == 1 else local[:, :0]
        slope = chosen_slopes(options, selected, derivative.dtype)[:, : index.shape[1]]
        out = total if self.ranks.shared else derivative
        self.passes.combined(out, total, torch.where(counted, -factor, 0.0), self.head.weight, index, slope)
        if self.ranks.shared:
            self.ranks.start(total)
            self.ranks.end(total)
            if total is not derivative:
                derivative.copy_(total)


def chosen_slopes(options: RowOptions, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return s′ of the chosen classes (rows, K), rounded as in a tile of this dtype."""
    return options.unit(x[:, 0])[:, None] * options.bend(x).to(dtype).to(x.dtype)
