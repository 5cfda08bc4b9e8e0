# SPDX-License-Identifier: Apache-2.0
"""Rules of thumb for training memory from the original report, to compare with a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from liger_train.configs import config_of
from liger_train.model import LOW
from liger_train.setup import Setup

LOGITS_AT_ONCE = 3


@dataclass(frozen=True)
class Formula:
    """One rule of thumb: its name, the formula in words and in numbers, and the bytes."""

    name: str
    words: str
    numbers: str
    size: int


def formulas(setup: Setup, parameters: int) -> list[Formula]:
    """Static memory, activation checkpoints and logits of a setup, as the original report estimates them."""
    text = config_of(setup).get_text_config()
    width, layers, words = text.hidden_size, text.num_hidden_layers, text.vocab_size
    itemsize = 2 if setup.precision in LOW else 4
    batch, sequence = setup.batch, setup.sequence // setup.cp
    checkpoints = batch * sequence * width * itemsize * layers
    logits = batch * sequence * words * 4
    return [
        Formula("static", "16 · parameters", f"16 · {parameters:,}", 16 * parameters),
        Formula(
            "checkpoints",
            "batch · sequence · hidden size · bytes · layers",
            f"{batch} · {sequence} · {width} · {itemsize} · {layers}",
            checkpoints,
        ),
        Formula(
            "logits",
            "batch · sequence · vocabulary · 4, three copies",
            f"{batch} · {sequence} · {words:,} · 4 · {LOGITS_AT_ONCE}",
            LOGITS_AT_ONCE * logits,
        ),
    ]
