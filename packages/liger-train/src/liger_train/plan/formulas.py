# SPDX-License-Identifier: Apache-2.0
"""The seed report's formulas of training memory, to stand beside a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from liger_train.configs import config_of
from liger_train.model import LOW
from liger_train.setup import Setup

LOGITS_AT_ONCE = 3


@dataclass(frozen=True)
class Formula:
    """One line of the report: what it is of, the formula in words, with the numbers, and the bytes."""

    name: str
    words: str
    numbers: str
    size: int


def formulas(setup: Setup, parameters: int) -> list[Formula]:
    """Static memory, checkpoints and logits of a setup, as the report estimates them."""
    text = config_of(setup).get_text_config()
    width, layers, words = text.hidden_size, text.num_hidden_layers, text.vocab_size
    itemsize = 2 if setup.precision in LOW else 4
    batch, sequence = setup.batch, setup.sequence
    checkpoints = batch * sequence * width * itemsize * layers
    logits = batch * sequence * words * 4
    return [
        Formula("static", "16 · parameters", f"16 · {parameters:,}", 16 * parameters),
        Formula(
            "checkpoints",
            "batch · sequence · width · bytes · layers",
            f"{batch} · {sequence} · {width} · {itemsize} · {layers}",
            checkpoints,
        ),
        Formula(
            "logits",
            "batch · sequence · vocabulary · 4, three at once",
            f"{batch} · {sequence} · {words:,} · 4 · {LOGITS_AT_ONCE}",
            LOGITS_AT_ONCE * logits,
        ),
    ]
