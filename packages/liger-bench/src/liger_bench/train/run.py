# SPDX-License-Identifier: Apache-2.0
"""One training by the Transformers Trainer, and the row that comes of it, however it ends."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
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
from liger_bench.demo.text import Sequences
from liger_bench.model.process import failure
from liger_bench.train import ranks, saved, spending, techniques
from liger_bench.train.arguments import training_arguments
from liger_bench.train.checkpointing import checkpointed_layers
from liger_bench.train.combinations import ZERO
from liger_bench.train.cpu_memory import CpuMemory
from liger_bench.train.data import Data, read
from liger_bench.train.model import build, config_of
from liger_bench.train.profile import Profile
from liger_bench.train.record import Interruption, Recorder
from liger_bench.train.row import Row, row_of
from liger_bench.train.setup import Setup
from liger_bench.train.shapes import SHAPES
from liger_bench.train.snapshot import Snapshot
from liger_core.errors import DeviceError, LigerError, OptionError

# What may change from one run to the next of the same training.
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
    notes: Sequence[str] = (),
) -> Row:
    """Train, and tell what it took; memory that runs out, a failure and an interruption are rows, too.

    folder         where checkpoints go: every `save_every` steps, at the end, and when it is interrupted; none without
    resume         go on from the newest checkpoint there that is whole; the losses are then those of a training that never stopped
    deterministic  every sum in one order, so that two runs have the same losses, bit for bit
    observers      further callbacks of the Trainer
    notes          what was decided before

    Raises OptionError or DeviceError for a setup that cannot be trained, before anything large is loaded.
    """
    techniques.check(setup)
    if resume:
        _check_resumable(setup)
    device = _device(setup)
    training = _Training(setup, device, list(notes), bar, deterministic)
    training.recorder.memory = _memory(setup, training.notes, observers)
    results: dict[str, Any] = {}
    try:
        with _order_of_sums():
            training.train(folder, resume, save_every, observers)
    except LigerError:
        raise
    except KeyboardInterrupt:
        if setup.ranks > 1:
            # The other ranks wait for this one; torchrun ends them when it ends.
            raise
        results = {"interrupted": True, "reason": "interrupted"}
    except Exception as error:
        _, results = failure(error)
    row = row_of(setup, machine.describe(device), training.results() | results)
    del training
    release(device)
    return row


def _memory(setup: Setup, notes: list[str], observers: Sequence[TrainerCallback]) -> CpuMemory | None:
    """What measures the memory of a training on the CPU, if it can be measured."""
    if setup.device != "cpu":
        return None
    if setup.shard in ZERO:
        notes.append("Peak memory was not measured: what DeepSpeed holds on the CPU cannot be seen.")
        return None
    if any(isinstance(observer, Profile | Snapshot) for observer in observers):
        notes.append("Peak memory was not measured: --snapshot and --profile need the same profiler.")
        return None
    return CpuMemory()


def _check_resumable(setup: Setup) -> None:
    if setup.optimizer == "galore-layerwise":
        # Its state is in as many optimizers as there are weights, of which the Trainer saves none.
        raise OptionError("train: --resume cannot restore --optimizer galore-layerwise, whose state no checkpoint has; use galore")
    if setup.offload == "nvme":
        # DeepSpeed 0.19 restores the weights that the optimizer has in float32, and takes a step with those from before that.
        raise OptionError(
            "train: --resume cannot restore --offload nvme exactly, since the first step would take the weights of the start; "
            "give the checkpoint as --model, which begins with a new optimizer, or train with --offload parameters"
        )


def largest_batch(setup: Setup, attempt: Callable[[Setup], Row]) -> Row:
    """The row of the first batch that does not run out of memory, from setup.batch down by a quarter each time."""
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
    note = f"--batch auto: {tried[-1]}" + (f", since memory ran out with {failed}." if failed else ", the first one that was tried.")
    return replace(found, notes=[*(found.notes or []), note])


def release(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device(setup: Setup) -> torch.device:
    """The device of this rank, with no more memory than the setup allows."""
    device = machine.measurable_device("train", setup.device)
    if device.type == "cpu":
        if setup.memory_limit is not None:
            raise DeviceError("train: --memory-limit needs a GPU, got --device cpu")
        return device
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    has = torch.cuda.get_device_properties(device).total_memory
    limit = has if setup.memory_limit is None else setup.memory_limit
    if limit > has:
        raise DeviceError(
            f"train: --memory-limit must be at most the memory of the GPU, {has / 2**30:.1f} GiB, got {limit / 2**30:.1f} GiB"
        )
    torch.cuda.set_per_process_memory_fraction(limit / has, device)
    return device


class _Training:
    """A training that is running, and what is known of it."""

    def __init__(self, setup: Setup, device: torch.device, notes: list[str], bar: Progress | None, deterministic: bool) -> None:
        self.setup, self.device, self.notes, self.bar, self.deterministic = setup, device, notes, bar, deterministic
        if deterministic:
            notes.append("--deterministic: every sum has one order; the times are those of a training that takes care of it.")
        self.interruption = Interruption()
        self.recorder = Recorder(setup, device, self.interruption, self._tell)
        self.known: dict[str, Any] = {}
        self.task = bar.add_task("preparing", total=setup.steps, unit="step") if bar else None

    def train(self, folder: Path | None, resume: bool, save_every: int, observers: Sequence[TrainerCallback]) -> None:
        with _place(folder) as place, _with_a_place_on_the_disk(self.setup) as setup, _quiet():
            # Before the model: DeepSpeed splits weights as soon as they are made, while these are alive.
            arguments = self._arguments(setup, place, folder, save_every)
            self._tell(None, "reading the text")
            vocabulary = config_of(self.setup).get_text_config().vocab_size
            data = read(self.setup, vocabulary, own_tokenizer=self.setup.model not in SHAPES)
            self.notes.extend(data.notes)
            before = self._before(folder, resume, data)
            if before is not None:
                self.recorder.restore(before.told)
            if before is not None and before.step >= self.setup.steps:
                self.known = before.told["known"]
                self.notes.append(f"All {before.step} steps were taken before; {before.folder} is the trained model.")
                return
            self._tell(None, "loading the model")
            built = build(self.setup, self.device)
            _name_tokens(built.model, data.tokenizer)
            self.notes.extend(built.notes)
            self.known = _counts(built.model) | {"replaced": built.replaced}
            sealer = _Sealer(lambda: self._told(built.model, data), data.tokenizer)
            spenders = spending.observers(self.setup, self._decided)
            callbacks = [self.recorder, sealer, *spenders, *observers]
            trainer = _Trainer(built.model, arguments, data, self.recorder, callbacks, lambda: spenders[0].parts if spenders else 1)
            with self.interruption, torch.serialization.safe_globals(_projectors(self.setup.optimizer)):
                trainer.train(resume_from_checkpoint=str(before.folder) if before else None)
            self.known["checkpointed_layers"] = checkpointed_layers(built.model)
            self._end(folder)

    def results(self) -> dict[str, Any]:
        # A device that failed cannot be waited for.
        with contextlib.suppress(Exception):
            self.recorder.settle()
        return self.known | self.recorder.results() | {"notes": self.notes}

    def _arguments(self, setup: Setup, place: Path, folder: Path | None, save_every: int) -> TrainingArguments:
        more: dict[str, Any] = {"logging_nan_inf_filter": False, "full_determinism": self.deterministic}
        if folder is not None:
            every = save_every or self.setup.steps
            more |= {"save_strategy": "steps", "save_steps": every, "save_total_limit": saved.KEPT}
        arguments = training_arguments(setup, place, **more)
        if self.device.type == "cpu":
            # accelerate 1.15 numbers it by rank, and torch.load knows no "cpu:0" when the Trainer restores an optimizer.
            vars(arguments)["_setup_devices"] = self.device
        return arguments

    def _before(self, folder: Path | None, resume: bool, data: Data) -> saved.Saved | None:
        """The checkpoint to go on from; all ranks take the one that the first rank finds."""
        if folder is None:
            return None
        found: list[Any] = [None, []]
        if _rank() == 0:
            saved.check_new(folder, resume)
            found[0] = saved.newest(folder, found[1]) if resume else None
            if resume and found[0] is None:
                found[1].append(f"There is no checkpoint in {folder} to go on from; the training begins.")
        if dist.is_initialized() and self.setup.ranks > 1:
            dist.broadcast_object_list(found)
        before: saved.Saved | None = found[0]
        self.notes.extend(found[1])
        if before is not None:
            saved.check_same(before, _same(self.setup), data.digest)
            self.notes.append(f"The training went on from step {before.step}, {before.folder}.")
        return before

    def _told(self, model: nn.Module, data: Data) -> dict[str, Any]:
        known = self.known | {"checkpointed_layers": checkpointed_layers(model)}
        return self.recorder.told() | {"known": known, "setup": _same(self.setup), "text": data.digest}

    def _end(self, folder: Path | None) -> None:
        """What the ranks know of each other only now, and a word on an interruption."""
        if dist.is_initialized() and self.setup.ranks > 1:
            self.recorder.join()
        if self.recorder.interrupted:
            step = len(self.recorder.losses)
            kept = f"a checkpoint is in {folder}" if folder else "nothing was saved, since there is no --output"
            self.notes.append(f"Interrupted after step {step} of {self.setup.steps}; {kept}.")

    def _decided(self, sentence: str) -> None:
        """Later steps take another time than those up to now."""
        self.notes.append(sentence)
        self.recorder.time_anew()

    def _tell(self, step: int | None, doing: str) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=step, description=doing)


class _Trainer(Trainer):
    """A Trainer that keeps the loss of every micro-batch, on the device and unrounded, and takes one in as many parts as it is told."""

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        data: Data,
        recorder: Recorder,
        callbacks: list[TrainerCallback],
        parts: Callable[[], int],
    ) -> None:
        super().__init__(model=model, args=arguments, train_dataset=Sequences(data.sequences), callbacks=callbacks)
        # It prints a summary to standard output, where a single JSON object may be due.
        self.remove_callback(PrinterCallback)
        self.micro, self.parts = recorder.micro, parts

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        # Only a loss that is divided by the tokens of the whole batch is the sum of those of its parts.
        parts = 1 if num_items_in_batch is None else self.parts()
        pieces = zip(*(value.tensor_split(min(parts, len(value))) for value in inputs.values()), strict=True)
        losses = [super(_Trainer, self).training_step(model, dict(zip(inputs, piece, strict=True)), num_items_in_batch) for piece in pieces]
        loss = losses[0] if parts == 1 else torch.stack(losses).sum()
        self.micro.append(loss.detach().clone())
        return loss


class _Sealer(TrainerCallback):
    """Marks a checkpoint that begins, puts the tokenizer beside it, and seals it once all ranks have written theirs."""

    def __init__(self, told: Callable[[], dict[str, Any]], tokenizer: Any) -> None:
        self.told, self.tokenizer = told, tokenizer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Others have decided: the Trainer's own callback, and the recorder, which comes before this one.
        if control.should_save and _rank() == 0:
            saved.begin(_checkpoint(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        told = self.told()
        if dist.is_initialized():
            dist.barrier()
        if _rank() == 0:
            folder = _checkpoint(args, state)
            self.tokenizer.save_pretrained(folder)
            saved.seal(folder, told)


def _name_tokens(model: Any, tokenizer: Any) -> None:
    """Tell a model that knows no end of a text, and no padding, those of its tokenizer, so that what is saved can generate."""
    for config in (model.config, model.generation_config):
        for name in ("eos_token_id", "pad_token_id"):
            if config is not None and getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


@contextlib.contextmanager
def _order_of_sums() -> Iterator[None]:
    """What the Trainer sets for a deterministic training is undone after it."""
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
    """No bars within the bar, and none of the Trainer's warnings: they tell that tied weights are saved once, and what may change did."""
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
    """Where the Trainer may write."""
    if folder is not None:
        with saved.held(folder) if ranks.first() else contextlib.nullcontext():
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="liger-train-") as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def _with_a_place_on_the_disk(setup: Setup) -> Iterator[Setup]:
    """The setup with a folder of its own in its `nvme_folder`: DeepSpeed names files there by their rank only, and leaves them behind."""
    if setup.offload != "nvme":
        yield setup
        return
    with tempfile.TemporaryDirectory(prefix="liger-train-", dir=setup.nvme_folder, ignore_cleanup_errors=True) as own:
        yield replace(setup, nvme_folder=own)


def _same(setup: Setup) -> dict[str, Any]:
    """What must not change from one run to the next of the same training."""
    return {name: value for name, value in asdict(setup).items() if name not in MAY_CHANGE}


def _counts(model: Any) -> dict[str, int]:
    """Weights, and those that are trained; DeepSpeed's stage 3 leaves nothing of them in their place but the number."""
    if any(hasattr(weight, "ds_numel") for weight in model.parameters()):
        every = {weight: weight.ds_numel for weight in model.parameters()}
        return {"parameters": sum(every.values()), "trainable_parameters": sum(n for w, n in every.items() if w.requires_grad)}
    return {"parameters": model.num_parameters(), "trainable_parameters": model.num_parameters(only_trainable=True)}


def _projectors(optimizer: str) -> list[Any]:
    """What the state of these optimizers holds besides tensors; torch.load makes nothing else that it does not know."""
    name = next((name for name in PROJECTORS if optimizer.startswith(name)), None)
    if name is None:
        return []
    module, kind = PROJECTORS[name]
    return [getattr(importlib.import_module(module), kind)]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
