# SPDX-License-Identifier: Apache-2.0
"""The options of `liger train` and `liger plan`: one for each field of Setup and of RunOptions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

from liger_bench.memory import bytes_of
from liger_hf.presets import preset_name
from liger_train import fields as training_fields
from liger_train.errors import SetupError
from liger_train.setup import DEFAULTS, Setup, Typed, batch_of
from liger_train.techniques import TECHNIQUES, values_of


@dataclass(frozen=True)
class RunOptions:
    """How a run is saved, recorded and repeated. A plan depends on none of it, and has results of its own."""

    output: Annotated[Path | None, Option(help="Folder for checkpoints; the last one is the trained model.")] = None
    export: Annotated[Path | None, Option(help="Empty folder for the trained model, with adapters merged.")] = None
    save_every: Annotated[int, Option(min=0, help="Steps between saved checkpoints; 0: only one at the end.")] = 0
    resume: Annotated[
        bool, Option(help="Resume from the latest intact checkpoint in --output; a sweep: skip the runs in --out.")
    ] = False
    deterministic: Annotated[
        bool, Option(help="Use deterministic algorithms: two runs have bit-identical losses. Slower on a GPU.")
    ] = False
    out: Annotated[
        Path | None,
        Option(
            help="Folder for results: train.csv and train.json, to which the row is appended; plan.json and plan.png, "
            "or plan-accuracy.md with --compare."
        ),
    ] = None
    csv: Annotated[Path | None, Option(help="CSV file to which the row is appended.")] = None
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")] = False
    snapshot: Annotated[
        bool, Option(help="Record memory by category over the first steps, as data and a picture in --out.")
    ] = False
    profile: Annotated[bool, Option(help="Trace a few steps for TensorBoard and Perfetto, in --out.")] = False
    sweeps: Annotated[
        list[str] | None,
        Option(
            "--sweep",
            metavar="OPTION=VALUE,…",
            help="Use each value, for instance batch=1,4,8 or implementation=hf,liger,liger-kernel; repeatable.",
        ),
    ] = None
    strategies: Annotated[
        str | None,
        Option(help="Values of --liger to sweep, with ops joined by +. Default with --sweep: none,all-but-loss,all."),
    ] = None
    gpus: Annotated[str | None, Option(help="GPUs for a sweep, one run at a time on each, for instance 0,1.")] = None
    skip_larger: Annotated[bool, Option(help="In a sweep, skip runs larger than one that ran out of memory.")] = False

    @property
    def sweeping(self) -> bool:
        return bool(self.sweeps) or self.strategies is not None


# In the order of the help; options in no group come last.
GROUPS = {
    "Model and text": ("model", "random_weights", "trust_remote_code", "data", "validation", "packing"),
    "Steps": ("batch", "sequence", "accumulation", "steps", "learning_rate", "seed", "set", "deterministic"),
    "Memory and speed": (
        *("liger", "precision", "checkpoint", "compile", "mlp", "optimizer"),
        *("adapter", "adapter_rank", "adapter_alpha", "adapter_targets"),
    ),
    "Devices": ("device", "memory_limit", "ranks", "shard", "tp", "cp", "offload", "nvme_folder"),
    "Saved models, of training only": ("output", "export", "save_every", "resume"),
    "Results": ("out", "csv", "as_json", "snapshot", "profile"),
    "Sweeps": ("sweeps", "strategies", "gpus", "skip_larger"),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def takes_options(optional: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of Setup and RunOptions, followed by its own.

    The command gets those of Setup as a dictionary, which setup_of reads, and a RunOptions. `optional` is a required
    option that it can do without.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        command_parameters = list(inspect.signature(command, eval_str=True).parameters.values())[2:]
        parameters = [*_parameters(optional), *command_parameters]
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

        @functools.wraps(command)
        def called(**values: Any) -> None:
            values = {**defaults, **values}
            words = {field.name: values.pop(field.name) for field in fields(Setup)}
            options = RunOptions(**{field.name: values.pop(field.name) for field in fields(RunOptions)})
            try:
                command(words, options, **values)
            except SetupError as error:
                error.command = command.__name__
                raise

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorated


def setup_of(words: Mapping[str, Any], largest: int, **chosen: Any) -> Setup:
    """Return the setup of the options: `largest` is the batch for auto, and `chosen` has the device and defaults.

    Raises OptionError for a value that cannot be read.
    """
    values = DEFAULTS[chosen["device"]] | chosen | {name: value for name, value in words.items() if value is not None}
    limit = words["memory_limit"]
    return Setup(
        **values
        | {
            "model": preset_name(words["model"]),
            "batch": batch_of(words["batch"], largest),
            "device": chosen["device"],
            "memory_limit": None if limit is None else bytes_of("--memory-limit", limit, SetupError),
            "set": training_fields.joined(words["set"] or []),
        }
    )


def _parameters(optional: str) -> list[inspect.Parameter]:
    """Return the parameters of all options, in the order of the help."""
    parameters: dict[str, inspect.Parameter] = {}
    for kind in (Setup, RunOptions):
        hints = get_type_hints(kind, include_extras=True)
        parameters |= {field.name: _parameter(field, hints[field.name], optional) for field in fields(kind)}
    return [parameters[name] for name in sorted(parameters, key=[*GROUP_OF, *parameters].index)]


def _parameter(field: Field[Any], hint: Any, optional: str) -> inspect.Parameter:
    kind, *metadata = get_args(hint)
    typed = next((each for each in metadata if isinstance(each, Typed)), Typed(kind, field.default))
    if typed.default is MISSING:
        typed = Typed(kind | None) if field.name == optional else Typed(kind, inspect.Parameter.empty)
    option = copy(metadata[-1])
    option.help = option.help.format(values=values_of(field.name) if field.name in TECHNIQUES else "")
    option.rich_help_panel = GROUP_OF.get(field.name)
    if typed.kind is bool and option.default is ...:
        # Without this, there would be a --no- for it.
        option.param_decls = ("--" + field.name.replace("_", "-"),)
    annotated: Any = Annotated
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=typed.default, annotation=annotated[typed.kind, option]
    )
