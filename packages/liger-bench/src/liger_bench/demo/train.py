# SPDX-License-Identifier: Apache-2.0
"""One training run with the Transformers Trainer, and the loss of each step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from liger_bench.demo.settings import Settings
from liger_bench.text import Sequences
from liger_hf.private_transformers import use_one_gpu


def train(
    model: PreTrainedModel, data: Sequences, settings: Settings, advance: Callable[[str], object], *, pieces: int = 1
) -> list[float]:
    """Train for settings.steps and return the loss of every step; `pieces` micro-batches make up the same batch.

    advance is called at the end of each step with its loss and speed.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Recorder(model, _arguments(settings, folder, pieces), data)
        trainer.add_callback(_Advance(trainer.losses, pieces, settings.batch * settings.sequence, advance))
        trainer.train()
    # Micro-batch losses are already divided by the tokens of the whole batch.
    losses = torch.stack(trainer.losses).float().view(settings.steps, pieces).sum(1)
    return [float(loss) for loss in losses]


def _arguments(settings: Settings, folder: str, pieces: int) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch // pieces,
        gradient_accumulation_steps=pieces,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        seed=settings.seed,
        data_seed=settings.seed,
        use_cpu=settings.device.type == "cpu",
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
    )
    if arguments.n_gpu > 1:
        # The Trainer would split the batch over all GPUs, and only one of them is measured.
        use_one_gpu(arguments)
    return arguments


class _Recorder(Trainer):
    """A Trainer that keeps the loss of every micro-batch, on the device and unrounded."""

    def __init__(self, model: PreTrainedModel, arguments: TrainingArguments, data: Sequences) -> None:
        super().__init__(model=model, args=arguments, train_dataset=data)
        # It prints a summary to standard output, where a single JSON object may be due.
        self.remove_callback(PrinterCallback)
        self.losses: list[Tensor] = []

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss.detach().clone())
        return loss


class _Advance(TrainerCallback):
    """Reports the loss and speed at the end of each step."""

    def __init__(self, losses: list[Tensor], pieces: int, tokens: int, advance: Callable[[str], object]) -> None:
        self.losses, self.pieces, self.tokens, self.advance = losses, pieces, tokens, advance
        self.before = time.perf_counter()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        loss = float(torch.stack(self.losses[-self.pieces :]).sum())
        self.advance(f"loss {loss:.4f}, {self.tokens / (time.perf_counter() - self.before):,.0f} tokens/s")
