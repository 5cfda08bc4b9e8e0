# SPDX-License-Identifier: Apache-2.0
"""Load the config of a setup's model: a preset, a folder, or a name on the hub."""

from pathlib import Path
from typing import Any

from liger_hf.hub import UNREACHABLE, is_local
from liger_hf.presets import NAMES, PRESETS, did_you_mean, preset
from liger_train.errors import SetupError
from liger_train.setup import Setup

# The file in which peft saves the config of an adapter.
ADAPTER = "adapter_config.json"


def config_of(setup: Setup) -> Any:
    """Return the config of a setup's model.

    Raises OptionError for a model that cannot be found, and for an adapter.
    """
    if setup.model in PRESETS:
        return preset(setup.model, setup.sequence)
    from transformers import AutoConfig

    if (Path(setup.model) / ADAPTER).is_file():
        # Transformers would load the adapter's base model, even if the folder also has the weights of another model.
        raise _is_adapter(setup.model)
    try:
        return AutoConfig.from_pretrained(setup.model, use_cache=False, **loading_options(setup))
    except (OSError, ValueError) as problem:
        raise loading_error(setup.model, problem) from problem


def auto_class(config: Any) -> Any:
    """Return the Auto class that loads a causal language model, or all parts of a vision-language model.

    AutoModelForCausalLM drops the other parts of some checkpoints.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from liger_hf.private_transformers import makes
    from liger_train.checkpointing import has_other_parts

    whole = has_other_parts(config) and makes(AutoModelForImageTextToText, config)
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def loading_options(setup: Setup) -> dict[str, Any]:
    """Return the options for loading a model's files: whether they must be local, and whether their code may run.

    trust_remote_code always has a value, since otherwise Transformers asks on standard input.
    """
    return {"local_files_only": is_local(setup.model), "trust_remote_code": setup.trust_remote_code}


def untrusted_code_error(name: str, problem: Exception) -> SetupError | None:
    """Return an error if loading failed because the code of a model or tokenizer may not run, else None."""
    if "trust_remote_code" not in str(problem):
        return None
    return SetupError(f"--model {name} has its own Python code, which needs --trust-remote-code; read it first")


def loading_error(name: str, problem: Exception) -> SetupError:
    """Return the error for a model that could not be loaded."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if (refused := untrusted_code_error(name, problem)) is not None:
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
