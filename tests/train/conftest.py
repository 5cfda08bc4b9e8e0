# SPDX-License-Identifier: Apache-2.0
"""The smallest model that has every part, and a text that says the same again and again, so that it is learnt in a few
steps."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from liger_train.setup import Setup

TEXT = (
    "A step reads a batch of sequences, and each of them is its own label.\nWhat was read before is read again.\n" * 300
)


@pytest.fixture(scope="session", autouse=True)
def no_garbage_among_what_was_imported() -> Iterator[None]:
    """A run collects garbage twice, which takes a second where every library of the tests is loaded."""
    import liger_train.runs.run  # noqa: F401

    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of two layers and 400 tokens, and with a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_train.runs.data import _train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    sizes = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    _train_tokenizer([TEXT], 400).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of `training.py`, without a tokenizer."""
    from train.training import saved_model

    return saved_model(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="session")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Six steps of two sequences of 16 tokens on the CPU."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    shape = {"batch": 2, "sequence": 16, "precision": "fp32", "checkpoint": "none", "device": "cpu"}
    return Setup(str(model), data=str(text), steps=6, learning_rate=1e-2, **shape)
