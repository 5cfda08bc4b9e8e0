# SPDX-License-Identifier: Apache-2.0
"""The setup of a training run: model, text, batch, and techniques."""

import math
import shlex
from collections.abc import Mapping
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
# The value of --device for a GPU if there is one, and of options whose value a plan can search, in the order of the
# searches.
AUTO = "auto"
AUTO_OPTIONS = ("ranks", "sequence", "batch")
ZERO = ("zero1", "zero2", "zero3")
MOST = 2**31 - 1
# The dimensions of float8 matmuls must be multiples of this.
FLOAT8_MULTIPLE = 16
COUNTS = ("batch", "accumulation", "ranks", "tp", "cp", "replicate", "steps", "adapter_rank", "adapter_alpha")
# Option → range. Transformers also seeds NumPy, which takes 32 bits.
LIMITS = dict.fromkeys(COUNTS, (1, MOST)) | {"sequence": (2, 2**24), "seed": (0, 2**32 - 1)}
# Tokens in a tile of --mlp tiled: enough to keep a GPU busy, and for summing weight gradients to take little time.
MLP_ROWS = 16_384
# Device → the defaults of `liger train` that differ between devices.
DEFAULTS = {"cuda": {"precision": "bf16", "checkpoint": "full"}, "cpu": {"precision": "fp32", "checkpoint": "none"}}


@dataclass(frozen=True)
class Typed:
    """The type and default of an option on the command line, where they differ from its field's."""

    kind: Any
    default: Any = None


@dataclass(frozen=True)
class Setup:
    """Everything that determines the losses, the speed and the memory of a training run.

    `liger train` and `liger plan` have an option for each field (options.py). In a help text, {values} stands for the
    names in techniques.py. `memory_limit` is in bytes. `set` has words of the form "name=value"; if num_train_epochs is
    among them, `steps` has no effect.
    """

    model: Annotated[str, Option(help=f"{', '.join(PRESETS)} (random weights), a folder, or a name on the Hub.")]
    batch: Annotated[
        int,
        Typed(str, "1"),
        Option(help="Sequences per micro-batch and rank, or group of --tp and --cp; auto: as many as fit."),
    ] = 1
    sequence: Annotated[
        int, Typed(str, "1024"), Option(help="Tokens per sequence; of a plan also auto: as many as fit.")
    ] = 1024
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
            help="Activation checkpointing: {values} of layers. Default: full on a GPU, none on the CPU. For auto, a "
            "plan with a memory limit predicts the end."
        ),
    ] = "full"
    optimizer: Annotated[str, Option(help="{values}.")] = "adamw"
    shard: Annotated[str, Option(help="{values}; across the ranks, or on one GPU with --offload.")] = "none"
    offload: Annotated[str, Option(help="{values}; needs --shard.")] = "none"
    adapter: Annotated[str, Option(help="{values}.")] = "none"
    accumulation: Annotated[int, Option(help="Micro-batches per optimizer step.")] = 1
    ranks: Annotated[
        int,
        Typed(str | None),
        Option(
            help="Number of processes, one per GPU; of a plan also auto: as few as fit. Default: torchrun's, or as "
            "many as --tp × --cp needs."
        ),
    ] = 1
    tp: Annotated[
        int, Option(help="Tensor parallelism: ranks that share each layer, by Transformers' tp_plan='auto'.")
    ] = 1
    cp: Annotated[int, Option(help="Context parallelism: ranks that share each sequence.")] = 1
    replicate: Annotated[
        int, Option(help="Hybrid sharding: copies of the model, each sharded over neighboring ranks by --shard fsdp2.")
    ] = 1
    device: Annotated[
        str, Typed(str, AUTO), Option(help="auto, cpu or cuda. A plan needs no GPU; with auto it is for a GPU.")
    ] = "cuda"
    memory_limit: Annotated[
        int | None,
        Typed(str | None),
        Option(help="GPU memory that the run may use, to simulate a smaller card, for instance 24GiB. Default: all."),
    ] = None
    steps: Annotated[
        int,
        Typed(int | None),
        Option(help="Optimizer steps. Default: 20; in a sweep 6, plus 10 with --checkpoint auto."),
    ] = 20
    learning_rate: Annotated[float, Option(help="Constant learning rate.")] = 1e-5
    seed: Annotated[int, Option(help="Seed of random weights and of the order of sequences.")] = 0
    nvme_folder: Annotated[str | None, Option(help="Folder to which --offload nvme writes.")] = None
    trust_remote_code: Annotated[bool, Option(help="Allow the model's own Python code to run. Read it first.")] = False
    random_weights: Annotated[bool, Option(help="Use only the config of --model, with random weights.")] = False
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
        Option(help="Linear layers that get adapters: all-linear, or names separated by commas, like q_proj,v_proj."),
    ] = ALL_LINEAR
    validation: Annotated[float, Option(help="Share of the text to hold out for validation, for instance 0.02.")] = 0.0
    packing: Annotated[bool, Option(help="Put several rows of --data into one sequence, as TRL packs them.")] = False
    compile: Annotated[str, Option(help="{values}: torch.compile of each layer, and CUDA graphs of a step.")] = "none"
    mlp: Annotated[str, Option(help="{values}.")] = "whole"

    @property
    def implementation(self) -> str:
        """The name in `--sweep implementation=…`; with --compile it ends in "-compiled"."""
        name = {"none": "hf", "liger-kernel": "liger-kernel"}.get(self.liger, "liger")
        return name if self.compile == "none" else f"{name}-compiled"

    @property
    def mixed(self) -> bool:
        """Whether weights are in float32, and matmuls in a lower precision."""
        return self.precision != "fp32" and not self.pure

    @property
    def pure(self) -> bool:
        """Whether weights and optimizer are in bfloat16, too."""
        return self.precision.endswith("-pure")

    @property
    def replicas(self) -> int:
        """The number of data-parallel replicas: ranks, or groups of ranks, that train on different sequences."""
        return self.ranks // (self.tp * self.cp)

    @property
    def sequences_per_step(self) -> int:
        """The number of sequences in an optimizer step, over all micro-batches and ranks."""
        return self.batch * self.accumulation * self.replicas

    @property
    def sharing_ranks(self) -> int:
        """The number of ranks over which --shard shards a copy: its data- and context-parallel ranks."""
        return self.ranks // (self.tp * self.replicate)

    @property
    def saves_shards(self) -> bool:
        """Whether each rank saves its shards, since none holds the whole model: with FSDP2 and tensor parallelism."""
        return self.shard == "fsdp2" or self.tp > 1

    def command(self) -> str:
        """Return the command line of this run, with every option that is not the default on its device."""
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
            words += [option]
            if value is not True:
                words += [_size(value) if field.name == "memory_limit" else str(value)]
        return shlex.join(words)


