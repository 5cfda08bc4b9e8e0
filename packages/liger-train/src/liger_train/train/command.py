# SPDX-License-Identifier: Apache-2.0
"""`liger train`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from liger_bench import machine
from liger_bench.measurements import Files
from liger_bench.memory import bytes_of
from liger_bench.printing import amount, size
from liger_bench.progress import progress_bar
from liger_core.errors import DeviceError, LigerError, OptionError
from liger_core.tables import Column, output, print_table
from liger_hf.presets import PRESETS, preset_name
from liger_train import fields, techniques
from liger_train.row import COLUMNS, Row, where_of
from liger_train.setup import AUTO, DEFAULTS, LIBRARY, Setup, batch_of
from liger_train.techniques import values_of
from liger_train.train import ranks, saved
from liger_train.train.data import check_source
from liger_train.train.places import Extras, check, observers
from liger_train.train.sweep import STEPS as SWEEP_STEPS
from liger_train.train.sweep import sweep

# The first batch size that --batch auto tries.
LARGEST_BATCH = 128
# A run with as many tokens per micro-batch says first what it will cost: a step may take minutes.
LONG = 65_536
# The usual exit code after Ctrl-C.
INTERRUPTED = 130


def train(
    model: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(PRESETS)} (random weights), a folder, or a name on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Text to train on: a file, a folder, or library, the sources of Python's standard library. "
            "Rows of conversations, of prompts and "
            "completions, or of texts: a .json, .jsonl, .parquet or .csv file, or a dataset saved by datasets."
        ),
    ] = LIBRARY,
    validation: Annotated[
        float, typer.Option(help="Share of the text to hold out for a validation loss, for instance 0.02.")
    ] = 0.0,
    packing: Annotated[
        bool, typer.Option("--packing", help="Put several rows of --data into one sequence, as TRL packs them.")
    ] = False,
    batch: Annotated[
        str, typer.Option(help="Sequences per micro-batch and rank, or group of --tp and --cp; auto: as many as fit.")
    ] = "1",
    sequence: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps. Default: 20; in a sweep 6, plus 10 with --checkpoint auto.", show_default=False
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Constant learning rate.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Seed of random weights and of the order of sequences.")] = 0,
    liger: Annotated[
        str | None, typer.Option(help=f"{values_of('liger')}, or ops separated by commas. Default: all.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"{values_of('precision')}. Default: bf16 on a GPU, fp32 on the CPU.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help=(
                f"Activation checkpointing: {values_of('checkpoint')} of layers. Default: full on a GPU, none on the "
                "CPU."
            )
        ),
    ] = None,
    compile: Annotated[
        str, typer.Option(help=f"{values_of('compile')}: torch.compile for each layer, and CUDA graphs of a step.")
    ] = "none",
    mlp: Annotated[str, typer.Option(help=f"{values_of('mlp')}.")] = Setup.mlp,
    optimizer: Annotated[str, typer.Option(help=f"{values_of('optimizer')}.")] = "adamw",
    shard: Annotated[
        str, typer.Option(help=f"{values_of('shard')}; across the ranks of torchrun, or with --offload.")
    ] = "none",
    tp: Annotated[
        int, typer.Option(help="Tensor parallelism: ranks that share each layer, by Transformers' tp_plan='auto'.")
    ] = 1,
    cp: Annotated[int, typer.Option(help="Context parallelism: ranks that share each sequence.")] = 1,
    offload: Annotated[str, typer.Option(help=f"{values_of('offload')}; needs --shard.")] = "none",
    nvme_folder: Annotated[str | None, typer.Option(help="Where --offload nvme writes.")] = None,
    adapter: Annotated[str, typer.Option(help=f"{values_of('adapter')}.")] = "none",
    adapter_rank: Annotated[int, typer.Option(help="Rank of adapters.")] = Setup.adapter_rank,
    adapter_alpha: Annotated[int, typer.Option(help="Adapters are scaled by alpha / rank.")] = Setup.adapter_alpha,
    adapter_targets: Annotated[
        str,
        typer.Option(
            help="Linear layers that get adapters: all-linear, or names separated by commas, "
            "for instance q_proj,v_proj."
        ),
    ] = Setup.adapter_targets,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="Use only the config of a folder or name, with random weights by --seed."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = AUTO,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow the model's own Python code to run. Read it first.")
    ] = False,
    memory_limit: Annotated[
        str | None, typer.Option(help="Cap GPU memory, to simulate a smaller card, for instance 24GiB.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for saved checkpoints; the last one is the trained model.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Empty folder for the trained model, with adapters merged.")
    ] = None,
    save_every: Annotated[
        int, typer.Option(min=0, help="Steps between saved checkpoints; 0: only one at the end.")
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the latest intact checkpoint in --output; a sweep: skip the runs in --out."
        ),
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Use deterministic algorithms: two runs have bit-identical losses. Slower on a GPU."
        ),
    ] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a field of transformers.TrainingArguments, for instance weight_decay=0.1; repeatable.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder with train.csv and train.json, to which the row is appended.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="CSV file to which the row is appended.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="OPTION=VALUE,…", help="Train with each value, for instance batch=1,4,8; repeatable."
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Values of --liger to sweep, with ops joined by +. Default with --sweep: none,all-but-loss,all.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs for a sweep, with one run at a time on each, for instance 0,1.")
    ] = None,
    skip_larger: Annotated[
        bool, typer.Option("--skip-larger", help="In a sweep, skip runs larger than one that ran out of memory.")
    ] = False,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot", help="Record memory by category over the first steps, as data and a picture in --out."
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace a few steps for TensorBoard and Perfetto, in --out.")
    ] = False,
) -> None:
    """Train a Hugging Face causal language model on text; report its losses, throughput and peak memory.

    For several GPUs, run it under torchrun (-m liger_core train …). Exit code 1 if the run fails or runs out of memory,
    130 after Ctrl-C.
    """
    place = machine.measurable_device("train", device)
    sweeping = bool(sweeps) or strategies is not None
    if resume and output is None and not sweeping:
        raise OptionError("train: --resume needs --output, the folder of the checkpoints to resume from")
    if save_every and output is None:
        raise OptionError("train: --save-every needs --output, the folder of the checkpoints")
    given = {"liger": Setup.liger if sweeping else liger, "precision": precision, "checkpoint": checkpoint}
    chosen, notes = _defaults(given, device, place)
    setup = Setup(
        model=preset_name(model),
        batch=batch_of(batch, LARGEST_BATCH),
        sequence=sequence,
        data=data,
        validation=validation,
        packing=packing,
        **chosen,
        compile=compile,
        mlp=mlp,
        optimizer=optimizer,
        shard=shard,
        offload=offload,
        adapter=adapter,
        adapter_rank=adapter_rank,
        adapter_alpha=adapter_alpha,
        adapter_targets=adapter_targets,
        accumulation=accumulation,
        ranks=ranks.count(),
        tp=tp,
        cp=cp,
        device=place.type,
        memory_limit=None if memory_limit is None else bytes_of("train: --memory-limit", memory_limit),
        steps=(SWEEP_STEPS if sweeping else Setup.steps) if steps is None else steps,
        learning_rate=learning_rate,
        seed=seed,
        nvme_folder=nvme_folder,
        trust_remote_code=trust_remote_code,
        random_weights=random_weights,
        set=fields.joined(sets or []),
    )
    if fields.EPOCHS in fields.given(setup.set) and (steps is not None or sweeping):
        raise OptionError(f"train: --set {fields.EPOCHS} cannot be combined with --steps or --sweep; give one of them")
    if batch == AUTO:
        _check_search(setup, resume)
        if sweeping or snapshot or profile:
            raise OptionError(
                "train: --sweep, --snapshot and --profile need a number as --batch, got auto, which trains several "
                "times"
            )
        if export is not None:
            raise OptionError("train: --export needs a number as --batch, got auto, which trains several times")
    extras = Extras(out, snapshot, profile)
    if sweeping:
        _check_sweep(liger, output, deterministic)
        if export is not None:
            raise OptionError("train: --export cannot be combined with --sweep; train once with the values to export")
        _print_sentences(notes)
        results: dict[str, Any] = {"extras": extras, "csv": csv, "resume": resume, "as_json": as_json}
        sweep(setup, sweeps or [], strategies, gpus=gpus, skip=skip_larger, settle=steps is None, **results)
        return
    if gpus or skip_larger:
        raise OptionError("train: --gpus and --skip-larger are for --sweep; without it give CUDA_VISIBLE_DEVICES")
    check(setup, extras)
    techniques.check(setup)
    files = Files("train", COLUMNS, out, csv)
    files.check()
    check_source(setup.data)
    if ranks.first():
        if output is not None:
            saved.check_output(output, resume)
        if batch != AUTO:
            notes.extend(_cost(setup, place))
        _print_sentences(notes)
    options = {
        "folder": output,
        "resume": resume,
        "save_every": save_every,
        "deterministic": deterministic,
        "notes": notes,
        "export": export,
    }
    try:
        row = _trained(setup, batch == AUTO, options, extras)
    except LigerError:
        if ranks.speaks(failed=True):
            raise
        raise typer.Exit(2) from None
    ended_badly = row.failed or row.out_of_memory
    if ranks.speaks(failed=ended_badly):
        # Print first, and write even if that fails: either disk may be full.
        try:
            print(json.dumps({"rows": [row.columns()]}), flush=True) if as_json else _print(row, printed=notes)
        finally:
            files.append([row.columns()])
    code = ranks.FAILED if ended_badly else INTERRUPTED if row.interrupted else 0
    ranks.leave(code)
    if code:
        raise typer.Exit(code)


def _defaults(given: dict[str, str | None], device: str, found: torch.device) -> tuple[dict[str, str], list[str]]:
    """All options with their defaults for this machine, and a sentence that names the defaults."""
    chosen = (
        {"liger": Setup.liger}
        | DEFAULTS[found.type]
        | {name: value for name, value in given.items() if value is not None}
    )
    if (
        found.type == "cuda"
        and given["precision"] is None
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        chosen["precision"] = "fp16"
    options = [f"--device {found.type}"] if device == AUTO else []
    options += [f"--{name} {chosen[name]}" for name, value in given.items() if value is None]
    on_cpu = "the CPU (PyTorch found no GPU)" if device == AUTO else "the CPU"
    where = torch.cuda.get_device_name(found) if found.type == "cuda" else on_cpu
    return chosen, [f"Defaults for {where}: {', '.join(options)}."] if options else []


def _cost(setup: Setup, place: torch.device) -> list[str]:
    """Return a sentence on the predicted cost of a run with long sequences on one GPU, or nothing for other runs."""
    if place.type == "cpu" or setup.ranks > 1 or setup.batch * setup.sequence < LONG:
        return []
    from liger_train.plan.cost import sentence

    found = sentence(setup, torch.cuda.get_device_name(place), torch.cuda.get_device_properties(place).total_memory)
    return [] if found is None else [found]


def _check_search(setup: Setup, resume: bool) -> None:
    if setup.device == "cpu":
        raise DeviceError(
            "train: --batch auto needs a GPU, since host memory has no limit to stay within; give a number"
        )
    if setup.ranks > 1:
        raise OptionError(
            f"train: --batch auto needs one process, got {setup.ranks} ranks, which do not run out of memory at the "
            "same time; "
            "search on one GPU and give the number"
        )
    if resume:
        raise OptionError("train: --resume needs the --batch of the run to resume, got auto")


def _check_sweep(liger: str | None, output: Path | None, deterministic: bool) -> None:
    if liger is not None:
        raise OptionError(
            f"train: --liger cannot be combined with --sweep; give --strategies {liger.replace(',', '+')}"
        )
    if output is not None:
        raise OptionError(
            "train: --output cannot be combined with --sweep, whose runs save no checkpoints; --out takes the rows"
        )
    if deterministic:
        raise OptionError(
            "train: --deterministic cannot be combined with --sweep, which compares speed; train once with each value"
        )


def _trained(setup: Setup, search: bool, options: dict[str, Any], extras: Extras) -> Row:
    with contextlib.redirect_stdout(sys.stderr), progress_bar() as bar, contextlib.ExitStack() as stack:
        loading = bar.add_task("loading Transformers", total=None)
        # Here, since other commands need neither it nor DeepSpeed, which prints its device to standard output.
        from liger_train.train.run import largest_batch, run

        bar.remove_task(loading)

        options["bar"] = bar if ranks.first() else None
        options["observers"] = observers(setup, extras, stack) if ranks.first() else []
        return largest_batch(setup, lambda one: run(one, **options)) if search else run(setup, **options)


def _print_sentences(sentences: list[str]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for sentence in sentences:
        console.print(sentence, markup=False)


def _print(row: Row, printed: list[str]) -> None:
    console = output()
    tokens = f"{row.batch} × {row.sequence} tokens" + (f" × {row.accumulation}" if row.accumulation > 1 else "")
    where = f"{row.ranks} × {row.device}" if row.ranks > 1 else row.device
    where += "".join(f", {name} {size}" for name, size in (("tp", row.tp), ("cp", row.cp)) if size and size > 1)
    title = f"{row.model}, {tokens} per step, {row.precision}, Liger {row.liger}, on {where}"
    print_table(
        console, [Column(""), Column("", prose=True)], [list(line) for line in _figures(row).items()], title=title
    )
    if row.reason:
        console.print(row.reason, markup=False)
    for note in (note for note in row.notes or [] if note not in printed):
        console.print(note, markup=False)
    console.print(where_of(row), markup=False)


def _figures(row: Row) -> dict[str, str]:
    """The known results, in words."""
    found: dict[str, str] = {}
    if row.losses:
        found["steps"] = f"{len(row.losses)} of {row.steps}"
        found["loss, first and last"] = f"{row.losses[0]:.5f}, {row.losses[-1]:.5f}"
    if row.validation_loss is not None:
        found["validation loss"] = f"{row.validation_loss:.5f}"
    if row.tokens_per_second:
        found["tokens per second"] = (
            f"{row.tokens_per_second:,.0f} ({row.low_tokens_per_second:,.0f} to {row.high_tokens_per_second:,.0f})"
        )
    if row.compile_seconds is not None:
        found["compile time"] = f"{row.compile_seconds:.1f} s"
    if row.peak_bytes is not None:
        held = "" if row.static_bytes is None else f", {size(row.static_bytes)} of it between steps"
        kept = "" if row.peak_reserved_bytes is None else f"; {size(row.peak_reserved_bytes)} reserved by the allocator"
        found["peak memory"] = size(row.peak_bytes) + held + kept
    if row.parameters and row.trainable_parameters:
        trained = (
            f", {amount(row.trainable_parameters)} of them trained" if row.trainable_parameters < row.parameters else ""
        )
        found["parameters"] = amount(row.parameters) + trained
    if row.checkpointed_layers:
        found["layers recomputed"] = str(row.checkpointed_layers)
    if row.replaced:
        found["replaced by Liger"] = row.replaced
    return found
