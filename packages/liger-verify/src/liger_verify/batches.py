# SPDX-License-Identifier: Apache-2.0
"""Batches that reveal a wrong reduction: sequences differ in the number of tokens in the loss, and some have none."""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch; all tensors are (rows, length).

    labels     the next token, -100 where it is not in the loss: prompts, padding, the end of a document
    positions  the position of each token in its document
    documents  the index of each token's document, -1 for padding; attention is causal within a document
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor

    def take(self, columns: slice) -> "Batch":
        """Return the same rows with these tokens only."""
        return Batch(*(t[:, columns].contiguous() for t in (self.ids, self.labels, self.positions, self.documents)))

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        return Batch(*(t.to(device) for t in (self.ids, self.labels, self.positions, self.documents)))

    def valid(self) -> int:
        return int((self.labels != IGNORED).sum())


def batches(count: int, rows: int, length: int, vocabulary: int, seed: int) -> list[Batch]:
    """Return micro-batches of packed sequences; of three or more, the second to last has no token in the loss."""
    generator = torch.Generator().manual_seed(seed)
    return [_batch(i, count, rows, length, vocabulary, generator) for i in range(count)]


def _batch(index: int, count: int, rows: int, length: int, vocabulary: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    column = torch.arange(length).expand(rows, length)
    # Two documents per row, of different lengths in each row.
    cut = (length // 2 + torch.arange(rows)[:, None] * 3 + index) % (length - 2) + 1
    documents = (column >= cut).long()
    padding = (index * 2 + torch.arange(rows)[:, None]) % max(1, length // 4)
    documents = torch.where(column >= length - padding, -1, documents)
    positions = torch.where(documents == 1, column - cut, column)
    labels = torch.where(documents[:, 1:] == documents[:, :-1], ids[:, 1:], IGNORED)
    labels = torch.cat((labels, torch.full((rows, 1), IGNORED)), 1)
    # Some prompts are so long that a shard of the sequence may have no label.
    prompt = length // 2 if index % 3 == 1 else index % 5
    labels = torch.where((column < prompt) | (documents < 0), IGNORED, labels)
    if count > 2 and index == count - 2:
        labels = torch.full_like(labels, IGNORED)
    return Batch(ids, labels, torch.where(documents < 0, 0, positions), documents)
