# SPDX-License-Identifier: Apache-2.0
"""The training data as sequences of tokens: from a file, a folder, a saved dataset, or Python's standard library."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import Tokenizer
from torch import Tensor

from liger_core.errors import OptionError, listed
from liger_hf.presets import VOCABULARY
from liger_train.configs import has_code_of_its_own, loading_options
from liger_train.fields import epochs
from liger_train.setup import LIBRARY, Setup
from liger_train.text import library, trained_tokenizer
from liger_train.train.labels import labeled
from liger_train.train.packing import in_sequences
from liger_train.train.rows import FILES_OF_ROWS, TEXT, Rows, open_rows

# Longer texts are cut to this length, or to what the steps need, at no more than six characters per token.
CHARACTERS, CHARACTERS_OF_A_TOKEN = 4_000_000, 6
# As git does: a file with a zero byte among the first 8000 is binary.
HEAD = 8000
# Files of tokenizers, besides their configs.
VOCABULARIES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")
# Special tokens of a tokenizer that is trained here; fine-tuning the saved model needs padding.
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"


@dataclass(frozen=True)
class Data:
    """Sequences of tokens, the same number for each step, and their tokenizer.

    held    sequences that are never trained on
    digest  identifies the data
    """

    # (number, sequence), (number, 2, sequence) with labels, or (number, 3, sequence) with labels and positions
    sequences: Tensor
    tokenizer: Any
    digest: str
    notes: list[str]
    held: Tensor | None = None


def check_source(source: str) -> None:
    """Raise OptionError if there is nothing to read."""
    path = Path(source).expanduser()
    if source != LIBRARY and not path.is_dir() and not path.is_file():
        problem = "is neither a file nor a folder; write what it gives to a file" if path.exists() else "does not exist"
        raise OptionError(
            f"train: --data must be a file, a folder, a dataset saved by datasets, or {LIBRARY}, got {source}, which "
            f"{problem}"
        )


def read(setup: Setup, vocabulary: int, own_tokenizer: bool) -> Data:
    """The data of a setup, for a model with `vocabulary` embeddings and perhaps its own tokenizer.

    Raises OptionError if there is no text, or not enough, or if the model has weights but no tokenizer.
    """
    notes: list[str] = []
    a_step = setup.sequences_per_step
    # First: the text may take long to read.
    tokenizer = _tokenizer(setup, notes) if own_tokenizer else None
    rows = open_rows(setup.data, notes)
    if rows is not None and rows.columns != TEXT:
        documents = labeled(rows, tokenizer, setup, notes)
        is_held = _held(len(documents), setup.validation)
        training, others = (
            [documents[i] for i in chosen.nonzero().flatten().tolist()] for chosen in (~is_held, is_held)
        )
        sequences, held = (in_sequences(chosen, tokenizer, setup) for chosen in (training, others))
        if setup.packing:
            padding = 1 - sum(document.shape[1] for document in training) / max(1, sequences[:, 0].numel())
            packed = f"{len(training)} documents into {len(sequences)} sequence{'s' * (len(sequences) > 1)}"
            notes.append(f"Packed {packed}; {padding:.1%} of their tokens are padding.")
        needed, count = f"the data must have at least the {a_step} sequences of a step", len(sequences)
    else:
        tokenizer, whole, count = _texts(rows, setup, vocabulary, tokenizer, notes)
        is_held = _held(len(whole), setup.validation)
        sequences, held = whole[~is_held], whole[is_held]
        needed = f"the text must have at least the {a_step} × {setup.sequence} tokens of a step"
    ids = (each[:, 0] if each.dim() == 3 else each for each in (sequences, held) if len(each))
    largest = max((int(each.max()) for each in ids), default=0)
    if largest >= vocabulary:
        raise OptionError(
            f"train: the tokens must be below {vocabulary}, the number of embeddings of {setup.model}, got token "
            f"{largest}"
        )
    # Drop the rest of the text, which does not fill a step.
    sequences = sequences[: len(sequences) // a_step * a_step]
    if not len(sequences):
        raise OptionError(
            f"train: {needed}, got {count} from {setup.data}; "
            "use more text, or a smaller --batch, --accumulation, --sequence or --validation"
        )
    if setup.validation:
        notes.append(
            f"Held out {is_held.sum()} of {len(is_held)} {'documents' if setup.packing else 'sequences'} for "
            "validation."
        )
    digest = hashlib.sha256(sequences.numpy().tobytes()).hexdigest()
    return Data(sequences, tokenizer, digest, notes, held if setup.validation else None)


def _texts(
    rows: Rows | None, setup: Setup, vocabulary: int, tokenizer: Any, notes: list[str]
) -> tuple[Any, Tensor, int]:
    """The tokenizer of the model or of the text, sequences, and the number of tokens."""
    if setup.packing:
        raise OptionError(
            f"train: --packing needs rows with answers, got {setup.data}, whose text fills each sequence; leave it out"
        )
    wanted = math.ceil(
        CHARACTERS_OF_A_TOKEN * setup.steps * setup.sequences_per_step * setup.sequence / (1 - setup.validation)
    )
    # An epoch is the whole text.
    limit = max(CHARACTERS, wanted) if epochs(setup.set) is None else sys.maxsize
    texts = _up_to(_documents(setup.data, notes) if rows is None else rows.texts(), limit)
    if not any(texts):
        raise OptionError(
            f"train: --data must hold text, got {setup.data}, which has none{'; ' + notes[0] if notes else ''}"
        )
    if tokenizer is not None:
        ids = _tokens(tokenizer, texts)
    elif setup.data == LIBRARY:
        tokenizer, ids = _kept(texts, min(vocabulary, VOCABULARY))
    else:
        tokenizer = _trained(texts, min(vocabulary, VOCABULARY))
        ids = _tokens(tokenizer, texts)
    return tokenizer, ids[: ids.numel() // setup.sequence * setup.sequence].view(-1, setup.sequence), ids.numel()


def _held(number: int, share: float) -> Tensor:
    """Return a mask of the held-out sequences, which are evenly spaced and the same for every batch size."""
    count = min(max(1, round(share * number)), number) if share else 0
    is_held = torch.zeros(number, dtype=torch.bool)
    is_held[(2 * torch.arange(count) + 1) * number // (2 * max(count, 1))] = True
    return is_held


def with_steps(setup: Setup, data: Data) -> Setup:
    """The setup with the number of steps of its epochs, if it has any."""
    number = epochs(setup.set)
    if number is None:
        return setup
    return replace(setup, steps=max(1, math.ceil(number * (len(data.sequences) // setup.sequences_per_step))))


def _documents(source: str, notes: list[str]) -> Iterator[str]:
    if source == LIBRARY:
        yield from library(CHARACTERS)
        return
    check_source(source)
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path, notes)
        return
    text = _text(path)
    if not text:
        raise OptionError(f"train: --data must be a file of text, got {path}, which is empty, binary or cannot be read")
    yield text


def _up_to(texts: Iterable[str], limit: int) -> list[str]:
    pieces: list[str] = []
    size = 0
    for text in texts:
        pieces.append(text[: limit - size])
        size += len(pieces[-1])
        if size >= limit:
            break
    return pieces


def _folder(folder: Path, notes: list[str]) -> Iterator[str]:
    """The text files in a folder and its subfolders, in a fixed order; hidden files are ignored, and other files are
    named in a note."""
    skipped: list[str] = []
    tables: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or any(component.startswith(".") for component in name.parts):
            continue
        text = _text(path)
        if text is None or path.suffix in FILES_OF_ROWS:
            (skipped if text is None else tables).append(str(name))
        if text is not None:
            yield text
    if skipped:
        notes.append(f"Files in {folder} that are not text were skipped: {listed(skipped)}.")
    if tables:
        notes.append(
            f"Files in {folder} were read as text, not as rows: {listed(tables)}; give one as --data to train on its "
            "rows."
        )


def _text(path: Path) -> str | None:
    """The text of a file; None if it is binary or cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if b"\0" not in file.read(HEAD):
            return path.read_text(encoding="utf-8", errors="replace")
    return None


