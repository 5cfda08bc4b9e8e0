# SPDX-License-Identifier: Apache-2.0
"""One training run by the Transformers Trainer, and its row of results, however it ends."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import find_executable_batch_size
from rich.progress import Progress
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

from liger_bench import machine
from liger_bench.checkpointing import checkpointed_layers
from liger_bench.process import failure
from liger_bench.text import Sequences
from liger_core.errors import DeviceError, LigerError, OptionError
from liger_hf.presets import PRESETS
from liger_hf.private_transformers import set_device
from liger_train import techniques
from liger_train.combinations import ZERO
from liger_train.configs import config_of
from liger_train.model import build
from liger_train.row import Row, row_of
from liger_train.setup import Setup
from liger_train.smoothing import is_smoothed
from liger_train.train import export as exporting
from liger_train.train import ranks, saved, spending
from liger_train.train.arguments import training_arguments
from liger_train.train.compiled import Compiled
from liger_train.train.cpu_memory import CpuMemory
from liger_train.train.data import Data, read, with_steps
from liger_train.train.labels import MASKED
from liger_train.train.packing import check_documents_are_apart
from liger_train.train.profile import Profile
from liger_train.train.record import Interruption, Recorder
from liger_train.train.snapshot import Snapshot

# The options that may differ when a run is resumed.
MAY_CHANGE = ("steps", "memory_limit", "device", "nvme_folder", "trust_remote_code")

PROJECTORS = {
    "galore": ("galore_torch.galore_projector", "GaLoreProjector"),
    "apollo": ("apollo_torch.random_projector", "GradientProjector"),
}


def run(
    setup: Setup,
    *,
    folder: Path | None = None,
    resume: bool = False,
    save_every: int = 0,
    deterministic: bool = False,
    observers: Sequence[TrainerCallback] = (),
    bar: Progress | None = None,
    notes: list[str] | None = None,
    export: Path | None = None,
) -> Row:
    """Train, and return the results. Running out of memory, a failure and an interruption are results, too.

    folder         where to save checkpoints: every `save_every` steps, at the end, and when interrupted; None saves
                   none
    resume         resume from the latest intact checkpoint there; the losses are then those of an uninterrupted run
    deterministic  use deterministic algorithms, so that two runs have bit-identical losses
    observers      more callbacks for the Trainer
    notes          decisions made so far, one sentence each; those about the data are printed above the bar, and added
    export         where to write the trained model, with adapters merged into its weights

    Raises OptionError or DeviceError for an unsupported setup, before anything large is loaded.
    """
    techniques.check(setup)
    if export is not None and ranks.first():
        exporting.check(setup, export)
    if resume:
        _check_resumable(setup)
    device = _device(setup)
    current = _Run(setup, device, [] if notes is None else notes, bar, deterministic)
    memory = current.recorder.memory = _memory(setup, current.notes, observers)
    results: dict[str, Any] = {}
    try:
        with _order_of_sums(), memory or contextlib.nullcontext():
            current.train(folder, resume, save_every, observers, export)
    except LigerError:
        raise
    except KeyboardInterrupt:
        if setup.ranks > 1:
            # The other ranks wait for this one; torchrun stops them when it ends.
            raise
        results = {"interrupted": True, "reason": "interrupted"}
    except Exception as error:
        _, results = failure(error)
    row = row_of(setup, machine.describe(device), current.results() | results)
    del current
    release(device)
    return row


def _memory(setup: Setup, notes: list[str], observers: Sequence[TrainerCallback]) -> CpuMemory | None:
    """Measures the memory of a run on the CPU, where that is possible."""
    if setup.device != "cpu":
        return None
    if setup.shard in ZERO:
        notes.append("Peak memory was not measured: DeepSpeed's buffers on the CPU cannot be tracked.")
        return None
    if any(isinstance(observer, Profile | Snapshot) for observer in observers):
        notes.append("Peak memory was not measured: --snapshot and --profile need the same profiler.")
        return None
    return CpuMemory()


def _check_resumable(setup: Setup) -> None:
    if setup.optimizer == "galore-layerwise":
        # It has one optimizer per weight, and the Trainer saves the state of none of them.
        raise OptionError(
            "train: --resume cannot restore --optimizer galore-layerwise, whose state is not saved; use galore"
        )
    if setup.tp > 1:
        # The Trainer saves the optimizer state of the first rank alone.
        raise OptionError(
            f"train: --resume cannot restore --tp {setup.tp}, since the saved optimizer state is that of one rank; "
            "give the checkpoint as --model, which starts with new optimizer state"
        )
    if setup.offload == "nvme":
        # DeepSpeed 0.19 restores the float32 weights of the optimizer, but takes the first step with the weights from
        # before that.
        raise OptionError(
            "train: --resume cannot restore --offload nvme exactly, since the first step would use the initial "
            "weights; "
            "give the checkpoint as --model, which starts with new optimizer state, or train with --offload parameters"
        )


def largest_batch(setup: Setup, attempt: Callable[[Setup], Row]) -> Row:
    """The row of the first batch size that fits, from setup.batch down by a quarter each time."""
    tried: list[int] = []

    def fewer() -> int:
        return tried[-1] * 3 // 4

    @find_executable_batch_size(starting_batch_size=setup.batch, reduce_batch_size_fn=fewer)
    def search(batch: int) -> Row:
        tried.append(batch)
        row = attempt(replace(setup, batch=batch))
        if row.out_of_memory and batch > 1:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {row.reason}")
        return row

    found: Row = search()
    failed = ", ".join(map(str, tried[:-1]))
    note = f"--batch auto: {tried[-1]}" + (
        f"; ran out of memory with {failed}." if failed else ", the first one tried."
    )
    return replace(found, notes=[*(found.notes or []), note])


def release(device: torch.device) -> None:
    """Free unused memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device(setup: Setup) -> torch.device:
    """The device of this rank, with its memory capped as the setup says."""
    device = machine.measurable_device("train", setup.device)
    if device.type == "cpu":
        return device
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.index >= torch.cuda.device_count():
        raise DeviceError(
            f"train: every rank needs a GPU of its own, got {setup.ranks} ranks and {torch.cuda.device_count()} GPUs "
            "here"
        )
    torch.cuda.set_device(device)
    has = torch.cuda.get_device_properties(device).total_memory
    limit = has if setup.memory_limit is None else setup.memory_limit
    if limit > has:
        raise DeviceError(
            f"train: --memory-limit must be at most the memory of the GPU, {has / 2**30:.1f} GiB, got "
            f"{limit / 2**30:.1f} GiB"
        )
    torch.cuda.set_per_process_memory_fraction(limit / has, device)
    return device


