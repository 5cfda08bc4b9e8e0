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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from liger_bench import machine
from liger_bench.process import failure
from liger_core.errors import DeviceError, LigerError, OptionError
from liger_hf.presets import PRESETS
from liger_hf.private_transformers import set_device
from liger_train import ranks, techniques
from liger_train.checkpointing import checkpointed_layers
from liger_train.combinations import ZERO
from liger_train.configs import config_of
from liger_train.model import build
from liger_train.row import Row, row_of
from liger_train.setup import Setup
from liger_train.train import auto_checkpoint, saved
from liger_train.train import export as exporting
from liger_train.train.arguments import training_arguments
from liger_train.train.compiled import Compiled
from liger_train.train.cpu_memory import CpuMemory
from liger_train.train.data import Data, read, with_steps
from liger_train.train.profile import Profile
from liger_train.train.record import Interruption, Recorder
from liger_train.train.snapshot import Snapshot
from liger_train.train.trainer import RunTrainer, Sealer

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
        saved.check_resumable(setup)
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


def largest_batch(setup: Setup, attempt: Callable[[Setup], Row]) -> Row:
    """The row of the first batch size that fits, from setup.batch down by a quarter each time."""
    failed: list[int] = []
    while (row := attempt(setup)).out_of_memory and setup.batch > 1:
        failed.append(setup.batch)
        setup = replace(setup, batch=setup.batch * 3 // 4)
    end = f"; ran out of memory with {', '.join(map(str, failed))}." if failed else ", the first one tried."
    return replace(row, notes=[*(row.notes or []), f"--batch auto: {setup.batch}{end}"])


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
        with contextlib.ExitStack() as stack, _quiet():
            written_to, private = _folders(stack, self.setup, folder)
            self._show(None, "reading the text")
            vocabulary = config_of(self.setup).get_text_config().vocab_size
            data = read(self.setup, vocabulary, own_tokenizer=self.setup.model not in PRESETS)
            self._print([note for note in data.notes if note not in self.notes])
            self.setup = with_steps(self.setup, data)
            self._show(None, "preparing")
            # Before the model: while these arguments exist, DeepSpeed shards weights as they are created.
            arguments = self._arguments(replace(self.setup, nvme_folder=private), written_to, folder, save_every)
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
            sealer = Sealer(lambda: self._progress(built.model, data), data.tokenizer)
            spenders = auto_checkpoint.observers(self.setup, self._decided)
            self.compiled.settled = lambda: all(
                each.spending is not None and each.spending.settled for each in spenders
            )
            memory = [self.recorder.memory] if self.recorder.memory else []
            callbacks = [*memory, self.recorder, sealer, *spenders, self.compiled, *observers]
            trainer = RunTrainer(
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
        columns = {"steps": self.setup.steps, "compile_seconds": self.compiled.seconds}
        return columns | self.known | self.recorder.results() | peaks | {"notes": self.notes}

    def _arguments(self, setup: Setup, written_to: Path, folder: Path | None, save_every: int) -> TrainingArguments:
        more: dict[str, Any] = {"logging_nan_inf_filter": False, "full_determinism": self.deterministic}
        if folder is not None:
            every = save_every or self.setup.steps
            more |= {"save_strategy": "steps", "save_steps": every, "save_total_limit": saved.KEPT}
        arguments = training_arguments(setup, written_to, **more)
        if self.device.type == "cpu":
            # accelerate 1.15 numbers the CPU by rank, but torch.load does not know "cpu:0" when the Trainer restores an
            # optimizer.
            set_device(arguments, self.device)
        return arguments

    def _before(self, folder: Path | None, resume: bool, data: Data) -> saved.Saved | None:
        """The checkpoint to resume from; all ranks use the one that the first rank finds."""
        if folder is None:
            return None
        shared: list[Any] = [None, []]
        if ranks.first():
            saved.check_new(folder, resume)
            shared[0] = saved.newest(folder, shared[1]) if resume else None
            if resume and shared[0] is None:
                shared[1].append(f"There is no checkpoint in {folder} to resume from; starting from scratch.")
        if dist.is_initialized() and self.setup.ranks > 1:
            dist.broadcast_object_list(shared)
        before: saved.Saved | None = shared[0]
        self.notes.extend(shared[1])
        if before is not None:
            saved.check_same(before, saved.same(self.setup), data.digest)
            self.notes.append(f"Resumed from step {before.step}, {before.folder}.")
        return before

    def _progress(self, model: nn.Module, data: Data) -> dict[str, Any]:
        known = self.known | {"checkpointed_layers": checkpointed_layers(model)}
        return self.recorder.progress() | {"known": known, "setup": saved.same(self.setup), "text": data.digest}

    def _end(self, folder: Path | None) -> None:
        """Gather the results of all ranks, and note an interruption."""
        if dist.is_initialized() and self.setup.ranks > 1:
            self.recorder.join()
        if self.recorder.interrupted:
            step = len(self.recorder.losses)
            ending = (
                f"a checkpoint was saved in {folder}" if folder else "nothing was saved, since there is no --output"
            )
            self.notes.append(f"Interrupted after step {step} of {self.setup.steps}; {ending}.")

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


def _name_tokens(model: Any, tokenizer: Any) -> None:
    """Give a model that lacks end-of-text and padding tokens its tokenizer's: the saved model can generate."""
    for config in (model.config, model.generation_config):
        for name in ("eos_token_id", "pad_token_id"):
            if config is not None and getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name))


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


def _folders(stack: contextlib.ExitStack, setup: Setup, folder: Path | None) -> tuple[Path, str | None]:
    """Return the folder that the Trainer writes to, and that of DeepSpeed, until the stack is closed.

    DeepSpeed's is private, within nvme_folder: it names its files only by rank, and does not remove them.
    """
    private = setup.nvme_folder
    if setup.offload == "nvme":
        temporary = tempfile.TemporaryDirectory(prefix="liger-train-", dir=private, ignore_cleanup_errors=True)
        private = stack.enter_context(temporary)
    if folder is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="liger-train-"))), private
    if ranks.first():
        stack.enter_context(saved.held(folder))
    return folder, private


def _counts(model: Any) -> dict[str, int]:
    """The number of weights and of trained weights; ZeRO stage 3 leaves only the number in place of each weight."""
    if any(hasattr(weight, "ds_numel") for weight in model.parameters()):
        sizes = {weight: weight.ds_numel for weight in model.parameters()}
        trained = sum(size for weight, size in sizes.items() if weight.requires_grad)
        return {"parameters": sum(sizes.values()), "trainable_parameters": trained}
    return {"parameters": model.num_parameters(), "trainable_parameters": model.num_parameters(only_trainable=True)}


def _projectors(optimizer: str) -> list[Any]:
    """Classes in the state of these optimizers that torch.load must be allowed to load."""
    name = next((name for name in PROJECTORS if optimizer.startswith(name)), None)
    if name is None:
        return []
    module, kind = PROJECTORS[name]
    return [getattr(importlib.import_module(module), kind)]
