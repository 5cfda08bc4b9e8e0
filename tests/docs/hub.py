# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub of tiny random models in a cache folder, so that pages can name the models that people use and run
offline."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

COMMIT = "0" * 40
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
# That of Qwen3's checkpoints; the type's default is another.
ROPE = {"rope_type": "default", "rope_theta": 1e6}
# Name on the hub → model type, and what the type needs besides.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": ROPE}),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", {"head_dim": 8, "tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    # bitsandbytes packs whole blocks of 64 columns before it generates on a CPU.
    "Qwen/Qwen3-8B": ("qwen3", {"hidden_size": 64, "head_dim": 16, "tie_word_embeddings": False, "rope_parameters": ROPE}),
    "meta-llama/Llama-3.2-1B": ("llama", {"tie_word_embeddings": True}),
    "meta-llama/Llama-3.1-8B": ("llama", {"tie_word_embeddings": False}),
}  # fmt: skip
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make(folder: Path) -> None:
    """Write every model and its tokenizer as the hub's own cache has them."""
    tokenizer = _tokenizer()
    for name, (kind, options) in MODELS.items():
        home = folder / f"models--{name.replace('/', '--')}"
        snapshot = home / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(COMMIT)
        ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2}
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SIZES | ids | options)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a few merges."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    inner.train_from_iterator([__doc__ or ""], trainers.BpeTrainer(vocab_size=300, **options))
    tokens = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHAT, **tokens)


@contextmanager
def in_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process and those that it starts find the models in `folder`, and ask nobody else."""
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    yield
