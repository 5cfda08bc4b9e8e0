# SPDX-License-Identifier: Apache-2.0
"""The Trainer of a run, with losses that are not rounded, and the callback that seals its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from liger_train import ranks
from liger_train.smoothing import is_smoothed
from liger_train.text import Sequences
from liger_train.train import saved
from liger_train.train.compiled import Compiled
from liger_train.train.data import Data
from liger_train.train.labels import MASKED
from liger_train.train.packing import check_documents_are_apart


class RunTrainer(Trainer):
    """A Trainer that keeps the unrounded loss of every micro-batch on the device, and can split micro-batches into
    parts."""

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        data: Data,
        compiled: Compiled,
        callbacks: list[TrainerCallback],
        parts: Callable[[], int],
    ) -> None:
        held = None
        if data.held is not None:
            whole = _whole_batches(data.held, arguments.eval_batch_size * arguments.world_size)
            self.predicted = int((whole[:, 1, 1:] != MASKED).sum()) / (len(whole) // arguments.eval_batch_size)
            held = Sequences(whole)
        super().__init__(model, arguments, None, Sequences(data.sequences), held, callbacks=callbacks)
        if is_smoothed(model):
            self.label_smoother = None
        if self.accelerator.ddp_handler is not None:
            # Otherwise a gradient is held twice, in its bucket and beside it.
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        # It prints a summary to standard output, which may have to be a single JSON object.
        self.remove_callback(PrinterCallback)
        self.compiled, self.micro, self.parts = compiled, compiled.recorder.micro, parts
        # The model, if it is not known yet whether it keeps packed documents apart.
        self.unchecked = compiled.setup.model if compiled.setup.packing else None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if self.unchecked is not None:
            model.eval()
            # Without compilation, since no other step runs without gradients.
            with torch.no_grad(), self.compute_loss_context_manager(), torch.compiler.set_stance("force_eager"):
                check_documents_are_apart(model, partial(self.compute_loss, model), inputs, self.unchecked)
            model.train()
            self.unchecked = None
        # Only a loss normalized by the tokens of the whole batch is the sum of the losses of its parts.
        parts = 1 if num_items_in_batch is None else self.parts()
        pieces = zip(*(value.tensor_split(min(parts, len(value))) for value in inputs.values()), strict=True)
        step = partial(super().training_step, model)
        losses = [
            self.compiled.step(step, model, dict(zip(inputs, piece, strict=True)), num_items_in_batch)
            for piece in pieces
        ]
        loss = losses[0] if parts == 1 else torch.stack(losses).sum()
        self.micro.append(loss.detach().clone())
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        count = (inputs["labels"][:, 1:] != MASKED).sum()
        with torch.no_grad(), self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs)
        # The Trainer averages over batches, whatever the number of their tokens.
        return torch.where(count > 0, loss.detach() * count / self.predicted, 0.0), None, None


def _whole_batches(held: Tensor, size: int) -> Tensor:
    """Held-out sequences with labels, and more without any, so that the last batch is whole."""
    labeled = held if held.dim() == 3 else torch.stack([held, held], 1)
    more = labeled[:1].repeat(-len(held) % size, 1, 1)
    more[:, 1] = MASKED
    return torch.cat([labeled, more])


class Sealer(TrainerCallback):
    """Marks a checkpoint as unfinished, adds the tokenizer, and seals it once all ranks have written their files."""

    def __init__(self, progress: Callable[[], dict[str, Any]], tokenizer: Any) -> None:
        self.progress, self.tokenizer = progress, tokenizer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **more: Any) -> None:
        # The Trainer's own callback and the recorder, which run before this one, decide whether to save.
        if control.should_save and ranks.first():
            saved.begin(_checkpoint(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **more: Any) -> None:
        progress = self.progress()
        if dist.is_initialized():
            dist.barrier()
        if ranks.first():
            folder = _checkpoint(args, state)
            self.tokenizer.save_pretrained(folder)
            saved.seal(folder, progress)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
