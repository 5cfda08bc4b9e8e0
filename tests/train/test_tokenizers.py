# SPDX-License-Identifier: Apache-2.0
"""A model with weights is trained on the tokens of its own tokenizer, or not at all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from liger_train.runs import data
from liger_train.runs.data import read
from liger_train.setup import Setup
from train.training import refused

pytestmark = pytest.mark.cpu

NO_FILE = "there is no tokenizer.json"
# Model type and tokenizer_config.json. Transformers raises for some, and makes a tokenizer of special tokens for
# others.
WITHOUT: dict[str, tuple[str, dict[str, str] | None]] = {
    "weights only, special tokens and a space": ("t5", None),
    "weights only, an error of a tokenizer in Python": ("ctrl", None),
    "an empty config, one token": ("qwen3", {}),
    "a config with a class, an error": ("llama", {"tokenizer_class": "LlamaTokenizer"}),
}


def folder_of(folder: Path, model_type: str, settings: dict[str, str] | None = None) -> Path:
    AutoConfig.for_model(model_type).save_pretrained(folder)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(("model_type", "settings"), WITHOUT.values(), ids=WITHOUT.keys())
def test_weights_without_a_tokenizer_are_refused_before_the_text_is_read(
    model_type: str, settings: dict[str, str] | None, small: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, model_type, settings)
    monkeypatch.setattr(data, "_documents", lambda *_: pytest.fail("the text was read"))
    with refused(f"train: --model must have a tokenizer, got {folder}, whose .*: {NO_FILE}; save one there with"):
        read(replace(small, model=str(folder)), vocabulary=400, own_tokenizer=True)


def test_a_tokenizer_that_lost_its_words_is_refused(small: Setup, model: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3")
    saved = json.loads((model / "tokenizer.json").read_text())
    saved["model"] |= {"vocab": {token["content"]: token["id"] for token in saved["added_tokens"]}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    with refused(r"cannot be loaded: it has only special tokens; save"):
        read(replace(small, model=str(folder)), vocabulary=400, own_tokenizer=True)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_a_damaged_tokenizer_is_refused_with_the_reason_of_transformers(
    file: str, small: Setup, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "gpt2" if file == "vocab.json" else "llama")
    (folder / file).write_bytes(b"half of a file")
    (folder / "merges.txt").touch()
    with refused(r"cannot be loaded: (?!there is no|it has only).+; save one there"):
        read(replace(small, model=str(folder)), vocabulary=400, own_tokenizer=True)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_random_weights_without_a_tokenizer_learn_one_of_the_text(
    model_type: str, small: Setup, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, model_type)
    trained = read(replace(small, model=str(folder), random_weights=True), vocabulary=400, own_tokenizer=True)
    assert trained.notes == [f"The tokenizer of {folder} cannot be loaded ({NO_FILE}), so one was trained on the text."]
    assert "reads a batch of sequences" in trained.tokenizer.decode(trained.sequences.flatten())


def test_a_tokenizer_that_needs_no_file_is_one(small: Setup, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "canine")
    read_by_characters = read(replace(small, model=str(folder)), vocabulary=1 << 21, own_tokenizer=True)
    assert read_by_characters.notes == []
    assert ord("A") in read_by_characters.sequences