class _Run:
    """A run in progress, and its results so far."""

    def __init__(
        self, setup: Setup, device: torch.device, notes: list[str], bar: Progress | None, deterministic: bool
    ) -> None:
        self.setup, self.device, self.bar, self.deterministic = setup, device, bar, deterministic
        self.printed, self.notes = notes, list(notes)
        if deterministic:
            self.notes.append("--deterministic: the times include the cost of deterministic algorithms.")
        self.interruption = Interruption()
        self.recorder = Recorder(setup, device, self.interruption, self._show)
        self.compiled = Compiled(setup, self.recorder, self.notes)
        self.known: dict[str, Any] = {}
        self.task = bar.add_task("preparing", total=setup.steps, unit="step") if bar else None

    def train(
        self,
        folder: Path | None,
        resume: bool,
        save_every: int,
        observers: Sequence[TrainerCallback],
        export: Path | None = None,
    ) -> None:
        with _place(folder) as place, _quiet(), _with_private_disk_folder(self.setup) as private:
            self._show(None, "reading the text")
            vocabulary = config_of(self.setup).get_text_config().vocab_size
            data = read(self.setup, vocabulary, own_tokenizer=self.setup.model not in PRESETS)
            self._print([note for note in data.notes if note not in self.notes])
            self.setup = with_steps(self.setup, data)
            self._show(None, "preparing")
            # Before the model: while these arguments exist, DeepSpeed shards weights as they are created.
            arguments = self._arguments(replace(self.setup, nvme_folder=private), place, folder, save_every)
            before = self._before(folder, resume, data)
            if before is not None:
                self.recorder.restore(before.progress)
            if before is not None and before.step >= self.setup.steps:
                if export is not None:
                    raise OptionError(
                        f"train: --export needs a step to train, but all {before.step} were done before; give more "
                        "--steps"
                    )
                self.known = before.progress["known"]
                self.notes.append(f"All {before.step} steps were done before; {before.folder} is the trained model.")
                return
            self._show(None, "loading the model")
            built = build(self.setup, self.device)
            _name_tokens(built.model, data.tokenizer)
            self.notes.extend(built.notes)
            self.known = _counts(built.model) | {"replaced": built.replaced}
            sealer = _Sealer(lambda: self._progress(built.model, data), data.tokenizer)
            spenders = spending.observers(self.setup, self._decided)
            self.compiled.settled = lambda: all(
                each.spending is not None and each.spending.settled for each in spenders
            )
            callbacks = [self.recorder, sealer, *spenders, self.compiled, *observers]
            trainer = _Trainer(
                built.model, arguments, data, self.compiled, callbacks, lambda: spenders[0].parts if spenders else 1
            )
            with (
                self.compiled.session(),
                self.interruption,
                torch.serialization.safe_globals(_projectors(self.setup.optimizer)),
            ):
                trainer.train(resume_from_checkpoint=str(before.folder) if before else None)
            self.known["checkpointed_layers"] = checkpointed_layers(built.model)
            self._end(folder)
            if export is not None:
                self._export(built.model, data.tokenizer, export)

    def results(self) -> dict[str, Any]:
        # A device that failed cannot be synchronized.
        with contextlib.suppress(Exception):
            self.recorder.settle()
        peaks = {name: value for name, value in self.known.items() if name.startswith("peak_")}
        own = {"steps": self.setup.steps, "compile_seconds": self.compiled.seconds}
        return own | self.known | self.recorder.results() | peaks | {"notes": self.notes}

    def _arguments(self, setup: Setup, place: Path, folder: Path | None, save_every: int) -> TrainingArguments:
        more: dict[str, Any] = {"logging_nan_inf_filter": False, "full_determinism": self.deterministic}
        if folder is not None:
            every = save_every or self.setup.steps
            more |= {"save_strategy": "steps", "save_steps": every, "save_total_limit": saved.KEPT}
        arguments = training_arguments(setup, place, **more)
        if self.device.type == "cpu":
            # accelerate 1.15 numbers the CPU by rank, but torch.load does not know "cpu:0" when the Trainer restores an
            # optimizer.
            set_device(arguments, self.device)
        return arguments

    def _before(self, folder: Path | None, resume: bool, data: Data) -> saved.Saved | None:
        """The checkpoint to resume from; all ranks use the one that the first rank finds."""
        if folder is None:
            return None
        found: list[Any] = [None, []]
        if ranks.first():
            saved.check_new(folder, resume)
            found[0] = saved.newest(folder, found[1]) if resume else None
            if resume and found[0] is None:
                found[1].append(f"There is no checkpoint in {folder} to resume from; starting from scratch.")
        if dist.is_initialized() and self.setup.ranks > 1:
            dist.broadcast_object_list(found)
        before: saved.Saved | None = found[0]
        self.notes.extend(found[1])
        if before is not None:
            saved.check_same(before, _same(self.setup), data.digest)
            self.notes.append(f"Resumed from step {before.step}, {before.folder}.")
        return before

    def _progress(self, model: nn.Module, data: Data) -> dict[str, Any]:
        known = self.known | {"checkpointed_layers": checkpointed_layers(model)}
        return self.recorder.progress() | {"known": known, "setup": _same(self.setup), "text": data.digest}

    def _end(self, folder: Path | None) -> None:
        """Gather the results of all ranks, and note an interruption."""
        if dist.is_initialized() and self.setup.ranks > 1:
            self.recorder.join()
        if self.recorder.interrupted:
            step = len(self.recorder.losses)
            kept = f"a checkpoint was saved in {folder}" if folder else "nothing was saved, since there is no --output"
            self.notes.append(f"Interrupted after step {step} of {self.setup.steps}; {kept}.")

    def _export(self, model: Any, tokenizer: Any, folder: Path) -> None:
        if self.recorder.interrupted:
            self.notes.append("Nothing was exported, since the run was interrupted.")
            return
        self._show(None, "exporting the model")
        # The memory of merging, and of loading weights again, does not count.
        self.known |= {name: value for name, value in self.recorder.results().items() if name.startswith("peak_")}
        if ranks.first():
            exporting.export(self.setup, model, tokenizer, folder)
        self.notes.append(f"Exported the trained model to {folder}.")

    def _print(self, notes: list[str]) -> None:
        """Note sentences, and print them above the progress bar: a run may be long."""
        self.notes.extend(notes)
        if self.bar is not None:
            self.printed.extend(notes)
            for note in notes:
                self.bar.console.print(note, markup=False, highlight=False, soft_wrap=True)

    def _decided(self, sentence: str) -> None:
        """Note a decision that changes the time of later steps."""
        self.notes.append(sentence)
        self.recorder.restart_timing()

    def _show(self, step: int | None, doing: str) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=step, total=self.setup.steps, description=doing)


