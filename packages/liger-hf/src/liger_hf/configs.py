# SPDX-License-Identifier: Apache-2.0
"""Find the config of a model by its name."""

from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from liger_core.errors import nearest
from liger_hf.errors import ModelError
from liger_hf.hub import UNREACHABLE, is_local
from liger_hf.presets import NAMES, PRESETS, preset, preset_name

# Among hundreds of model types, some name is always similar: "notamodel" is not a misspelled "EvollaModel".
LIKENESS = 0.7


def config_of(source: str) -> PretrainedConfig:
    """Return the config of a folder, a preset, a model type or a name on the hub, tried in this order.

    Raises ModelError if there is none.
    """
    is_here = Path(source).exists()
    if not is_here and preset_name(source) in PRESETS:
        return preset(source)
    if not is_here and source in CONFIG_MAPPING:
        return AutoConfig.for_model(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=is_local(source))
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}".strip().split("\n")[0].rstrip(".")
        if not is_here and is_local(source):
            reason = UNREACHABLE
        raise ModelError(
            f"liger inspect: the model must be {NAMES}, a folder with a config.json, a model type of Transformers or a "
            f"name on the hub, got {source!r}: {reason}.{nearest(source, [*PRESETS, *CONFIG_MAPPING], LIKENESS)}"
        ) from problem
