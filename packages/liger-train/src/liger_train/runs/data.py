# SPDX-License-Identifier: Apache-2.0
"""Training data as sequences of tokens, from a file, a folder, a saved dataset, or Python's standard library."""

import contextlib
import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import Tokenizer
from torch import Tensor

from liger_core.errors import listed
from liger_hf.presets import VOCABULARY
from liger_train.configs import loading_options, untrusted_code_error
from liger_train.errors import SetupError
from liger_train.fields import epochs
from liger_train.runs.labels import labeled
from liger_train.runs.packing import in_sequences
from liger_train.runs.rows import FILES_OF_ROWS, TEXT, Rows, open_rows
from liger_train.setup import LIBRARY, Setup
from liger_train.text import library, trained_tokenizer

# Texts are cut to this length, or to what the steps need if a token has six characters, whichever is longer.
CHARACTERS, CHARACTERS_OF_A_TOKEN = 4_000_000, 6
# A file with a zero byte among this many first bytes is binary, as in git.
HEAD = 8000
# Files with the vocabulary of a tokenizer.
VOCABULARIES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")
# Special tokens of a tokenizer that is trained on the text; fine-tuning the saved model needs padding.
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"


@dataclass(frozen=True)
class Data:
    """Sequences of tokens, a multiple of those of a step, and their tokenizer.

    held_out  sequences for validation
    digest    a hash of the training sequences
    """

    # (number, sequence), (number, 2, sequence) with labels, or (number, 3, sequence) with labels and positions
    sequences: Tensor
    tokenizer: Any
    digest: str
    notes: list[str]
    held_out: Tensor | None = None


def check_source(source: str) -> None:
    """Raise OptionError if the source does not exist or cannot be read."""
    path = Path(source).expanduser()
    if source != LIBRARY and not path.is_dir() and not path.is_file():
        problem = "is neither a file nor a folder; save its output to a file" if path.exists() else "does not exist"
        raise SetupError(
            f"--data must be a file, a folder, a dataset saved by datasets, or {LIBRARY}, got {source}, which {problem}"
        )


