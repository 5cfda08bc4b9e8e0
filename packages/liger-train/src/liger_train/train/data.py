# SPDX-License-Identifier: Apache-2.0
"""The training text as sequences of tokens: from a file, a folder, a saved dataset, or Python's standard library."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
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

from liger_bench.text import library, trained_tokenizer
from liger_core.errors import OptionError
from liger_hf.presets import VOCABULARY
from liger_train.configs import has_code_of_its_own, loading_options
from liger_train.fields import epochs
from liger_train.setup import LIBRARY, Setup
from liger_train.train.chats import holds_chats, read_chats

# Longer texts are cut to this length, or to what the steps need, at no more than six characters per token.
CHARACTERS, CHARACTERS_OF_A_TOKEN = 4_000_000, 6
# As git does: a file with a zero byte among the first 8000 is binary.
HEAD = 8000
NAMED = 3
# Special tokens of a tokenizer that is trained here; fine-tuning the saved model needs padding.
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"


@dataclass(frozen=True)
class Data:
    """Sequences of tokens, the same number for each step, and their tokenizer.

    held    sequences that are never trained on, a whole number of batches
    digest  identifies the data
    """

    sequences: Tensor  # (number, sequence), or (number, 2, sequence) with labels
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
            f"train: --data must be a file, a folder, a dataset saved by datasets, or {LIBRARY}, got {source}, which {problem}"
        )


def read(setup: Setup, vocabulary: int, own_tokenizer: bool) -> Data:
    """The data of a setup, for a model with `vocabulary` embeddings and perhaps its own tokenizer.

    Raises OptionError if there is no text, or not enough.
    """
    notes: list[str] = []
    a_step = setup.sequences_per_step
    if holds_chats(setup.data):
        tokenizer, whole = _chats(setup, own_tokenizer, notes)
        needed, count = f"the data must have at least the {a_step} conversations of a step", len(whole)
    else:
        tokenizer, whole, count = _texts(setup, vocabulary, own_tokenizer, notes)
        needed = f"the text must have at least the {a_step} × {setup.sequence} tokens of a step"
    largest = int(whole.max()) if len(whole) else 0
    if largest >= vocabulary:
        raise OptionError(f"train: the tokens must be below {vocabulary}, the number of embeddings of {setup.model}, got token {largest}")
    kept, held = _split(whole, setup)
    steps = len(kept) // a_step
    if steps == 0:
        raise OptionError(
            f"train: {needed}, got {count} from {setup.data}; "
            "use more text, or a smaller --batch, --accumulation, --sequence or --validation"
        )
    # Drop the rest of the text, which does not fill a step.
    sequences = kept[: steps * a_step]
    if held is not None:
        notes.append(f"Held out {len(held)} of {len(whole)} sequences for validation.")
    return Data(sequences, tokenizer, hashlib.sha256(sequences.numpy().tobytes()).hexdigest(), notes, held)


def _chats(setup: Setup, own_tokenizer: bool, notes: list[str]) -> tuple[Any, Tensor]:
    """The tokenizer of the model, and conversations as sequences with labels."""
    if setup.cp > 1:
        raise OptionError(f"train: --data {setup.data} has conversations, and --cp {setup.cp} shards text; use --cp 1")
    tokenizer = _tokenizer(setup, notes) if own_tokenizer else None
    return tokenizer, read_chats(setup.data, tokenizer, setup.model, setup.sequence, notes)


def _texts(setup: Setup, vocabulary: int, own_tokenizer: bool, notes: list[str]) -> tuple[Any, Tensor, int]:
    """The tokenizer of the model or of the text, sequences, and the number of tokens."""
    wanted = math.ceil(CHARACTERS_OF_A_TOKEN * setup.steps * setup.sequences_per_step * setup.sequence / (1 - setup.validation))
    # An epoch is the whole text.
    limit = max(CHARACTERS, wanted) if epochs(setup.set) is None else sys.maxsize
    texts = _up_to(_documents(setup.data, notes), limit)
    if not any(texts):
        raise OptionError(f"train: --data must hold text, got {setup.data}, which has none{'; ' + notes[0] if notes else ''}")
    tokenizer = _tokenizer(setup, notes) if own_tokenizer else None
    if tokenizer is not None:
        ids = _tokens(tokenizer, texts)
    elif setup.data == LIBRARY:
        tokenizer, ids = _kept(texts, min(vocabulary, VOCABULARY))
    else:
        tokenizer = _trained(texts, min(vocabulary, VOCABULARY))
        ids = _tokens(tokenizer, texts)
    return tokenizer, ids[: ids.numel() // setup.sequence * setup.sequence].view(-1, setup.sequence), ids.numel()


def _split(whole: Tensor, setup: Setup) -> tuple[Tensor, Tensor | None]:
    """The sequences to train on, and those held out: evenly spaced, and a whole number of batches, over which losses are averaged."""
    if not setup.validation:
        return whole, None
    batch = setup.batch * setup.replicas
    count = min(max(1, round(setup.validation * len(whole) / batch)) * batch, len(whole))
    places = (2 * torch.arange(count) + 1) * len(whole) // (2 * max(count, 1))
    chosen = torch.zeros(len(whole), dtype=torch.bool)
    chosen[places] = True
    return whole[~chosen], whole[chosen]


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
        yield from _dataset(path, notes) if _is_dataset(path) else _folder(path, notes)
        return
    yield _text(path) or _no_text(path)


def _up_to(texts: Iterable[str], limit: int) -> list[str]:
    found: list[str] = []
    size = 0
    for text in texts:
        found.append(text[: limit - size])
        size += len(found[-1])
        if size >= limit:
            break
    return found


def _folder(folder: Path, notes: list[str]) -> Iterator[str]:
    """The text files in a folder and its subfolders, in a fixed order; hidden files are ignored, and other files are named in a note."""
    skipped: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            text = _text(path)
            if text is None:
                skipped.append(str(name))
            else:
                yield text
    if skipped:
        more = f" and {len(skipped) - NAMED} more" if len(skipped) > NAMED else ""
        notes.append(f"Files in {folder} that are not text were skipped: {', '.join(skipped[:NAMED])}{more}.")


def _text(path: Path) -> str | None:
    """The text of a file; None if it is binary or cannot be read."""
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(HEAD):
                return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _no_text(path: Path) -> str:
    raise OptionError(f"train: --data must be a file of text, got {path}, which is empty, binary or cannot be read")


def _is_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _dataset(folder: Path, notes: list[str]) -> Iterator[str]:
    """The texts of a dataset written by `save_to_disk`; of several splits, `train`."""
    if importlib.util.find_spec("datasets") is None:
        raise OptionError(f"train: --data {folder} needs datasets, not installed here; pip install 'liger-train[datasets]'")
    found: Any = importlib.import_module("datasets").load_from_disk(str(folder))
    if isinstance(found, dict):
        split = "train" if "train" in found else next(iter(found))
        notes.append(f"Training on the split {split!r} of the dataset {folder}.")
        found = found[split]
    strings = [name for name, feature in found.features.items() if getattr(feature, "dtype", None) == "string"]
    if not strings:
        raise OptionError(f"train: --data must have a column of texts, got {folder} with the columns {', '.join(found.features)}")
    column = "text" if "text" in strings else strings[0]
    for row in found.select_columns([column]):
        yield row[column] or ""


def _tokenizer(setup: Setup, notes: list[str]) -> Any:
    """The tokenizer of the model; None if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(setup.model, **loading_options(setup))
    except (OSError, ValueError, KeyError, ImportError) as problem:
        if (refused := has_code_of_its_own(setup.model, problem)) is not None:
            raise refused from problem
        reason = str(problem).strip().split("\n")[0].rstrip(".")
        notes.append(f"The tokenizer of {setup.model} cannot be loaded ({reason}), so one was trained on the text.")
        return None


