# SPDX-License-Identifier: Apache-2.0
"""The options of `liger train` and `liger plan`: one for each field of Setup and of RunOptions."""

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
from liger_train.setup import AUTO_OPTIONS, DEFAULTS, Setup, Typed, number_of
from liger_train.techniques import TECHNIQUES, values_of


@dataclass(frozen=True)
class RunOptions:
    """Options for saving, recording and repeating a run. A plan does not depend on them, and writes its own results."""

    output: Annotated[Path | None, Option(help="Folder for checkpoints; the last one is the trained model.")] = None
    export: Annotated[Path | None, Option(help="Empty folder for the trained model, with adapters merged.")] = None
    save_every: Annotated[int, Option(min=0, help="Steps between saved checkpoints; 0: only one at the end.")] = 0
    resume: Annotated[
        bool, Option(help="Resume from the latest intact checkpoint in --output; a sweep: skip the runs in --out.")
    ] = False
    deterministic: Annotated[bool, Option(help="Make the losses of two runs bit-identical. Slower on a GPU.")] = False
    out: Annotated[
        Path | None,
        Option(
            help="Folder for results: train.csv and train.json, to which the row is appended; plan.json and plan.png, "
            "or plan-accuracy.md with --compare."
        ),
    ] = None
    csv: Annotated[Path | None, Option(help="CSV file to which the row is appended.")] = None
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")] = False
    snapshot: Annotated[bool, Option(help="Record memory by category in the first steps, to --out.")] = False
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
    "Devices": ("device", "memory_limit", "ranks", "shard", "tp", "cp", "replicate", "offload", "nvme_folder"),
    "Saved models, of training only": ("output", "export", "save_every", "resume"),
    "Results": ("out", "csv", "as_json", "snapshot", "profile"),
    "Sweeps": ("sweeps", "strategies", "gpus", "skip_larger"),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def takes_options(optional: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the options of Setup and RunOptions, followed by its own.

    The command is called with a dictionary of the options of Setup, for setup_of, and with a RunOptions. `optional`
    names a required option of Setup that this command does not require.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command_parameters = list(inspect.signature(command, eval_str=True).parameters.values())[2:]
        for parameter in command_parameters:
            get_args(parameter.annotation)[-1].rich_help_panel = command.__name__.capitalize()
        parameters = [*_parameters(optional), *command_parameters]
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            values = {**defaults, **values}
            setup_values = {field.name: values.pop(field.name) for field in fields(Setup)}
            options = RunOptions(**{field.name: values.pop(field.name) for field in fields(RunOptions)})
            try:
                command(setup_values, options, **values)
            except SetupError as error:
                error.command = command.__name__
                raise

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def setup_of(values: Mapping[str, Any], auto: Mapping[str, int], **chosen: Any) -> Setup:
    """Return the setup of option values; `auto` has values for auto, `chosen` the device and its defaults.

    Raises OptionError for a value that cannot be parsed.
    """
    limit = values["memory_limit"]
    return Setup(
        **DEFAULTS[chosen["device"]]
        | chosen
        | {name: value for name, value in values.items() if value is not None}
        | {
            "model": preset_name(values["model"]),
            "device": chosen["device"],
            "memory_limit": None if limit is None else bytes_of("--memory-limit", limit, SetupError),
            "set": training_fields.joined(values["set"] or []),
        }
        | {name: number_of(name, values[name], auto) for name in AUTO_OPTIONS if values[name] is not None}
    )


def _parameters(optional: str) -> list[inspect.Parameter]:
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
        # Otherwise typer adds a --no- option.
        option.param_decls = ("--" + field.name.replace("_", "-"),)
    annotated: Any = Annotated
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=typed.default, annotation=annotated[typed.kind, option]
    )