def _size(size: int) -> str:
    """Return a number of bytes as a value of --memory-limit."""
    return next(
        (f"{size >> bits}{unit}" for bits, unit in ((30, "GiB"), (20, "MiB")) if size % (1 << bits) == 0), f"{size}B"
    )


def number_of(option: str, words: str, auto: Mapping[str, int]) -> int:
    """Return the number of a value of an option in AUTO_OPTIONS; `auto` has the numbers of auto, where it is allowed.

    Raises OptionError for a value that is neither.
    """
    if words == AUTO and option not in auto:
        raise SetupError(f"--{option} must be a number, got auto; `liger plan --{option} auto` finds one that fits")
    if words != AUTO and not words.isdecimal():
        raise SetupError(f"--{option} must be a number{' or auto' if option in auto else ''}, got {words!r}")
    return auto[option] if words == AUTO else int(words)


def check_values(setup: Setup) -> None:
    """Raise OptionError for a number out of range, an empty name, or an option that needs another one."""
    for name, (low, high) in LIMITS.items():
        value = getattr(setup, name)
        if not low <= value <= high:
            raise SetupError(f"--{name.replace('_', '-')} must be from {low} to {high}, got {value}")
    sizes = {name: getattr(setup, name) for name in ("tp", "cp", "replicate")}
    if setup.ranks % math.prod(sizes.values()):
        ranks = f"{setup.ranks} rank{'s' if setup.ranks > 1 else ''}"
        raise SetupError(
            f"the number of ranks must be a multiple of --{' × --'.join(sizes)}, got "
            f"{' × '.join(map(str, sizes.values()))} and {ranks}; give --ranks N"
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
            raise SetupError(f"--{option} must not be empty, got {word!r}; check that its shell variable is set")
