# SPDX-License-Identifier: Apache-2.0
"""The state that each optimizer is said to hold, and the one that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from liger_bench.memory import held_bytes
from liger_train.plan.optimizers import OPTIMIZERS, weights_of
from liger_train.runs.arguments import training_arguments
from liger_train.techniques import TECHNIQUES
from plan.measuring import tiny

# Compiled for minutes, for a GPU, or without a state that could be looked at.
UNSEEN = (
    "adamw-torchao-8bit", "adamw-torchao-4bit", "galore-8bit", "galore-layerwise", "paged-adamw", "paged-adamw-8bit",
)  # fmt: skip


class Small(nn.Module):
    """An embedding, a linear layer wide enough for a projection, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 256)
        self.layer = nn.Linear(256, 512)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(input_ids)).square().mean()


def test_every_optimizer_of_train_has_a_size() -> None:
    assert OPTIMIZERS.keys() == TECHNIQUES["optimizer"].keys()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in UNSEEN])
def test_the_memory_of_an_optimizer_is_as_predicted(name: str, tmp_path: Path) -> None:
    for package in TECHNIQUES["optimizer"][name].packages:
        pytest.importorskip(package.replace("-", "_"))
    from transformers import Trainer

    model = Small()
    trainer = Trainer(model=model, args=training_arguments(tiny(optimizer=name), tmp_path))
    trainer.create_optimizer()
    model(torch.arange(8)).backward()
    trainer.optimizer.step()
    state = [
        vars(v) if hasattr(v, "ortho_matrix") else v
        for values in trainer.optimizer.state.values()
        for v in values.values()
    ]
    tensors = [t for v in state for t in (v.values() if isinstance(v, dict) else [v]) if isinstance(t, torch.Tensor)]
    said = sum(map(OPTIMIZERS[name].state, weights_of(model)))
    held = held_bytes(tensors)
    # Sizes are said in blocks.
    assert 0.99 * held <= said <= 1.01 * held + 512 * len(tensors)
