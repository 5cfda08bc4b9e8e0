# SPDX-License-Identifier: Apache-2.0
"""`liger train`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
import typer
from rich.console import Console

from liger_bench import machine
from liger_bench.measurements import Files
from liger_bench.printing import amount, size
from liger_bench.progress import progress_bar
from liger_core.errors import DeviceError, LigerError, OptionError
from liger_core.tables import Column, output, print_table
from liger_train import fields, ranks, techniques
from liger_train.options import RunOptions, setup_of, takes_options
from liger_train.row import COLUMNS, Row, where_of
from liger_train.setup import AUTO, DEFAULTS, Setup
from liger_train.train import saved
from liger_train.train.data import check_source
from liger_train.train.places import check, observers
from liger_train.train.sweep import STEPS as SWEEP_STEPS
from liger_train.train.sweep import sweep

# The first batch size that --batch auto tries.
LARGEST_BATCH = 128
# A run with as many tokens per micro-batch says first what it will cost: a step may take minutes.
LONG = 65_536
# The usual exit code after Ctrl-C.
INTERRUPTED = 130


@takes_options()
def train(words: dict[str, Any], options: RunOptions) -> None:
    """Train a Hugging Face causal language model on text; report its losses, throughput and peak memory.

    For several GPUs, run it under torchrun (-m liger_core train …). Exit code 1 if the run fails or runs out of memory,
    130 after Ctrl-C.
    """
    device, search = machine.measurable_device("train", words["device"]), words["batch"] == AUTO
    _check(words, options, device)
    chosen, notes = _defaults(words, options, device)
    setup = setup_of(words, LARGEST_BATCH, **chosen)
    if options.sweeping:
        _print_sentences(notes)
        sweep(setup, options, settle=words["steps"] is None)
        return
    check(setup, options)
    techniques.check(setup)
    files = Files("train", COLUMNS, options.out, options.csv)
    files.check()
    check_source(setup.data)
    if ranks.first():
        if options.output is not None:
            saved.check_output(options.output, options.resume)
        if not search:
            notes.extend(_cost(setup, device))
        _print_sentences(notes)
    try:
        row = _trained(setup, search, options, notes)
    except LigerError:
        if ranks.speaks(failed=True):
            raise
        raise typer.Exit(2) from None
    _end(row, files, options.as_json, notes)


def _end(row: Row, files: Files, as_json: bool, notes: list[str]) -> None:
    """Print and write the row, leave the other ranks, and exit with the code of the row."""
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


def _defaults(words: Mapping[str, Any], options: RunOptions, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Return the defaults for this machine, and a sentence that names those that the user may not expect."""
    names = {"liger": Setup.liger} | DEFAULTS[device.type]
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        names["precision"] = "fp16"
    shown = [f"--device {device.type}"] if words["device"] == AUTO else []
    # A sweep varies the strategy.
    shown += [
        f"--{name} {value}"
        for name, value in names.items()
        if words[name] is None and not (name == "liger" and options.sweeping)
    ]
    on_cpu = "the CPU (PyTorch found no GPU)" if words["device"] == AUTO else "the CPU"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    steps = SWEEP_STEPS if options.sweeping else Setup.steps
    chosen = {**names, "device": device.type, "ranks": ranks.count(), "steps": steps}
    return chosen, [f"Defaults for {where}: {', '.join(shown)}."] if shown else []