def read(setup: Setup, vocabulary: int, own_tokenizer: bool) -> Data:
    """Read the data of a setup.

    vocabulary     the number of embeddings of the model
    own_tokenizer  use the model's tokenizer if it has one, instead of training one on the text

    Raises OptionError if there is too little text, and if a model with weights has no tokenizer.
    """
    notes: list[str] = []
    a_step = setup.sequences_per_step
    # Before the text, which may take long to read.
    tokenizer = _tokenizer(setup, notes) if own_tokenizer else None
    rows = open_rows(setup.data, notes)
    if rows is not None and rows.columns != TEXT:
        documents = labeled(rows, tokenizer, setup, notes)
        is_held_out = _held_out_mask(len(documents), setup.validation)
        training, others = ([*compress(documents, mask.tolist())] for mask in (~is_held_out, is_held_out))
        sequences, held_out = (in_sequences(split, tokenizer, setup) for split in (training, others))
        if setup.packing:
            padding = 1 - sum(document.shape[1] for document in training) / max(1, sequences[:, 0].numel())
            packed = f"{len(training)} documents into {len(sequences)} sequence{'s' * (len(sequences) > 1)}"
            notes.append(f"Packed {packed}; {padding:.1%} of their tokens are padding.")
        needed, count = f"the data must have at least the {a_step} sequences of a step", len(sequences)
    else:
        tokenizer, whole, count = _texts(rows, setup, vocabulary, tokenizer, notes)
        is_held_out = _held_out_mask(len(whole), setup.validation)
        sequences, held_out = whole[~is_held_out], whole[is_held_out]
        needed = f"the text must have at least the {a_step} × {setup.sequence} tokens of a step"
    ids = (each[:, 0] if each.dim() == 3 else each for each in (sequences, held_out) if len(each))
    largest = max((int(each.max()) for each in ids), default=0)
    if largest >= vocabulary:
        raise SetupError(
            f"the tokens must be below {vocabulary}, the number of embeddings of {setup.model}, got token {largest}"
        )
    # Drop sequences that do not fill a step.
    sequences = sequences[: len(sequences) // a_step * a_step]
    if not len(sequences):
        raise SetupError(
            f"{needed}, got {count} from {setup.data}; "
            "use more text, or a smaller --batch, --accumulation, --sequence or --validation"
        )
    if setup.validation:
        notes.append(
            f"Held out {is_held_out.sum()} of {len(is_held_out)} {'documents' if setup.packing else 'sequences'} for "
            "validation."
        )
    digest = hashlib.sha256(sequences.numpy().tobytes()).hexdigest()
    return Data(sequences, tokenizer, digest, notes, held_out if setup.validation else None)


def _texts(
    rows: Rows | None, setup: Setup, vocabulary: int, tokenizer: Any, notes: list[str]
) -> tuple[Any, Tensor, int]:
    """Return the tokenizer, or one trained on the text if it is None, the sequences, and the number of tokens."""
    if setup.packing:
        raise SetupError(f"--packing needs rows with answers, got {setup.data}, which is text; leave it out")
    characters = math.ceil(
        CHARACTERS_OF_A_TOKEN * setup.steps * setup.sequences_per_step * setup.sequence / (1 - setup.validation)
    )
    # Epochs need the whole text.
    limit = max(CHARACTERS, characters) if epochs(setup.set) is None else sys.maxsize
    texts = _truncate(_documents(setup.data, notes) if rows is None else rows.texts(), limit)
    if not any(texts):
        raise SetupError(f"--data must hold text, got {setup.data}, which has none{'; ' + notes[0] if notes else ''}")
    if tokenizer is not None:
        ids = _tokens(tokenizer, texts)
    elif setup.data == LIBRARY:
        tokenizer, ids = _cached_tokens(texts, min(vocabulary, VOCABULARY))
    else:
        tokenizer = _train_tokenizer(texts, min(vocabulary, VOCABULARY))
        ids = _tokens(tokenizer, texts)
    return tokenizer, ids[: ids.numel() // setup.sequence * setup.sequence].view(-1, setup.sequence), ids.numel()


def _held_out_mask(number: int, share: float) -> Tensor:
    """Return a mask of held-out sequences, evenly spaced and the same for every batch size."""
    count = min(max(1, round(share * number)), number) if share else 0
    mask = torch.zeros(number, dtype=torch.bool)
    mask[(2 * torch.arange(count) + 1) * number // (2 * max(count, 1))] = True
    return mask


def with_steps(setup: Setup, data: Data) -> Setup:
    """Return the setup, with the number of steps of its epochs if it sets epochs."""
    number = epochs(setup.set)
    if number is None:
        return setup
    return replace(setup, steps=max(1, math.ceil(number * (len(data.sequences) // setup.sequences_per_step))))


def _documents(source: str, notes: list[str]) -> Iterator[str]:
    if source == LIBRARY:
        size = 0
        for document in library():
            yield document
            size += len(document)
            if size >= CHARACTERS:
                break
        return
    check_source(source)
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path, notes)
        return
    text = _text(path)
    if not text:
        raise SetupError(f"--data must be a file of text, got {path}, which is empty, binary or cannot be read")
    yield text


def _truncate(texts: Iterable[str], limit: int) -> list[str]:
    """Return the first texts, up to `limit` characters."""
    truncated: list[str] = []
    size = 0
    for text in texts:
        truncated.append(text[: limit - size])
        size += len(truncated[-1])
        if size >= limit:
            break
    return truncated


def _folder(folder: Path, notes: list[str]) -> Iterator[str]:
    """Yield the texts in a folder and its subfolders, in a fixed order, except hidden files; note skipped files."""
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
            f"Files in {folder} were read as text, not as rows: {listed(tables)}; give one as --data to train on rows."
        )


def _text(path: Path) -> str | None:
    """Return the text of a file, or None if it is binary or cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if b"\0" not in file.read(HEAD):
            return path.read_text(encoding="utf-8", errors="replace")
    return None


def _tokenizer(setup: Setup, notes: list[str]) -> Any:
    """Return the tokenizer of the model, or None if it has none and its weights are random.

    Raises OptionError if a model with weights has none, since it knows the tokens of its own tokenizer only.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(setup.model, **loading_options(setup))
    # A damaged tokenizer.json raises Exception itself, a tokenizer in Python without its file raises TypeError.
    except Exception as problem:
        if (refused := untrusted_code_error(setup.model, problem)) is not None:
            raise refused from problem
        reason = " ".join(str(problem).split()).rstrip(".")
    else:
        if _has_vocabulary(tokenizer):
            return tokenizer
        reason = "it has only special tokens"
    folder = Path(setup.model)
    if folder.is_dir() and not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        reason = "there is no tokenizer.json"
    if setup.random_weights:
        notes.append(f"The tokenizer of {setup.model} cannot be loaded ({reason}), so one was trained on the text.")
        return None
    raise SetupError(
        f"--model must have a tokenizer, got {setup.model}, whose tokenizer cannot be loaded: {reason}; "
        "save one there with tokenizer.save_pretrained, or use --random-weights, which trains one on the text"
    )


def _has_vocabulary(tokenizer: Any) -> bool:
    """Return whether a tokenizer has more than special tokens.

    For many model types without tokenizer files, Transformers makes one of special tokens and at most "▁".
    """
    # Tokenizers of mistral-common lack this method; without files, they have no vocabulary.
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return len(tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens, *added}) > 1


def _train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    return _as_transformers(trained_tokenizer(_truncate(texts, CHARACTERS), vocabulary, (END_OF_TEXT, PADDING)))


def _as_transformers(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING)


def _cached_tokens(texts: list[str], vocabulary: int) -> tuple[Any, Tensor]:
    """Return a tokenizer trained on the texts, and their tokens, from the user's cache if possible.

    Computing them takes seconds, even for a run of two steps, which draws its sequences from the whole text.
    """
    joined = "".join(f"{len(text)}:{text}" for text in texts)
    key = hashlib.sha256(f"{tokenizers.__version__} {vocabulary} {END_OF_TEXT} {PADDING} {joined}".encode()).hexdigest()
    file = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "liger" / f"text-{key[:32]}.pt"
    # A damaged file is written again.
    with contextlib.suppress(Exception):
        saved = torch.load(file, weights_only=True)
        return _as_transformers(Tokenizer.from_str(saved["tokenizer"])), saved["tokens"].long()
    tokenizer = _train_tokenizer(texts, vocabulary)
    ids = _tokens(tokenizer, texts)
    # Without a writable folder, there is no cache.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            torch.save({"tokenizer": tokenizer.backend_tokenizer.to_str(), "tokens": ids.int()}, temporary)
        # Atomically, since ranks and the runs of a sweep read the text at the same time.
        Path(temporary.name).replace(file)
    return tokenizer, ids


def _tokens(tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the concatenated tokens of all texts, each followed by the end-of-text token if there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, *end]])