def _trained(texts: list[str], vocabulary: int) -> Any:
    return _fast(trained_tokenizer(_up_to(texts, CHARACTERS), vocabulary, (END_OF_TEXT, PADDING)))


def _fast(trained: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END_OF_TEXT, pad_token=PADDING)


def _kept(texts: list[str], vocabulary: int) -> tuple[Any, Tensor]:
    """A tokenizer trained on the texts, and their tokens, which take seconds to make: from the user's cache if they are there.

    The Trainer draws its sequences from the whole text, so that a run of two steps needs all of it as well.
    """
    parts = "".join(f"{len(text)}:{text}" for text in texts)
    key = hashlib.sha256(f"{tokenizers.__version__} {vocabulary} {END_OF_TEXT} {PADDING} {parts}".encode()).hexdigest()[:32]
    file = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "liger" / f"text-{key}.pt"
    # Whatever is wrong with the file, it can be made again.
    with contextlib.suppress(Exception):
        found = torch.load(file, weights_only=True)
        return _fast(Tokenizer.from_str(found["tokenizer"])), found["tokens"].long()
    tokenizer = _trained(texts, vocabulary)
    ids = _tokens(tokenizer, texts)
    # Without a place to write to, there is no cache.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            torch.save({"tokenizer": tokenizer.backend_tokenizer.to_str(), "tokens": ids.int()}, part)
        # In one step: ranks and the runs of a sweep read the text at the same time.
        Path(part.name).replace(file)
    return tokenizer, ids


def _tokens(tokenizer: Any, texts: list[str]) -> Tensor:
    """The concatenated tokens of all texts, each followed by the end-of-text token if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, *end]])
