# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: the sources of Python's standard library, tokenized here."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

# Tests and installed packages are not part of the library proper; the other two are tables rather than text.
SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"})


def trained_tokenizer(texts: list[str], vocabulary: int, special: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on these texts, with special tokens first.

    The same texts always give the same tokenizer.
    """
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocabulary, min_frequency=2, show_progress=False, special_tokens=list(special))
    return Tokenizer.from_str(trained.to_str())


def library(limit: int) -> list[str]:
    """Return the sources of the standard library, in a fixed order, up to about `limit` characters."""
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[str] = []
    size = 0
    for path in sorted(p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts)):
        sources.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(sources[-1])
        if size >= limit:
            break
    return sources


class Sequences(Dataset[dict[str, Tensor]]):
    """A dataset of token sequences for the Trainer.

    sequences  (number, sequence), where each sequence is its own label; or (number, 2 or 3, sequence), where the second
               row of each item holds its labels and the third its positions
    """

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return int(self.sequences.shape[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.sequences[index]
        return dict(zip(("input_ids", "labels", "position_ids"), ids if ids.dim() == 2 else (ids, ids), strict=False))
