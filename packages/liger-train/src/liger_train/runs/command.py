# SPDX-License-Identifier: Apache-2.0
"""`liger train`."""

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
from liger_core.errors import DeviceError, LigerError
from liger_core.tables import Column, output, print_table
from liger_train import fields, ranks, techniques
from liger_train.errors import SetupError
from liger_train.options import RunOptions, setup_of, takes_options
from liger_train.row import COLUMNS, Row, where_of
from liger_train.runs import saved_checkpoints
from liger_train.runs.data import check_source
from liger_train.runs.launch import check, observers, start_ranks
from liger_train.runs.sweep import STEPS as SWEEP_STEPS
from liger_train.runs.sweep import sweep
from liger_train.setup import AUTO, DEFAULTS, Setup

# The batch size that --batch auto tries first.
LARGEST_BATCH = 128
# From this many tokens per micro-batch on, a run first prints its predicted cost, because a step may take minutes.
LONG = 65_536
# The usual exit code after Ctrl-C.
INTERRUPTED = 130


@takes_options()
def train(values: dict[str, Any], options: RunOptions) -> None:
    """Train a Hugging Face causal language model on text; report its losses, throughput and peak memory.

    For several GPUs, give --ranks, or run it under torchrun (-m liger_core train …). Exit code 1 if the run fails or
    runs out of memory, 130 after Ctrl-C.
    """
    try:
        _train_or_sweep(values, options)
    except LigerError as error:
        # Under torchrun, one rank reports an error for all.
        if ranks.reports(failed=True, error=str(error)):
            raise
        raise typer.Exit(2) from None


def _train_or_sweep(values: dict[str, Any], options: RunOptions) -> None:
    device, search = machine.measurable_device("train", values["device"]), values["batch"] == AUTO
    _check(values, options, device)
    chosen, notes = _defaults(values, options, device)
    setup = setup_of(values, {"batch": LARGEST_BATCH}, **chosen)
    if options.sweeping:
        _print_sentences(notes)
        sweep(setup, options, settle=values["steps"] is None)
        return
    check(setup, options)
    techniques.check(setup)
    files = Files("train", COLUMNS, options.out, options.csv)
    files.check()
    check_source(setup.data)
    if setup.ranks > 1 and not ranks.started():
        raise typer.Exit(start_ranks(setup.ranks))
    if ranks.first():
        if options.output is not None:
            with saved_checkpoints.locked(options.output):
                saved_checkpoints.check_new(options.output, options.resume)
        if not search:
            notes.extend(_cost(setup, device))
        _print_sentences(notes)
    _end(_train(setup, search, options, notes), files, options.as_json, notes)


def _end(row: Row, files: Files, as_json: bool, notes: list[str]) -> None:
    """Print and write the row, leave the process group, and exit with the code of the row."""
    ended_badly = row.failed or row.out_of_memory
    if ranks.reports(failed=ended_badly):
        # Write even if printing fails: the disk behind either may be full.
        try:
            print(json.dumps({"rows": [row.columns()]}), flush=True) if as_json else _print(row, printed=notes)
        finally:
            files.append([row.columns()])
    code = ranks.FAILED if ended_badly else INTERRUPTED if row.interrupted else 0
    ranks.leave(code)
    if code:
        raise typer.Exit(code)