class _Trainer(Trainer):
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
        whole = (
            None if data.held is None else _whole_batches(data.held, arguments.eval_batch_size * arguments.world_size)
        )
        held = None if whole is None else Sequences(whole)
        if whole is not None:
            self.predicted = int((whole[:, 1, 1:] != MASKED).sum()) / (len(whole) // arguments.eval_batch_size)
        super().__init__(
            model=model, args=arguments, train_dataset=Sequences(data.sequences), eval_dataset=held, callbacks=callbacks
        )
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
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
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


class _Sealer(TrainerCallback):
    """Marks a checkpoint as unfinished, adds the tokenizer, and seals it once all ranks have written their files."""

    def __init__(self, progress: Callable[[], dict[str, Any]], tokenizer: Any) -> None:
        self.progress, self.tokenizer = progress, tokenizer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The Trainer's own callback and the recorder, which run before this one, decide whether to save.
        if control.should_save and ranks.first():
            saved.begin(_checkpoint(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        progress = self.progress()
        if dist.is_initialized():
            dist.barrier()
        if ranks.first():
            folder = _checkpoint(args, state)
            self.tokenizer.save_pretrained(folder)
            saved.seal(folder, progress)


def _name_tokens(model: Any, tokenizer: Any) -> None:
    """Give a model that lacks end-of-text and padding tokens its tokenizer's: the saved model can generate."""
    for config in (model.config, model.generation_config):
        for name in ("eos_token_id", "pad_token_id"):
            if config is not None and getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


@contextlib.contextmanager
def _order_of_sums() -> Iterator[None]:
    """Restore the global settings that the Trainer changes for a deterministic run."""
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = flags


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence nested progress bars and the Trainer's warnings, which only say that tied weights are saved once and that
    allowed options changed."""
    loggers = [logging.getLogger(f"transformers.{name}") for name in ("trainer", "trainer_utils")]
    levels, bars = [logger.level for logger in loggers], transformers_logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """The folder that the Trainer writes to."""
    if folder is not None:
        with saved.held(folder) if ranks.first() else contextlib.nullcontext():
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="liger-train-") as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def _with_private_disk_folder(setup: Setup) -> Iterator[str | None]:
    """A private folder in the `nvme_folder` of a setup:

    DeepSpeed names its files only by rank, and does not remove them.
    """
    if setup.offload != "nvme":
        yield setup.nvme_folder
        return
    with tempfile.TemporaryDirectory(prefix="liger-train-", dir=setup.nvme_folder, ignore_cleanup_errors=True) as own:
        yield own


def _same(setup: Setup) -> dict[str, Any]:
    """The options that must not change when a run is resumed."""
    return {name: value for name, value in asdict(setup).items() if name not in MAY_CHANGE}


def _counts(model: Any) -> dict[str, int]:
    """The number of weights and of trained weights; ZeRO stage 3 leaves only the number in place of each weight."""
    if any(hasattr(weight, "ds_numel") for weight in model.parameters()):
        every = {weight: weight.ds_numel for weight in model.parameters()}
        return {
            "parameters": sum(every.values()),
            "trainable_parameters": sum(n for w, n in every.items() if w.requires_grad),
        }
    return {"parameters": model.num_parameters(), "trainable_parameters": model.num_parameters(only_trainable=True)}


def _projectors(optimizer: str) -> list[Any]:
    """Classes in the state of these optimizers that torch.load must be allowed to load."""
    name = next((name for name in PROJECTORS if optimizer.startswith(name)), None)
    if name is None:
        return []
    module, kind = PROJECTORS[name]
    return [getattr(importlib.import_module(module), kind)]
