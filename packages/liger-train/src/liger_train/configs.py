# SPDX-License-Identifier: Apache-2.0
"""From the model that a setup names to its config: a preset, a folder, or a name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_core.errors import OptionError
from liger_hf.hub import UNREACHABLE, is_local
from liger_hf.presets import NAMES, PRESETS, did_you_mean, preset
from liger_train.setup import Setup


def config_of(setup: Setup) -> Any:
    """The config of a setup's model: of a preset, in a folder, or on the hub."""
    if setup.model in PRESETS:
        return preset(setup.model, setup.sequence)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(setup.model, use_cache=False, **loading_options(setup))
    except (OSError, ValueError) as problem:
        raise not_found(setup.model, problem) from problem


def loading_options(setup: Setup) -> dict[str, Any]:
    """Where a model's files may come from, and whether code among them may run: without a value, Transformers asks on standard input."""
    return {
        "local_files_only": is_local(setup.model),
        "trust_remote_code": setup.trust_remote_code,
    }


def has_code_of_its_own(name: str, problem: Exception) -> OptionError | None:
    """The error for a model or tokenizer whose own code may not run; None for any other problem."""
    if "trust_remote_code" not in str(problem):
        return None
    return OptionError(f"train: --model {name} has Python code of its own, which runs only with --trust-remote-code; read the code first")


def not_found(name: str, problem: Exception) -> OptionError:
    if (refused := has_code_of_its_own(name, problem)) is not None:
        return refused
    reason = str(problem).strip().split("\n")[0].rstrip(".")
    if not Path(name).exists() and is_local(name):
        reason = UNREACHABLE
    elif (Path(name) / "config.json").is_file():
        reason += "; --random-weights takes only its config"
    return OptionError(
        f"train: --model must be {NAMES}, a folder with a config.json and weights, or a name on the hub, "
        f"got {name!r}: {reason}.{did_you_mean(name)}"
    )