def _defaults(values: Mapping[str, Any], options: RunOptions, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Return the defaults for this machine, and a sentence on those that users may not expect."""
    defaults = {"liger": Setup.liger} | DEFAULTS[device.type]
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        defaults["precision"] = "fp16"
    shown = [f"--device {device.type}"] if values["device"] == AUTO else []
    # A sweep varies --liger.
    shown += [
        f"--{name} {value}"
        for name, value in defaults.items()
        if values[name] is None and not (name == "liger" and options.sweeping)
    ]
    on_cpu = "the CPU (PyTorch found no GPU)" if values["device"] == AUTO else "the CPU"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    steps = SWEEP_STEPS if options.sweeping else Setup.steps
    chosen = {**defaults, "device": device.type, "ranks": ranks.count(), "steps": steps}
    return chosen, [f"Defaults for {where}: {', '.join(shown)}."] if shown else []


def _cost(setup: Setup, device: torch.device) -> list[str]:
    """Return a sentence on the predicted cost of a long run on one GPU; nothing for other runs."""
    if device.type == "cpu" or setup.ranks > 1 or setup.batch * setup.sequence < LONG:
        return []
    from liger_train.plan.cost import sentence

    cost = sentence(setup, torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
    return [] if cost is None else [cost]


def _check(values: Mapping[str, Any], options: RunOptions, device: torch.device) -> None:
    if options.resume and options.output is None and not options.sweeping:
        raise SetupError("--resume needs --output, the folder of the checkpoints to resume from")
    if options.save_every and options.output is None:
        raise SetupError("--save-every needs --output, the folder of the checkpoints")
    if ranks.started() and values["ranks"] not in (None, AUTO, str(ranks.count())) and not options.sweeping:
        raise SetupError(
            f"--ranks must be the number of processes, {ranks.count()}, got {values['ranks']}; run it under "
            f"torchrun --nproc-per-node {values['ranks']} -m liger_core train"
        )
    epochs = fields.epochs(fields.joined(values["set"] or []))
    if epochs is not None and (values["steps"] is not None or options.sweeping):
        raise SetupError(f"--set {fields.EPOCHS} cannot be combined with --steps or --sweep; give one of them")
    if values["batch"] == AUTO:
        _check_search(options, device)
    if options.sweeping:
        _check_sweep(values["liger"], options)
    elif options.gpus or options.skip_larger:
        raise SetupError("--gpus and --skip-larger are for --sweep; without it give CUDA_VISIBLE_DEVICES")


def _check_search(options: RunOptions, device: torch.device) -> None:
    if device.type == "cpu":
        raise DeviceError("train: --batch auto needs a GPU, since host memory has no limit; give a number")
    if ranks.count() > 1:
        raise SetupError(
            f"--batch auto needs one process, got {ranks.count()} ranks, which do not run out of memory at the "
            "same time; search on one GPU and give the number"
        )
    if options.resume:
        raise SetupError("--resume needs the --batch of the run to resume, got auto")
    if options.sweeping or options.snapshot or options.profile or options.export is not None:
        raise SetupError(
            "--sweep, --snapshot, --profile and --export need a number as --batch, got auto, which trains several times"
        )


def _check_sweep(liger: str | None, options: RunOptions) -> None:
    if liger is not None:
        raise SetupError(f"--liger cannot be combined with --sweep; give --strategies {liger.replace(',', '+')}")
    if options.output is not None:
        raise SetupError("--output cannot be combined with --sweep, whose runs save nothing; --out takes the rows")
    if options.deterministic:
        raise SetupError("--deterministic cannot be combined with --sweep, which compares speed; train with each value")
    if options.export is not None:
        raise SetupError("--export cannot be combined with --sweep; train once with the values to export")


def _train(setup: Setup, search: bool, options: RunOptions, notes: list[str]) -> Row:
    with contextlib.redirect_stdout(sys.stderr), progress_bar() as bar, contextlib.ExitStack() as stack:
        loading = bar.add_task("loading Transformers", total=None)
        # Imported with standard output redirected, to which DeepSpeed prints its device.
        from liger_train.runs.run import largest_batch, run

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
    print_table(console, [Column(""), Column("", prose=True)], list(map(list, _figures(row).items())), title=title)
    if row.reason:
        console.print(row.reason, markup=False)
    for note in (note for note in row.notes or [] if note not in printed):
        console.print(note, markup=False)
    console.print(where_of(row), markup=False)


def _figures(row: Row) -> dict[str, str]:
    """Return label → figure for the known results."""
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
        for bits, count in ((4, row.parameters_in_4_bits), (16, row.parameters_in_16_bits)):
            figures["parameters"] += f", {amount(count)} in {bits} bits" if count else ""
    if row.checkpointed_layers:
        figures["layers recomputed"] = str(row.checkpointed_layers)
    if row.replaced:
        figures["replaced by Liger"] = row.replaced
    return figures
