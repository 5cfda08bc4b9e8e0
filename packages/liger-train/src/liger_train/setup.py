# SPDX-License-Identifier: Apache-2.0
"""The setup of a training run: model, text, batch, and techniques."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, fields
from typing import Annotated, Any

from typer import Option

from liger_hf.presets import PRESETS
from liger_train import fields as training_fields
from liger_train.errors import SetupError

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
class Typed:
    """The type and the default of an option on the command line, where they are not those of its field."""

    kind: Any
    default: Any = None


@dataclass(frozen=True)
class Setup:
    """Everything that determines the losses, the speed and the memory of a training run.

    `liger train` and `liger plan` have an option for each field (options.py), whose help has the names in techniques.py
    as {values}. `memory_limit` is in bytes, and `set` has words of the form "name=value"; with num_train_epochs among
    them, `steps` has no effect.
    """

    model: Annotated[
        str, Option(help=f"{', '.join(PRESETS)} (random weights), a folder, or a name on the Hugging Face Hub.")
    ]
    batch: Annotated[
        int,
        Typed(str, "1"),
        Option(help="Sequences per micro-batch and rank, or group of --tp and --cp; auto: as many as fit."),
    ] = 1
    sequence: Annotated[int, Option(help="Tokens per sequence.")] = 1024
    data: Annotated[
        str,
        Option(
            help="Text to train on: a file, a folder, or library, the sources of Python's standard library. Rows of "
            "conversations, of prompts and completions, or of texts: a .json, .jsonl, .parquet or .csv file, or a "
            "dataset saved by datasets."
        ),
    ] = LIBRARY
    liger: Annotated[str, Typed(str | None), Option(help="{values}, or ops separated by commas. Default: all.")] = "all"
    precision: Annotated[str, Typed(str | None), Option(help="{values}. Default: bf16 on a GPU, else fp32.")] = "bf16"
    checkpoint: Annotated[
        str,
        Typed(str | None),
        Option(
            help="Activation checkpointing: {values} of layers. Default: full on a GPU, none on the CPU. A plan of "
            "auto is that of its start."
        ),
    ] = "full"
    optimizer: Annotated[str, Option(help="{values}.")] = "adamw"
    shard: Annotated[str, Option(help="{values}; across the ranks, or on one GPU with --offload.")] = "none"
    offload: Annotated[str, Option(help="{values}; needs --shard.")] = "none"
    adapter: Annotated[str, Option(help="{values}.")] = "none"
    accumulation: Annotated[int, Option(help="Micro-batches per optimizer step.")] = 1
    ranks: Annotated[
        int,
        Typed(int | None),
        Option(help="Number of processes, one per GPU. Default: those of torchrun, or as many as --tp × --cp needs."),
    ] = 1
    tp: Annotated[
        int, Option(help="Tensor parallelism: ranks that share each layer, by Transformers' tp_plan='auto'.")
    ] = 1
    cp: Annotated[int, Option(help="Context parallelism: ranks that share each sequence.")] = 1
    device: Annotated[
        str, Typed(str, AUTO), Option(help="auto, cpu or cuda. A plan needs no GPU; under auto it is for one.")
    ] = "cuda"
    memory_limit: Annotated[
        int | None,
        Typed(str | None),
        Option(
            help="GPU memory that the run may use, to simulate a smaller card, for instance 24GiB. Default: all of it."
        ),
    ] = None
    steps: Annotated[
        int,
        Typed(int | None),
        Option(help="Optimizer steps. Default: 20; in a sweep 6, plus 10 with --checkpoint auto."),
    ] = 20
    learning_rate: Annotated[float, Option(help="Constant learning rate.")] = 1e-5
    seed: Annotated[int, Option(help="Seed of random weights and of the order of sequences.")] = 0
    nvme_folder: Annotated[str | None, Option(help="Where --offload nvme writes.")] = None
    trust_remote_code: Annotated[bool, Option(help="Allow the model's own Python code to run. Read it first.")] = False
    random_weights: Annotated[
        bool, Option(help="Use only the config of a folder or name, with random weights by --seed.")
    ] = False
    set: Annotated[
        str,
        Typed(list[str] | None),
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a field of transformers.TrainingArguments, for instance weight_decay=0.1; repeatable.",
        ),
    ] = ""
    adapter_rank: Annotated[int, Option(help="Rank of adapters.")] = 16
    adapter_alpha: Annotated[int, Option(help="Adapters are scaled by alpha / rank.")] = 32
    adapter_targets: Annotated[
        str,
        Option(
            help="Linear layers that get adapters: all-linear, or names separated by commas, such as q_proj,v_proj."
        ),
    ] = ALL_LINEAR
    validation: Annotated[
        float, Option(help="Share of the text to hold out for a validation loss, for instance 0.02.")
    ] = 0.0
    packing: Annotated[bool, Option(help="Put several rows of --data into one sequence, as TRL packs them.")] = False
    compile: Annotated[
        str,
        Option(
            help="{values}: torch.compile for each layer, and CUDA graphs of a step. A plan is that of the eager model."
        ),
    ] = "none"
    mlp: Annotated[str, Option(help="{values}.")] = "whole"

    @property
    def implementation(self) -> str:
        """The name of what runs the model in `--sweep implementation=…`; it ends in "-compiled" with --compile."""
        name = {"none": "hf", "liger-kernel": "liger-kernel"}.get(self.liger, "liger")
        return name if self.compile == "none" else f"{name}-compiled"

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


def batch_of(words: str, largest: int) -> int:
    """The value of --batch, which is `largest` for auto."""
    if words == AUTO:
        return largest
    if not words.isdecimal():
        raise SetupError(f"--batch must be a number or auto, got {words!r}")
    return int(words)


def check_values(setup: Setup) -> None:
    """Raise OptionError for a number out of range or an empty name."""
    for name, (low, high) in LIMITS.items():
        value = getattr(setup, name)
        if not low <= value <= high:
            raise SetupError(f"--{name.replace('_', '-')} must be from {low} to {high}, got {value}")
    if setup.ranks % (setup.tp * setup.cp):
        ranks = f"{setup.ranks} rank{'s' if setup.ranks > 1 else ''}"
        raise SetupError(
            f"the number of ranks must be a multiple of --tp × --cp, got {setup.tp} × {setup.cp} and "
            f"{ranks}; run it under torchrun --nproc-per-node N -m liger_core train, or plan it with --ranks N"
        )
    if setup.batch * setup.sequence > MOST:
        raise SetupError(f"--batch × --sequence must be at most {MOST} tokens, got {setup.batch} × {setup.sequence}")
    if not 0 < setup.learning_rate < math.inf:
        raise SetupError(f"--learning-rate must be a positive number, got {setup.learning_rate}")
    if not 0 <= setup.validation < 1:
        raise SetupError(f"--validation must be from 0 to below 1, got {setup.validation}")
    if setup.validation and setup.tp * setup.cp > 1:
        raise SetupError(f"--validation needs ranks with sequences of their own, got --tp {setup.tp} --cp {setup.cp}")
    for name in ("adapter_rank", "adapter_alpha", "adapter_targets"):
        if setup.adapter == "none" and getattr(setup, name) != getattr(Setup, name):
            raise SetupError(f"--{name.replace('_', '-')} needs --adapter lora or qlora, got none")
    for name in ("model", "data", "nvme_folder", "adapter_targets"):
        if (word := getattr(setup, name)) is not None and not word.strip():
            option = name.replace("_", "-")
            raise SetupError(f"--{option} must not be empty, as it is when it is a shell variable that is not set")