def _tokenizer(setup: Setup, notes: list[str]) -> Any:
    """Return the tokenizer of the model, or None if it has none and its weights are random: others know the tokens of
    theirs alone."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(setup.model, **loading_options(setup))
    # Of any class: a damaged tokenizer.json raises Exception itself, and tokenizers in Python without a file a
    # TypeError.
    except Exception as problem:
        if (refused := has_code_of_its_own(setup.model, problem)) is not None:
            raise refused from problem
        reason = " ".join(str(problem).split()).rstrip(".")
    else:
        if _has_words(tokenizer):
            return tokenizer
        reason = "it has only special tokens"
    folder = Path(setup.model)
    if folder.is_dir() and not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        reason = "there is no tokenizer.json"
    if setup.random_weights:
        notes.append(f"The tokenizer of {setup.model} cannot be loaded ({reason}), so one was trained on the text.")
        return None
    raise OptionError(
        f"train: --model must have a tokenizer, got {setup.model}, whose tokenizer cannot be loaded: {reason}; "
        "save one there with tokenizer.save_pretrained, or use --random-weights, which trains one on the text"
    )


def _has_words(tokenizer: Any) -> bool:
    """Whether a tokenizer has more than special tokens.

    Without files, Transformers makes a tokenizer of special tokens, and at most "▁", for many model types.
    """
    # Tokenizers of mistral-common have no such method, and no vocabulary without files.
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return len(tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens, *added}) > 1


def _trained(texts: list[str], vocabulary: int) -> Any:
    return _fast(trained_tokenizer(_up_to(texts, CHARACTERS), vocabulary, (END_OF_TEXT, PADDING)))


def _fast(trained: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END_OF_TEXT, pad_token=PADDING)


def _kept(texts: list[str], vocabulary: int) -> tuple[Any, Tensor]:
    """Return a tokenizer trained on the texts, and their tokens, from the user's cache if possible.

    Without the cache this takes seconds, even for a run of two steps, because the Trainer draws its sequences from the
    whole text.
    """
    parts = "".join(f"{len(text)}:{text}" for text in texts)
    key = hashlib.sha256(f"{tokenizers.__version__} {vocabulary} {END_OF_TEXT} {PADDING} {parts}".encode()).hexdigest()[
        :32
    ]
    file = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "liger" / f"text-{key}.pt"
    # Whatever is wrong with the file, it can be made again.
    with contextlib.suppress(Exception):
        saved = torch.load(file, weights_only=True)
        return _fast(Tokenizer.from_str(saved["tokenizer"])), saved["tokens"].long()
    tokenizer = _trained(texts, vocabulary)
    ids = _tokens(tokenizer, texts)
    # Without a place to write to, there is no cache.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            torch.save({"tokenizer": tokenizer.backend_tokenizer.to_str(), "tokens": ids.int()}, temporary)
        # In one step: ranks and the runs of a sweep read the text at the same time.
        Path(temporary.name).replace(file)
    return tokenizer, ids


def _tokens(tokenizer: Any, texts: list[str]) -> Tensor:
    """The concatenated tokens of all texts, each followed by the end-of-text token if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, *end]])
