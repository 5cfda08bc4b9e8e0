# SPDX-License-Identifier: Apache-2.0
"""A model whose tokenizer has a chat template, and conversations in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from train.training import saved_model

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor "
    "%}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "[gMask]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>")

USER, FOUR = {"role": "user", "content": "what is two and two"}, {"role": "assistant", "content": "four"}


def model_with(template: str | None, folder: Path, end: str = "<|im_end|>") -> Path:
    """A model whose tokenizer knows bytes, groups of newlines as Llama 3 and Qwen do, and special tokens."""
    saved_model(folder, vocab_size=400, max_position_embeddings=1024)
    inner = Tokenizer(models.BPE())
    newlines = pre_tokenizers.Split(Regex(r"[^\s\w]?\w+|\s*[\r\n]+|\s+|[^\s\w]+"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [newlines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(["a\n\nb\n\n what is two and two and three four seven of course"] * 9, trainer)
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, pad_token="<|pad|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def written(path: Path, rows: list[Any]) -> str:
    """Rows in a file of JSON lines; strings are lines as they are."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)
