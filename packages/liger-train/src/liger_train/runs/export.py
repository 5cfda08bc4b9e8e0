# SPDX-License-Identifier: Apache-2.0
"""`--export`: write the trained model to a folder, with adapters merged into its weights, for Transformers to load."""

import importlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from liger_bench.writable import check_folder
from liger_hf.hub import is_local
from liger_hf.presets import PRESETS
from liger_train import ranks
from liger_train.errors import SetupError
from liger_train.model import unquantized
from liger_train.runs import sharded_checkpoints
from liger_train.setup import Setup

# Files of processors for images and other inputs, which training on text does not change.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check(setup: Setup, folder: Path) -> None:
    """Raise OptionError if the model of this setup cannot be exported, or not to this folder."""
    if setup.shard == "zero3" or (setup.saves_shards and setup.adapter != "none"):
        adapter = "" if setup.adapter == "none" else f" and --adapter {setup.adapter}"
        raise SetupError(
            f"--export needs a rank that holds the whole model, got --shard {setup.shard}{adapter}; use --output"
        )
    check_folder("train: --export", folder)
    if any(folder.iterdir()):
        raise SetupError(f"--export must be an empty or a new folder, got {folder}, which has files")


def export(setup: Setup, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model of a run that has ended; after this, the model cannot be trained further.

    All ranks must call this for a sharded model.
    """
    if setup.saves_shards:
        sharded_checkpoints.save_model(model, folder)
    if not ranks.first():
        return
    if setup.adapter == "qlora":
        model = _merged_unquantized(setup, model)
    elif setup.adapter != "none":
        model = model.merge_and_unload()
    if not setup.saves_shards:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in PROCESSORS if setup.model not in PRESETS else ():
        file = cached_file(
            setup.model, name, local_files_only=is_local(setup.model), _raise_exceptions_for_missing_entries=False
        )
        if file is not None:
            shutil.copy(file, folder)


def _merged_unquantized(setup: Setup, model: Any) -> Any:
    """Merge the adapters into the weights from before quantization; in 4 bits, rounding would lose the update."""
    peft = importlib.import_module("peft")
    with tempfile.TemporaryDirectory(prefix="liger-train-") as folder:
        model.save_pretrained(folder)
        base = unquantized(replace(setup, adapter="lora"), model.device)
        for config in (base.config, base.generation_config):
            for name in ("eos_token_id", "pad_token_id"):
                if config is not None:
                    setattr(config, name, getattr(model.config, name, None))
        with torch.no_grad():
            return peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