def _cost(setup: Setup, device: torch.device) -> list[str]:
    """Return a sentence on the predicted cost of a run with long sequences on one GPU, or nothing for other runs."""
    if device.type == "cpu" or setup.ranks > 1 or setup.batch * setup.sequence < LONG:
        return []
    from liger_train.plan.cost import sentence

    cost = sentence(setup, torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
    return [] if cost is None else [cost]


def _check(words: Mapping[str, Any], options: RunOptions, device: torch.device) -> None:
    """Raise OptionError or DeviceError for options that exclude each other."""
    if options.resume and options.output is None and not options.sweeping:
        raise OptionError("train: --resume needs --output, the folder of the checkpoints to resume from")
    if options.save_every and options.output is None:
        raise OptionError("train: --save-every needs --output, the folder of the checkpoints")
    if words["ranks"] not in (None, ranks.count()) and not options.sweeping:
        raise OptionError(
            f"train: --ranks must be the number of processes, {ranks.count()}, got {words['ranks']}; run it under "
            f"torchrun --nproc-per-node {words['ranks']} -m liger_core train"
        )
    epochs = fields.epochs(fields.joined(words["set"] or []))
    if epochs is not None and (words["steps"] is not None or options.sweeping):
        raise OptionError(f"train: --set {fields.EPOCHS} cannot be combined with --steps or --sweep; give one of them")
    if words["batch"] == AUTO:
        _check_search(options, device)
    if options.sweeping:
        _check_sweep(words["liger"], options)
    elif options.gpus or options.skip_larger:
        raise OptionError("train: --gpus and --skip-larger are for --sweep; without it give CUDA_VISIBLE_DEVICES")


def _check_search(options: RunOptions, device: torch.device) -> None:
    if device.type == "cpu":
        raise DeviceError(
            "train: --batch auto needs a GPU, since host memory has no limit to stay within; give a number"
        )
    if ranks.count() > 1:
        raise OptionError(
            f"train: --batch auto needs one process, got {ranks.count()} ranks, which do not run out of memory at the "
            "same time; search on one GPU and give the number"
        )
    if options.resume:
        raise OptionError("train: --resume needs the --batch of the run to resume, got auto")
    if options.sweeping or options.snapshot or options.profile or options.export is not None:
        raise OptionError(
            "train: --sweep, --snapshot, --profile and --export need a number as --batch, got auto, which trains "
            "several times"
        )


def _check_sweep(liger: str | None, options: RunOptions) -> None:
    if liger is not None:
        raise OptionError(
            f"train: --liger cannot be combined with --sweep; give --strategies {liger.replace(',', '+')}"
        )
    if options.output is not None:
        raise OptionError(
            "train: --output cannot be combined with --sweep, whose runs save no checkpoints; --out takes the rows"
        )
    if options.deterministic:
        raise OptionError(
            "train: --deterministic cannot be combined with --sweep, which compares speed; train once with each value"
        )
    if options.export is not None:
        raise OptionError("train: --export cannot be combined with --sweep; train once with the values to export")


def _trained(setup: Setup, search: bool, options: RunOptions, notes: list[str]) -> Row:
    with contextlib.redirect_stdout(sys.stderr), progress_bar() as bar, contextlib.ExitStack() as stack:
        loading = bar.add_task("loading Transformers", total=None)
        # Here, since other commands need neither it nor DeepSpeed, which prints its device to standard output.
        from liger_train.train.run import largest_batch, run

        bar.remove_task(loading)

        names = ("resume", "save_every", "deterministic", "export")
        run_options: dict[str, Any] = {name: getattr(options, name) for name in names}
        run_options |= {"folder": options.output, "notes": notes, "bar": bar if ranks.first() else None}
        run_options["observers"] = observers(setup, options, stack) if ranks.first() else []
        return largest_batch(setup, lambda trial: run(trial, **run_options)) if search else run(setup, **run_options)


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
    figures: dict[str, str] = {}
    if row.losses:
        figures["steps"] = f"{len(row.losses)} of {row.steps}"
        figures["loss, first and last"] = f"{row.losses[0]:.5f}, {row.losses[-1]:.5f}"
    if row.validation_loss is not None:
        figures["validation loss"] = f"{row.validation_loss:.5f}"
    if row.tokens_per_second:
        spread = f"{row.low_tokens_per_second:,.0f} to {row.high_tokens_per_second:,.0f}"
        figures["tokens per second"] = f"{row.tokens_per_second:,.0f} ({spread})"
    if row.compile_seconds is not None:
        figures["compile time"] = f"{row.compile_seconds:.1f} s"
    if row.peak_bytes is not None:
        figures["peak memory"] = size(row.peak_bytes)
        if row.static_bytes is not None:
            figures["peak memory"] += f", {size(row.static_bytes)} of it between steps"
        if row.peak_reserved_bytes is not None:
            figures["peak memory"] += f"; {size(row.peak_reserved_bytes)} reserved by the allocator"
    if row.parameters and row.trainable_parameters:
        figures["parameters"] = amount(row.parameters)
        if row.trainable_parameters < row.parameters:
            figures["parameters"] += f", {amount(row.trainable_parameters)} of them trained"
    if row.checkpointed_layers:
        figures["layers recomputed"] = str(row.checkpointed_layers)
    if row.replaced:
        figures["replaced by Liger"] = row.replaced
    return figures
