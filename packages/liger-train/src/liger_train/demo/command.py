# SPDX-License-Identifier: Apache-2.0
"""`liger demo`."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from liger_bench import machine
from liger_bench.progress import progress_bar
from liger_bench.writable import check_folder
from liger_core.errors import DtypeError
from liger_core.selection import use
from liger_core.tables import Cell, Column, output, print_table
from liger_hf.presets import LARGE, NAMES, checked_preset
from liger_train.row import WARM_UP
from liger_train.setup import Setup


def demo(
    steps: Annotated[int, typer.Option(min=WARM_UP + 1, help=f"Training steps, all but {WARM_UP} of them timed.")] = 20,
    model: Annotated[
        str, typer.Option(help=f"{NAMES}; random weights. All but tiny and small (11 M parameters) are for a GPU.")
    ] = "small",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str | None, typer.Option(help='Backend, as in LIGER_BACKEND: "triton,rope=reference".')] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per step.")] = None,
    sequence: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (the CPU's default) or bfloat16 (a GPU's).")] = None,
    out: Annotated[Path, typer.Option(help="Folder for result.json, loss.png and memory.png.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Train a small Llama on Python's own sources, with and without Liger, and compare; exit code 1 if the losses
    differ too much."""
    torch_device = machine.measurable_device("demo", device)
    precision = machine.named_dtype("demo", dtype, torch_device)
    if machine.dtype_name(precision) == "float16":
        raise DtypeError(
            "demo: --dtype must be float32 or bfloat16, got 'float16', which cannot train weights without loss scaling"
        )
    large, on_cpu = checked_preset("demo", model) in LARGE, torch_device.type == "cpu"
    setup = Setup(
        checked_preset("demo", model),
        # Few tokens on the CPU, but enough for their logits to dominate the memory.
        batch=batch or (4 if on_cpu else 8),
        sequence=sequence or (384 if on_cpu else 1024),
        precision="fp32" if machine.dtype_name(precision) == "float32" else "bf16-pure",
        checkpoint="full" if large else "none",
        device=torch_device.type,
        steps=steps,
        learning_rate=1e-4 if large else 1e-3,
    )
    check_folder("demo: --out", out)
    with (
        use(backend) if backend else contextlib.nullcontext(),
        contextlib.redirect_stdout(sys.stderr),
        progress_bar() as bar,
    ):
        loading = bar.add_task("loading Transformers", total=None)
        # Imported here, because other commands need neither Transformers nor matplotlib.
        from liger_train.demo import pictures
        from liger_train.demo.run import compare

        bar.remove_task(loading)
        result = compare(setup, bar)
    if "reason" in result:
        Console(stderr=True).print(result["reason"], markup=False, highlight=False)
        raise typer.Exit(1)
    # JSON has no infinity and no NaN; these become null.
    finite = json.loads(json.dumps(result), parse_constant=lambda _: None)
    (out / "result.json").write_text(json.dumps(finite, indent=2) + "\n")
    pictures.draw(result, out)
    if as_json:
        print(json.dumps(finite))
    else:
        _print(result, out)
    if not result["passed"]:
        raise typer.Exit(1)


def _print(result: dict[str, Any], out: Path) -> None:
    console = output()
    tokens = f"{result['batch']} × {result['sequence']} tokens per step"
    title = (
        f"{result['steps']} steps of {tokens}, {result['parameters'] / 1e6:,.1f} M parameters, "
        f"{result['dtype']} on {result['device']}"
    )
    unclear = "" if result.get("speed_is_clear", True) else " (unclear)"
    rows: list[list[Cell]] = []
    for label, name, form, scale, suffix in (
        ("final loss", "loss_{}", "{:.5f}", 1, None),
        ("tokens per second", "tokens_per_second_{}", "{:,.0f}", 1, unclear),
        ("peak memory of LM head and loss", "peak_loss_memory_{}_bytes", "{:,.0f} MiB", 2**20, ""),
        ("peak memory of a step", "peak_memory_{}_bytes", "{:,.0f} MiB", 2**20, ""),
    ):
        plain, liger = (result[name.format(key)] / scale for key in ("hf", "liger"))
        ratio = "" if suffix is None else f"{liger / plain:.2f}{suffix}"
        rows.append([label, form.format(plain), form.format(liger), ratio])
    bound = f"allowed {result['loss_difference_bound']:.1e}"
    if result["loss_noise"] is not None:
        bound += f", Transformers with reordered sums {result['loss_noise']:.1e}"
    difference = Text(f"{result['max_loss_difference']:.1e}")
    if not result["passed"]:
        difference.append(" too large", "red")
    rows.append(["largest loss difference", "", difference, bound])
    numbers = [Column(name, number=True) for name in ("Transformers", f"with Liger ({result['backend']})")]
    print_table(console, [Column(""), *numbers, Column("Liger ÷ Transformers", prose=True)], rows, title=title)
    if unclear:
        console.print("The step times varied, because other processes used the machine; the speeds say little.")
    if result["device"] == "cpu":
        console.print("On a CPU Liger saves memory, not time; the kernels that save both are for GPUs.")
    console.print(f"Pictures and figures: {out}/loss.png, {out}/memory.png, {out}/result.json")
