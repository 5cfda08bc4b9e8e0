# SPDX-License-Identifier: Apache-2.0
"""The text that every machine has: the sources of Python's standard library, and a tokenizer trained on it."""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

# Tests and installed packages are not the library itself; encodings and pydoc_data are tables rather than text.
SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"})


def trained_tokenizer(texts: list[str], vocabulary: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer, with the special tokens first; the same texts give the same tokenizer."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocabulary, min_frequency=2, show_progress=False, special_tokens=list(special))
    return Tokenizer.from_str(tokenizer.to_str())


def library() -> Iterator[str]:
    """Yield the sources of the standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts)):
        yield path.read_text(encoding="utf-8", errors="replace")


class Sequences(Dataset[dict[str, Tensor]]):
    """A dataset of token sequences for the Trainer.

    sequences  (number, sequence), where tokens are their own labels; or (number, 2 or 3, sequence), where each item has
               a row of tokens, a row of labels, and perhaps a row of positions
    """

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return int(self.sequences.shape[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.sequences[index]
        return dict(zip(("input_ids", "labels", "position_ids"), ids if ids.dim() == 2 else (ids, ids), strict=False))
