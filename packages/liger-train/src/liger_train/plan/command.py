# SPDX-License-Identifier: Apache-2.0
"""`liger plan`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import torch
import typer

from liger_bench.memory import bytes_of
from liger_bench.progress import progress_bar
from liger_bench.writable import check_folder
from liger_core.errors import OptionError
from liger_hf.presets import PRESETS, preset_name
from liger_train.setup import AUTO, DEFAULTS, Setup, batch_of, check_values
from liger_train.techniques import chosen, values_of


def plan(
    model: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(PRESETS)}, a folder with a config.json, or a name on the Hugging Face Hub."),
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Sequences per micro-batch and rank, or group of --tp and --cp; auto: as many as fit.")
    ] = "1",
    sequence: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 1024,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches per optimizer step.")] = 1,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs. Default: tp × cp.", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism: GPUs that share each layer.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context parallelism: GPUs that share each sequence.")] = 1,
    liger: Annotated[str, typer.Option(help=f"{values_of('liger')}, or ops separated by commas.")] = "all",
    precision: Annotated[
        str | None, typer.Option(help=f"{values_of('precision')}. Default: as for `liger train`.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help=f"Activation checkpointing: {values_of('checkpoint')} of layers. Default: as for `liger train`."
        ),
    ] = None,
    compile: Annotated[
        str, typer.Option(help=f"{values_of('compile')}. The memory is that of the eager model.")
    ] = "none",
    mlp: Annotated[str, typer.Option(help=f"{values_of('mlp')}.")] = Setup.mlp,
    optimizer: Annotated[str, typer.Option(help=f"{values_of('optimizer')}.")] = "adamw",
    shard: Annotated[str, typer.Option(help=f"{values_of('shard')}.")] = "none",
    offload: Annotated[str, typer.Option(help=f"{values_of('offload')}.")] = "none",
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
    device: Annotated[str, typer.Option(help="cuda or cpu; no GPU is needed.")] = "cuda",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow the model's own Python code to run. Read it first.")
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Memory that the run must fit in, for instance 24GiB. "
            "Default: that of the GPU in this machine, if any."
        ),
    ] = None,
    techniques: Annotated[bool, typer.Option(help="Also predict what each other technique would save.")] = True,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            help=(
                "Compare predictions with the rows of a train.json (or its folder) or of a model.json of `liger bench "
                "model`; repeatable."
            )
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for plan.json and plan.png, or plan-accuracy.md with --compare.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Predict the peak memory of a training run before anything is allocated, and find a setup that fits.

    A model of fake tensors takes one step; the options are those of `liger train`. Exit code 1 if the setup does not
    fit, even if one that does was found, or if --compare finds a prediction that is more than 10 % off or wrong about
    whether a run fits.
    """
    if (model is None) == (not compare):
        raise OptionError("plan: give either --model or --compare")
    if device not in ("cuda", "cpu"):
        raise OptionError(f"plan: --device must be cuda or cpu, got {device!r}")
    if compare:
        _compare(compare, out, as_json, trust_remote_code)
        return
    limit = _limit(memory_limit, device)
    if batch == AUTO and limit is None:
        none = "--device cpu has none" if device == "cpu" else "this machine has no GPU"
        raise OptionError(
            f"plan: --batch auto needs a limit to stay within, and {none}; give, for instance, --memory-limit 24GiB"
        )
    setup = Setup(
        model=preset_name(model or ""),
        batch=batch_of(batch, 1, "plan"),
        sequence=sequence,
        liger=liger,
        precision=precision or DEFAULTS[device]["precision"],
        checkpoint=checkpoint or DEFAULTS[device]["checkpoint"],
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
        ranks=ranks or tp * cp,
        tp=tp,
        cp=cp,
        device=device,
        # As an option of `liger train`: a limit simulates a smaller GPU, and a whole GPU needs none.
        memory_limit=limit if memory_limit is not None and device == "cuda" else None,
        trust_remote_code=trust_remote_code,
    )
    check_values(setup, "plan")
    chosen(setup)
    if out is not None:
        check_folder("plan: --out", out)
    _plan(setup, limit, batch == AUTO, techniques, out, as_json)


def _plan(setup: Setup, limit: int | None, fill: bool, techniques: bool, out: Path | None, as_json: bool) -> None:
    with progress_bar() as bar:
        task = bar.add_task("loading Transformers", total=None)
        from liger_train.plan.advice import problem_of
        from liger_train.plan.chart import picture
        from liger_train.plan.planning import planned
        from liger_train.plan.tables import print_plan

        problem = problem_of(setup)
        if problem:
            raise OptionError(f"plan: {problem}")
        found = planned(setup, limit, techniques, fill, lambda doing: bar.update(task, description=doing))
    if out is not None:
        (out / "plan.json").write_text(json.dumps(found.columns(), indent=1) + "\n")
        setup = found.prediction.setup
        picture(found.bars, limit, out / "plan.png", f"{setup.model}, {setup.batch} × {setup.sequence} tokens")
    print(json.dumps(found.columns())) if as_json else print_plan(found)
    if limit is not None and not found.prediction.fits(limit):
        raise typer.Exit(1)


def _limit(given: str | None, device: str) -> int | None:
    if given is not None:
        return bytes_of("plan: --memory-limit", given)
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return None


def _compare(results: list[Path], out: Path | None, as_json: bool, trust_remote_code: bool) -> None:
    from liger_train.plan.comparison import compared, rows_in
    from liger_train.plan.tables import compared_page, print_compared, worst

    rows = [row for path in results for row in rows_in(path)]
    if out is not None:
        check_folder("plan: --out", out)
    with progress_bar() as bar:
        task = bar.add_task("predicting", total=len(rows))
        found = []
        for one in compared(rows, trust_remote_code=trust_remote_code):
            found.append(one)
            bar.advance(task)
    if out is not None:
        command = shlex.join(
            ["liger", "plan", *(word for path in results for word in ("--compare", str(path))), "--out", str(out)]
        )
        (out / "plan-accuracy.md").write_text(compared_page(found, command))
    if as_json:
        print(
            json.dumps(
                {
                    "rows": [one.columns() for one in found],
                    "worst": worst(found),
                    "right": sum(one.right for one in found),
                }
            )
        )
    else:
        print_compared(found)
    if not all(one.good for one in found):
        raise typer.Exit(1)
