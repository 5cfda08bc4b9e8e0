# SPDX-License-Identifier: Apache-2.0
"""Load the config of the model that a setup names: a preset, a folder, or a name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_hf.hub import UNREACHABLE, is_local
from liger_hf.presets import NAMES, PRESETS, did_you_mean, preset
from liger_train.errors import SetupError
from liger_train.setup import Setup

# The file with which peft saves an adapter.
ADAPTER = "adapter_config.json"


def config_of(setup: Setup) -> Any:
    """Return the config of a setup's model, which is a preset, a folder, or a name on the hub."""
    if setup.model in PRESETS:
        return preset(setup.model, setup.sequence)
    from transformers import AutoConfig

    if (Path(setup.model) / ADAPTER).is_file():
        # Transformers would load its base model, also beside the weights of another model.
        raise _is_adapter(setup.model)
    try:
        return AutoConfig.from_pretrained(setup.model, use_cache=False, **loading_options(setup))
    except (OSError, ValueError) as problem:
        raise not_found(setup.model, problem) from problem


def auto_class(config: Any) -> Any:
    """Return the Auto class of a causal language model, with all its parts if it is the language model of a
    vision-language model.

    AutoModelForCausalLM drops the other parts of some checkpoints.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from liger_hf.private_transformers import makes
    from liger_train.checkpointing import has_other_parts

    whole = has_other_parts(config) and makes(AutoModelForImageTextToText, config)
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def loading_options(setup: Setup) -> dict[str, Any]:
    """Return the options for loading a model's files: whether they must be local, and whether their code may run.

    The latter is always passed, because without a value Transformers asks on standard input.
    """
    return {
        "local_files_only": is_local(setup.model),
        "trust_remote_code": setup.trust_remote_code,
    }


def has_code_of_its_own(name: str, problem: Exception) -> SetupError | None:
    """Return the error for a model or tokenizer whose own code may not run; None for any other problem."""
    if "trust_remote_code" not in str(problem):
        return None
    return SetupError(
        f"--model {name} has Python code of its own, which runs only with --trust-remote-code; read the code first"
    )


def not_found(name: str, problem: Exception) -> SetupError:
    """Return the error for a model that could not be loaded."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if (refused := has_code_of_its_own(name, problem)) is not None:
        return refused
    if find_adapter_config_file(name, local_files_only=is_local(name)):
        return _is_adapter(name)
    reason = str(problem).strip().split("\n")[0].rstrip(".")
    if not Path(name).exists() and is_local(name):
        reason = UNREACHABLE
    elif (Path(name) / "config.json").is_file():
        reason += "; --random-weights takes only its config"
    return SetupError(
        f"--model must be {NAMES}, a folder with a config.json and weights, or a name on the hub, "
        f"got {name!r}: {reason}.{did_you_mean(name)}"
    )


def _is_adapter(name: str) -> SetupError:
    return SetupError(
        f"--model must be a whole model, got {name!r}, an adapter of peft; to train on from it, give the model that "
        f"peft.AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload().save_pretrained(FOLDER) writes, "
        "with the tokenizer, or --resume the run that saved it"
    )
