# SPDX-License-Identifier: Apache-2.0
"""One training run by the Transformers Trainer, and its row of results, however it ends."""

import contextlib
import logging
import platform
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
from liger_core.errors import LigerError
from liger_hf.presets import PRESETS
from liger_hf.private_transformers import TRAINER_DEVICE, without_packing
from liger_hf.without_gradient import GradientCheck
from liger_train import auto_checkpoint, ranks, techniques
from liger_train.adapters import weight_counts
from liger_train.checkpointing import checkpointed_layers
from liger_train.combinations import ZERO
from liger_train.configs import config_of
from liger_train.errors import SetupError
from liger_train.model import build
from liger_train.optimizers import projectors
from liger_train.row import Row, row_of
from liger_train.runs import export as exporting
from liger_train.runs import saved_checkpoints
from liger_train.runs.arguments import training_arguments
from liger_train.runs.checkpoint_writer import CheckpointWriter
from liger_train.runs.compiled import Compiled
from liger_train.runs.cpu_memory import CpuMemory
from liger_train.runs.data import Data, read, with_steps
from liger_train.runs.devices import device_of, release
from liger_train.runs.profile import Profile
from liger_train.runs.record import Interruption, Recorder
from liger_train.runs.snapshot import Snapshot
from liger_train.runs.trainer import RunTrainer, Sealer
from liger_train.setup import Setup


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
    """Train, and return the results, also of a run that runs out of memory, fails, or is interrupted.

    folder         folder for checkpoints, saved every `save_every` steps, at the end, and when interrupted
    resume         resume from the latest intact checkpoint there; the losses equal those of an uninterrupted run
    deterministic  use deterministic algorithms; two runs then have bit-identical losses
    observers      more callbacks for the Trainer
    bar            shows the progress
    notes          decisions made so far, one sentence each; notes on the data are printed above the bar, and added here
    export         folder for the trained model, with adapters merged into its weights

    Raises OptionError or DeviceError for an unsupported setup, before anything large is loaded.
    """
    techniques.check(setup)
    if export is not None and ranks.first():
        exporting.check(setup, export)
    if resume:
        saved_checkpoints.check_resumable(setup)
    device = device_of(setup)
    current = _Run(setup, device, [] if notes is None else notes, bar, deterministic)
    memory = current.recorder.memory = _cpu_memory(setup, current.notes, observers)
    results: dict[str, Any] = {}
    try:
        with _restored_determinism(), memory or contextlib.nullcontext():
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
        # A checkpoint that could not be written ended the run.
        results["interrupted"] = False
    row = row_of(setup, machine.describe(device), current.results() | results)
    del current
    release(device)
    return row


def _cpu_memory(setup: Setup, notes: list[str], observers: Sequence[TrainerCallback]) -> CpuMemory | None:
    """Return the callback that measures memory on the CPU, or None with a note if that is impossible."""
    if setup.device != "cpu":
        return None
    if setup.shard in ZERO:
        notes.append("Peak memory was not measured: DeepSpeed's buffers on the CPU cannot be tracked.")
        return None
    if any(isinstance(observer, Profile | Snapshot) for observer in observers):
        notes.append("Peak memory was not measured: --snapshot and --profile need the same profiler.")
        return None
    return CpuMemory(buckets=setup.shard == "none" and setup.sharing_ranks > 1)


