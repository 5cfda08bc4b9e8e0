# SPDX-License-Identifier: Apache-2.0
"""The Trainer of a run, which does not round losses, and the callback that seals its checkpoints."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from liger_train import ranks
from liger_train.runs import saved_checkpoints, sharded_checkpoints
from liger_train.runs.checkpoint_writer import CheckpointWriter
from liger_train.runs.compiled import Compiled
from liger_train.runs.data import Data
from liger_train.runs.labels import MASKED
from liger_train.runs.packing import check_documents_are_apart
from liger_train.sharded_loading import give_shards
from liger_train.smoothing import is_smoothed
from liger_train.text import Sequences


class RunTrainer(Trainer):
    """A Trainer that keeps the unrounded loss of every micro-batch on the device, and can split micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        data: Data,
        compiled: Compiled,
        callbacks: list[TrainerCallback],
        parts: Callable[[], int],
        writer: CheckpointWriter,
    ) -> None:
        validation = None
        if data.held_out is not None:
            whole = _whole_batches(data.held_out, arguments.eval_batch_size * arguments.world_size)
            self.labels_per_batch = int((whole[:, 1, 1:] != MASKED).sum()) / (len(whole) // arguments.eval_batch_size)
            validation = Sequences(whole)
        super().__init__(model, arguments, None, Sequences(data.sequences), validation, callbacks=callbacks)
        give_shards(self.accelerator)
        if is_smoothed(model):
            self.label_smoother = None
        if self.accelerator.ddp_handler is not None:
            # Otherwise each gradient is allocated twice, in its bucket and on its own.
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        # It prints a summary to standard output, which is reserved for the results.
        self.remove_callback(PrinterCallback)
        self.compiled, self.micro, self.parts, self.writer = compiled, compiled.recorder.micro, parts, writer
        # The name of the model until it is checked that it keeps packed documents apart.
        self.unchecked_model = compiled.setup.model if compiled.setup.packing else None

    def compute_loss(self, model: Any, *args: Any, **named: Any) -> Any:
        if self.label_smoother is not None or not isinstance(model, DistributedDataParallel):
            return super().compute_loss(model, *args, **named)
        # It would copy the logits, since it looks for unused parameters.
        with model.module.register_forward_hook(_loss_alone):
            return super().compute_loss(model, *args, **named)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if self.unchecked_model is not None:
            model.eval()
            # Not compiled: no other step runs without gradients.
            with torch.no_grad(), self.compute_loss_context_manager(), torch.compiler.set_stance("force_eager"):
                check_documents_are_apart(model, partial(self.compute_loss, model), inputs, self.unchecked_model)
            model.train()
            self.unchecked_model = None
        # Losses of parts add up only if they are normalized by the tokens of the whole batch.
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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.compiled.setup.saves_shards:
            folder = Path(output_dir or str(self.args.output_dir))
            sharded_checkpoints.save_model(self.model, folder, self.writer.add)
        else:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.compiled.setup.saves_shards:
            states = self.model, self.optimizer, self.lr_scheduler
            sharded_checkpoints.save_state(*states, Path(output_dir), self.writer.add)
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if saved_checkpoints.is_sharded(Path(resume_from_checkpoint)):
            sharded_checkpoints.load_model(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and saved_checkpoints.is_sharded(Path(checkpoint)):
            sharded_checkpoints.load_state(self.model, self.optimizer, self.lr_scheduler, Path(checkpoint))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        count = (inputs["labels"][:, 1:] != MASKED).sum()
        with torch.no_grad(), self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs)
        # The Trainer averages over batches, regardless of their number of tokens.
        return torch.where(count > 0, loss.detach() * count / self.labels_per_batch, 0.0), None, None


def _loss_alone(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return the outputs of a model without those that the Trainer does not read."""
    if not isinstance(outputs, dict):
        return outputs[:1]
    return {name: value for name, value in outputs.items() if name == "loss"}


def _whole_batches(sequences: Tensor, size: int) -> Tensor:
    """Return the sequences with labels, and padding sequences without labels that complete the last batch."""
    labeled = sequences if sequences.dim() == 3 else torch.stack([sequences, sequences], 1)
    padding = labeled[:1].repeat(-len(sequences) % size, 1, 1)
    padding[:, 1] = MASKED
    return torch.cat([labeled, padding])


class Sealer(TrainerCallback):
    """Marks a checkpoint as unfinished, and seals it, with the tokenizer, once all ranks have written their files.

    Sharded checkpoints are written, and sealed, while training continues; the next one waits for the one before it.
    """

    def __init__(self, progress: Callable[[], dict[str, Any]], tokenizer: Any, writer: CheckpointWriter) -> None:
        self.progress, self.tokenizer, self.writer = progress, tokenizer, writer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **more: Any) -> None:
        # Callbacks that run before this one decide whether to save: the Trainer's own, and the recorder.
        if control.should_save:
            self.writer.wait()
            if ranks.first():
                saved_checkpoints.mark_unfinished(_checkpoint(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **more: Any) -> None:
        folder = _checkpoint(args, state)
        if ranks.first():
            self.tokenizer.save_pretrained(folder)
        # A copy, since training continues.
        seal = partial(saved_checkpoints.seal, folder, deepcopy(self.progress()))
        if self.writer.has_states:
            self.writer.start(seal)
            return
        if dist.is_initialized():
            dist.barrier()
        if ranks.first():
            seal()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
