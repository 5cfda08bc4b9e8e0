# SPDX-License-Identifier: Apache-2.0
"""Batches on which a wrong reduction shows: every sequence has another number of tokens that count, and some have none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch; all tensors are (rows, length).

    labels     the token after each one, -100 where it does not count: prompts, padding, the end of a document
    positions  within the document
    documents  the number of the document that a token is of, -1 for padding. Tokens see those before them in the same document
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor

    def part(self, columns: slice) -> Batch:
        """The same rows with these tokens only."""
        return Batch(*(t[:, columns].contiguous() for t in (self.ids, self.labels, self.positions, self.documents)))

    def valid(self) -> int:
        return int((self.labels != IGNORED).sum())


def batches(count: int, rows: int, length: int, vocabulary: int, seed: int) -> list[Batch]:
    """Micro-batches of packed sequences; the first is full, the last but one has no token that counts, if there are three."""
    generator = torch.Generator().manual_seed(seed)
    return [_batch(i, count, rows, length, vocabulary, generator) for i in range(count)]


def _batch(index: int, count: int, rows: int, length: int, vocabulary: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    column = torch.arange(length).expand(rows, length)
    # Two documents a row, of other lengths in each.
    cut = (length // 2 + torch.arange(rows)[:, None] * 3 + index) % (length - 2) + 1
    documents = (column >= cut).long()
    padding = (index * 2 + torch.arange(rows)[:, None]) % max(1, length // 4)
    documents = torch.where(column >= length - padding, -1, documents)
    positions = torch.where(documents == 1, column - cut, column)
    labels = torch.where(documents[:, 1:] == documents[:, :-1], ids[:, 1:], IGNORED)
    labels = torch.cat((labels, torch.full((rows, 1), IGNORED)), 1)
    # Prompts: so many that a shard of the sequence may have none.
    prompt = length // 2 if index % 3 == 1 else index % 5
    labels = torch.where((column < prompt) | (documents < 0), IGNORED, labels)
    if count > 2 and index == count - 2:
        labels = torch.full_like(labels, IGNORED)
    return Batch(ids, labels, torch.where(documents < 0, 0, positions), documents)
