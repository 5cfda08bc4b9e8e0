# SPDX-License-Identifier: Apache-2.0
"""What every example trains: a small random Llama that needs no network, or a model of yours, on random tokens."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS = 8


def arguments(**more: Any) -> argparse.Namespace:
    """--model, --steps, and what an example adds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or a name on the hub; a small random Llama by default")
    parser.add_argument("--steps", type=int, default=STEPS)
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    return parser.parse_args()


def load(name: str | None, **options: Any) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, **options)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **sizes))


def batches(steps: int, rank: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """The same few sequences again and again, others on each rank, so that the loss falls."""
    ids = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(rank))
    for _ in range(steps):
        yield {"input_ids": ids, "labels": ids}
