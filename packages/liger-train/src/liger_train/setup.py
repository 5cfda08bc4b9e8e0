# SPDX-License-Identifier: Apache-2.0
"""The setup of a training run: model, text, batch, and techniques."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, fields

from liger_core.errors import OptionError
from liger_train import fields as training_fields

# The text that every machine has: the sources of Python's standard library.
LIBRARY = "library"
# Adapters on every linear layer but the LM head.
ALL_LINEAR = "all-linear"
# As --batch: as many sequences as fit.
AUTO = "auto"
ZERO = ("zero1", "zero2", "zero3")
MOST = 2**31 - 1
# Matmuls in float8 need dimensions that are multiples of this one.
FLOAT8_MULTIPLE = 16
# Transformers seeds NumPy, too, which takes 32 bits.
LIMITS = {
    "batch": (1, MOST),
    "sequence": (2, 2**24),
    "accumulation": (1, MOST),
    "ranks": (1, MOST),
    "tp": (1, MOST),
    "cp": (1, MOST),
    "steps": (1, MOST),
    "adapter_rank": (1, MOST),
    "adapter_alpha": (1, MOST),
    "seed": (0, 2**32 - 1),
}
# Tokens of a tile of --mlp tiled: enough to keep a GPU busy; the sums of weight gradients take little beside its
# matmuls.
MLP_ROWS = 16_384
# The defaults of `liger train` by device, where they differ from those of the fields.
DEFAULTS = {"cuda": {"precision": "bf16", "checkpoint": "full"}, "cpu": {"precision": "fp32", "checkpoint": "none"}}


@dataclass(frozen=True)
class Setup:
    """Everything that determines the losses, the speed and the memory of a training run.

    model         preset, folder or name on the hub
    batch         sequences per micro-batch and rank, of `sequence` tokens each; ranks of tp and cp share theirs
    data          a file of text or of rows, a folder, a dataset saved by Hugging Face's datasets, or "library"
    liger         "all", "none", "all-but-loss", or ops separated by commas
    precision     "fp32"; "bf16", "fp16": mixed, with float32 weights; "bf16-pure": all in bfloat16; "fp8…": as one of
                  these in float8.py
    checkpoint    "none", "full", "offload", "auto", or the number of layers to recompute
    compile, mlp, optimizer, shard, offload, adapter    names in techniques.py
    ranks         all of them; `tp` of them share each layer, `cp` each sequence, and the others are data parallel
    memory_limit  bytes; None for all memory of the device
    nvme_folder   where --offload nvme writes
    trust_remote_code  whether the model's own code may run
    random_weights     use only the config of a folder or name
    set           more fields of transformers.TrainingArguments, as "name=value" words; with num_train_epochs, `steps`
                  has no effect
    adapter_targets    "all-linear", or names of linear layers separated by commas
    validation    share of the sequences, or documents, that is never trained on, for the validation loss
    packing       put several documents into one sequence
    """

    model: str
    batch: int = 1
    sequence: int = 1024
    data: str = LIBRARY
    liger: str = "all"
    precision: str = "bf16"
    checkpoint: str = "full"
    optimizer: str = "adamw"
    shard: str = "none"
    offload: str = "none"
    adapter: str = "none"
    accumulation: int = 1
    ranks: int = 1
    tp: int = 1
    cp: int = 1
    device: str = "cuda"
    memory_limit: int | None = None
    steps: int = 20
    learning_rate: float = 1e-5
    seed: int = 0
    nvme_folder: str | None = None
    trust_remote_code: bool = False
    random_weights: bool = False
    set: str = ""
    adapter_rank: int = 16
    adapter_alpha: int = 32
    adapter_targets: str = ALL_LINEAR
    validation: float = 0.0
    packing: bool = False
    compile: str = "none"
    mlp: str = "whole"

    @property
    def mixed(self) -> bool:
        """Whether weights are in float32, and matmuls in less."""
        return self.precision != "fp32" and not self.pure

    @property
    def pure(self) -> bool:
        """Whether weights and optimizer are in bfloat16, too."""
        return self.precision.endswith("-pure")

    @property
    def replicas(self) -> int:
        """The number of data-parallel ranks or groups of ranks, each with sequences of its own."""
        return self.ranks // (self.tp * self.cp)

    @property
    def sequences_per_step(self) -> int:
        """The number of sequences in an optimizer step, over all micro-batches and ranks."""
        return self.batch * self.accumulation * self.replicas

    @property
    def sharing_ranks(self) -> int:
        """The number of ranks over which --shard shards weights: data- and context-parallel ones."""
        return self.ranks // self.tp

    def command(self) -> str:
        """The command line of this run: every option that is not the default on its device."""
        words = ["liger", "train"]
        if self.ranks > 1:
            words = ["torchrun", "--nproc-per-node", str(self.ranks), "-m", "liger_core", "train"]
        for field in fields(self):
            value, option = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if value == DEFAULTS[self.device].get(field.name, field.default) or field.name == "ranks":
                continue
            if field.name == "set":
                words += [word for pair in shlex.split(self.set) for word in ("--set", pair)]
                continue
            if field.name == "steps" and training_fields.epochs(self.set) is not None:
                continue
            words += (
                [option] if value is True else [option, _size(value) if field.name == "memory_limit" else str(value)]
            )
        return shlex.join(words)


def _size(size: int) -> str:
    """The value of --memory-limit for a number of bytes."""
    return next(
        (f"{size >> bits}{unit}" for bits, unit in ((30, "GiB"), (20, "MiB")) if size % (1 << bits) == 0), f"{size}B"
    )


def batch_of(given: str, largest: int, command: str = "train") -> int:
    """The value of --batch, which is `largest` for auto."""
    if given == AUTO:
        return largest
    if not given.isdecimal():
        raise OptionError(f"{command}: --batch must be a number or auto, got {given!r}")
    return int(given)


def check_values(setup: Setup, command: str = "train") -> None:
    """Raise OptionError for a number out of range or an empty name."""
    for name, (low, high) in LIMITS.items():
        value = getattr(setup, name)
        if not low <= value <= high:
            raise OptionError(f"{command}: --{name.replace('_', '-')} must be from {low} to {high}, got {value}")
    if setup.ranks % (setup.tp * setup.cp):
        ranks = f"{setup.ranks} rank{'s' if setup.ranks > 1 else ''}"
        raise OptionError(
            f"{command}: the number of ranks must be a multiple of --tp × --cp, got {setup.tp} × {setup.cp} and "
            f"{ranks}; "
            + ("run it under torchrun --nproc-per-node N -m liger_core train" if command == "train" else "give --ranks")
        )
    if setup.batch * setup.sequence > MOST:
        raise OptionError(
            f"{command}: --batch × --sequence must be at most {MOST} tokens, got {setup.batch} × {setup.sequence}"
        )
    if not 0 < setup.learning_rate < math.inf:
        raise OptionError(f"{command}: --learning-rate must be a positive number, got {setup.learning_rate}")
    if not 0 <= setup.validation < 1:
        raise OptionError(f"{command}: --validation must be from 0 to below 1, got {setup.validation}")
    if setup.validation and setup.tp * setup.cp > 1:
        raise OptionError(
            f"{command}: --validation needs ranks with sequences of their own, got --tp {setup.tp} --cp {setup.cp}"
        )
    for name in ("adapter_rank", "adapter_alpha", "adapter_targets"):
        if setup.adapter == "none" and getattr(setup, name) != getattr(Setup, name):
            raise OptionError(f"{command}: --{name.replace('_', '-')} needs --adapter lora or qlora, got none")
    for name in ("model", "data", "nvme_folder", "adapter_targets"):
        if (word := getattr(setup, name)) is not None and not word.strip():
            option = name.replace("_", "-")
            raise OptionError(
                f"{command}: --{option} must not be empty, as it is when it is a shell variable that is not set"
            )
