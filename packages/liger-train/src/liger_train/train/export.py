# SPDX-License-Identifier: Apache-2.0
"""`--export`: the trained model in a folder, with adapters merged into its weights, as Transformers loads it."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from liger_bench.writable import check_folder
from liger_core.errors import OptionError
from liger_hf.hub import is_local
from liger_hf.presets import PRESETS
from liger_train.model import loaded_again
from liger_train.setup import Setup

# The files of what prepares pictures and other inputs of a model, which training on text does not change.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check(setup: Setup, folder: Path) -> None:
    """Raise OptionError if the model could not be written there."""
    if setup.shard in ("zero3", "fsdp2") or setup.tp > 1:
        option = f"--tp {setup.tp}" if setup.tp > 1 else f"--shard {setup.shard}"
        raise OptionError(f"train: --export needs a rank that holds the whole model, got {option}; use --output")
    check_folder("train: --export", folder)
    if any(folder.iterdir()):
        raise OptionError(f"train: --export must be an empty or a new folder, got {folder}, which has files")


def export(setup: Setup, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model of a run that has ended. The model cannot be trained on after that."""
    if setup.adapter == "qlora":
        whole = _merged_unquantized(setup, model)
    else:
        whole = model.merge_and_unload() if setup.adapter != "none" else model
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in PROCESSORS if setup.model not in PRESETS else ():
        file = cached_file(
            setup.model, name, local_files_only=is_local(setup.model), _raise_exceptions_for_missing_entries=False
        )
        if file is not None:
            shutil.copy(file, folder)


def _merged_unquantized(setup: Setup, model: Any) -> Any:
    """The adapters, merged into the weights from before they were quantized: merging into 4 bits would round the update
    away."""
    peft = importlib.import_module("peft")
    with tempfile.TemporaryDirectory(prefix="liger-train-") as folder:
        model.save_pretrained(folder)
        base = loaded_again(replace(setup, adapter="lora"), model.device)
        for config in (base.config, base.generation_config):
            for name in ("eos_token_id", "pad_token_id"):
                if config is not None:
                    setattr(config, name, getattr(model.config, name, None))
        with torch.no_grad():
            return peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