def largest_batch(setup: Setup, attempt: Callable[[Setup], Row]) -> Row:
    """Return the row of the first batch size that fits, from setup.batch down by a quarter each time."""
    failed: list[int] = []
    while (row := attempt(setup)).out_of_memory and setup.batch > 1:
        failed.append(setup.batch)
        setup = replace(setup, batch=setup.batch * 3 // 4)
    end = f"; ran out of memory with {', '.join(map(str, failed))}." if failed else ", the first one tried."
    return replace(row, notes=[*(row.notes or []), f"--batch auto: {setup.batch}{end}"])


class _Run:
    """A run in progress, with its results so far.

    model_columns  the columns of the row that describe the model
    """

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
        self.model_columns: dict[str, Any] = {}
        self.task = bar.add_task("preparing", total=setup.steps, unit="step") if bar else None

    def train(
        self,
        folder: Path | None,
        resume: bool,
        save_every: int,
        observers: Sequence[TrainerCallback],
        export: Path | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            _silence(stack)
            output_folder, nvme_folder = _folders(stack, self.setup, folder)
            self._show(None, "reading the text")
            vocabulary = config_of(self.setup).get_text_config().vocab_size
            data = read(self.setup, vocabulary, own_tokenizer=self.setup.model not in PRESETS)
            self._print([note for note in data.notes if note not in self.notes])
            self.setup = with_steps(self.setup, data)
            self._show(None, "preparing")
            # Before the model: DeepSpeed shards weights as they are created, while these arguments exist.
            arguments = self._arguments(replace(self.setup, nvme_folder=nvme_folder), output_folder, folder, save_every)
            saved = self._checkpoint_to_resume(folder, resume, data)
            if saved is not None:
                self.recorder.restore(saved.progress)
            if saved is not None and saved.step >= self.setup.steps:
                if export is not None:
                    raise SetupError(
                        f"--export needs a step to train, but all {saved.step} were done before; give more --steps"
                    )
                self.model_columns = saved.progress["known"]
                self.notes.append(f"All {saved.step} steps were done before; {saved.folder} is the trained model.")
                return
            writer = stack.enter_context(CheckpointWriter(self.device, self.interruption.request))
            if folder is not None and self.setup.saves_shards:
                writer.connect()
            self._show(None, "loading the model")
            built = build(self.setup, self.device)
            _name_tokens(built.model, data.tokenizer)
            self.notes.extend(built.notes)
            self.model_columns = _counts(built.model) | {"replaced": built.replaced}
            sealer = Sealer(lambda: self._progress(built.model, data), data.tokenizer, writer)
            auto = auto_checkpoint.observers(self.setup, self._note_decision)
            self.compiled.settled = lambda: all(callback.settled for callback in auto)
            memory = [self.recorder.memory] if self.recorder.memory else []
            check = GradientCheck(lambda sentence: self._print([sentence]))
            callbacks = [*memory, self.recorder, sealer, *auto, self.compiled, check, *observers]
            trainer = RunTrainer(
                built.model, arguments, data, self.compiled, callbacks, lambda: auto[0].parts if auto else 1, writer
            )
            with (
                # The parts of a sequence on a rank of --cp would pass for packed texts, which have a mask.
                contextlib.nullcontext() if self.setup.packing else without_packing(),
                self.compiled.session(),
                self.interruption,
                torch.serialization.safe_globals(projectors(self.setup.optimizer)),
            ):
                trainer.train(resume_from_checkpoint=str(saved.folder) if saved else None)
            if folder is not None:
                self._show(None, "writing the checkpoint")
            writer.wait()
            self.model_columns["checkpointed_layers"] = checkpointed_layers(built.model)
            self._end(folder)
            if export is not None:
                self._export(built.model, data.tokenizer, export)

    def results(self) -> dict[str, Any]:
        # After a failure, synchronizing the device may raise.
        with contextlib.suppress(Exception):
            self.recorder.settle()
        columns = {"steps": self.setup.steps, "compile_seconds": self.compiled.seconds, "notes": self.notes}
        # Of an exported model, these have the peaks from before the export.
        return columns | self.recorder.results() | self.model_columns

    def _arguments(self, setup: Setup, output_folder: Path, folder: Path | None, save_every: int) -> TrainingArguments:
        more: dict[str, Any] = {"logging_nan_inf_filter": False, "full_determinism": self.deterministic}
        if folder is not None:
            more |= {"save_strategy": "steps", "save_steps": save_every or self.setup.steps}
            more["save_total_limit"] = saved_checkpoints.MOST_CHECKPOINTS
        arguments = training_arguments(setup, output_folder, **more)
        if self.device.type == "cpu":
            # accelerate 1.15 numbers CPUs by rank, but torch.load rejects "cpu:0" when an optimizer is restored.
            vars(arguments)[TRAINER_DEVICE] = self.device
        return arguments

    def _checkpoint_to_resume(
        self, folder: Path | None, resume: bool, data: Data
    ) -> saved_checkpoints.SavedCheckpoint | None:
        """Return the checkpoint to resume from, if any; all ranks use the one that the first rank finds."""
        if folder is None:
            return None
        shared: list[Any] = [None, []]
        if ranks.first():
            saved_checkpoints.check_new(folder, resume)
            shared[0] = saved_checkpoints.latest_intact(folder, shared[1]) if resume else None
            if resume and shared[0] is None:
                shared[1].append(f"There is no checkpoint in {folder} to resume from; starting from scratch.")
        if dist.is_initialized() and self.setup.ranks > 1:
            dist.broadcast_object_list(shared)
        if not (folder / saved_checkpoints.LOCK).is_file():
            raise SetupError(
                f"--output must be a folder that all machines share, got {folder}, in which {platform.node()} does not "
                "see the files of the first rank; give a folder of a shared file system"
            )
        saved: saved_checkpoints.SavedCheckpoint | None = shared[0]
        self.notes.extend(shared[1])
        if saved is not None:
            saved_checkpoints.check_same(saved, saved_checkpoints.fixed_options(self.setup), data.digest)
            self.notes.append(f"Resumed from step {saved.step}, {saved.folder}.")
        return saved

    def _progress(self, model: nn.Module, data: Data) -> dict[str, Any]:
        known = self.model_columns | {"checkpointed_layers": checkpointed_layers(model)}
        fixed = saved_checkpoints.fixed_options(self.setup)
        return self.recorder.progress() | {"known": known, "setup": fixed, "text": data.digest}

    def _end(self, folder: Path | None) -> None:
        """Gather the results of all ranks, and note an interruption."""
        if dist.is_initialized() and self.setup.ranks > 1:
            self.recorder.gather()
        if self.recorder.interrupted:
            step = len(self.recorder.losses)
            ending = f"a checkpoint was saved in {folder}" if folder else "nothing was saved without --output"
            self.notes.append(f"Interrupted after step {step} of {self.setup.steps}; {ending}.")

    def _export(self, model: Any, tokenizer: Any, folder: Path) -> None:
        if self.recorder.interrupted:
            self.notes.append("Nothing was exported, since the run was interrupted.")
            return
        self._show(None, "exporting the model")
        # The peak excludes merging, and loading weights again.
        self.model_columns |= {
            name: value for name, value in self.recorder.results().items() if name.startswith("peak_")
        }
        exporting.export(self.setup, model, tokenizer, folder)
        self.notes.append(f"Exported the trained model to {folder}.")

    def _print(self, notes: list[str]) -> None:
        """Note sentences, and print them above the progress bar, since the run may take long."""
        self.notes.extend(notes)
        if self.bar is not None:
            self.printed.extend(notes)
            for note in notes:
                self.bar.console.print(note, markup=False, highlight=False, soft_wrap=True)

    def _note_decision(self, sentence: str) -> None:
        """Note a decision that changes the time of later steps."""
        self.notes.append(sentence)
        self.recorder.restart_timing()

    def _show(self, step: int | None, doing: str) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=step, total=self.setup.steps, description=doing)


def _name_tokens(model: Any, tokenizer: Any) -> None:
    """Set missing end-of-text and padding tokens of a model to the tokenizer's, which generation needs."""
    for config in (model.config, model.generation_config):
        for name in ("eos_token_id", "pad_token_id"):
            if config is not None and getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name))


