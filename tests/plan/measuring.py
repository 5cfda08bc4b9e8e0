# SPDX-License-Identifier: Apache-2.0
"""What a training on the CPU really takes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, Trainer

from liger_bench.demo.text import Sequences
from liger_bench.memory import held_bytes, peak_bytes
from liger_bench.train.arguments import training_arguments
from liger_bench.train.model import build
from liger_bench.train.setup import Setup

CPU = torch.device("cpu")


def tiny(**changes: object) -> Setup:
    """A short training of two layers on the CPU."""
    return Setup("tiny", **({"batch": 2, "sequence": 64, "device": "cpu", "precision": "fp32", "checkpoint": "none", "steps": 1} | changes))


def measured_bytes(setup: Setup, folder: Path) -> int:
    """The peak of a step of the Trainer, at the allocator, after one that made the optimizer's state."""
    arguments = training_arguments(setup, folder)
    model: PreTrainedModel = build(setup, CPU).model
    tokens = torch.randint(1000, (setup.batch * setup.accumulation, setup.sequence), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(tokens))
    trainer.train()
    state = [t for values in trainer.optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    batch, count = tokens[: setup.batch], torch.tensor(tokens.numel())

    def step() -> None:
        for _ in range(setup.accumulation):
            trainer.training_step(trainer.model_wrapped, {"input_ids": batch, "labels": batch}, count)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    trainer.optimizer.zero_grad()
    return held_bytes([*model.parameters(), *model.buffers(), *state]) + peak_bytes(step, CPU)