@contextlib.contextmanager
def _restored_determinism() -> Iterator[None]:
    """Restore the global settings that the Trainer changes for a deterministic run."""
    cudnn = torch.backends.cudnn
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags


def _silence(stack: contextlib.ExitStack) -> None:
    """Silence nested progress bars, and warnings about tied weights and about options that may change on resuming.

    The stack restores them.
    """
    for logger in (logging.getLogger(f"transformers.{name}") for name in ("trainer", "trainer_utils")):
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
    if transformers_logging.is_progress_bar_enabled():
        stack.callback(transformers_logging.enable_progress_bar)
    transformers_logging.disable_progress_bar()


def _folders(stack: contextlib.ExitStack, setup: Setup, folder: Path | None) -> tuple[Path, str | None]:
    """Return the folder that the Trainer writes to, and the one for DeepSpeed, until the stack is closed.

    DeepSpeed gets a temporary folder in nvme_folder, because it names files by rank only, and does not remove them.
    """
    nvme_folder = setup.nvme_folder
    if setup.offload == "nvme":
        temporary = tempfile.TemporaryDirectory(prefix="liger-train-", dir=nvme_folder, ignore_cleanup_errors=True)
        nvme_folder = stack.enter_context(temporary)
    if folder is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="liger-train-"))), nvme_folder
    if ranks.first():
        stack.enter_context(saved_checkpoints.locked(folder))
    return folder, nvme_folder


def _counts(model: Any) -> dict[str, int]:
    widths = weight_counts(model)
    return {
        "parameters": widths.total(),
        "trainable_parameters": sum(count for (is_trained, _), count in widths.items() if is_trained),
        "parameters_in_4_bits": widths[False, "4 bits"],
        "parameters_in_16_bits": sum(count for (_, width), count in widths.items() if width.endswith("float16")),
    }
