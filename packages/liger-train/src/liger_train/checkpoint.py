# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint, note the weights that the model does not use, and freeze the weights that text does not reach."""

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import nn

from liger_core.errors import listed
from liger_hf.private_transformers import recording_checkpoints
from liger_train.checkpointing import language_model
from liger_train.configs import auto_class, loading_error, loading_options
from liger_train.setup import Setup

# Buffers that older versions of models saved with their weights.
BUFFERS = re.compile(r"(^|\.)(inv_freq|position_ids|version)$")


def load(setup: Setup, config: Any, notes: list[str], **options: Any) -> Any:
    """Load the model of a folder or hub name; note weights that it does not use, and weights that the checkpoint lacks.
    Experts in MXFP4, as of gpt-oss, are dequantized.

    Raises OptionError for a model that cannot be loaded.
    """
    files: list[str] = []
    names: dict[str, str] = {}
    stored = getattr(config, "quantization_config", None) or {}
    if stored.get("quant_method") == "mxfp4":
        becomes = "NF4" if "quantization_config" in options else str(options["dtype"]).removeprefix("torch.")
        notes.append(f"The experts of {setup.model} are in MXFP4; each is dequantized when it is loaded, to {becomes}.")
        if becomes == "NF4":
            # Transformers refuses to load one format as another; the quantizer of the options reads both.
            del config.quantization_config
        else:
            config.quantization_config = {**stored, "dequantize": True}
    try:
        with recording_checkpoints(files, names):
            model, info = auto_class(config).from_pretrained(
                setup.model, config=config, output_loading_info=True, **loading_options(setup), **options
            )
    except (OSError, ValueError) as problem:
        raise loading_error(setup.model, problem) from problem
    used, modules = model.state_dict().keys(), dict(model.named_modules())
    unused = [
        name
        for name, renamed in names.items()
        # unexpected_keys omits names that Transformers ignores: parts that the model lacks, and former buffers.
        if renamed not in used
        and not BUFFERS.search(renamed)
        and (renamed in info["unexpected_keys"] or renamed.rpartition(".")[0] not in modules)
    ]
    class_name = type(model).__name__
    if unused:
        count = sum(size for name, size in _sizes(files).items() if name in set(unused))
        notes.append(
            f"{class_name} leaves out {count:,} weights of {setup.model}, which are neither trained nor saved: "
            f"{_listed(unused)}."
        )
    if missing := sorted(info["missing_keys"]):
        tensors, start = ("tensor", "starts") if len(missing) == 1 else ("tensors", "start")
        notes.append(
            f"{setup.model} lacks {len(missing)} {tensors} of {class_name}, which {start} with random values: "
            f"{_listed(missing)}."
        )
    return model


def freeze_what_text_does_not_reach(model: Any, notes: list[str]) -> None:
    """Freeze the parts of a vision-language model that get no gradients from text."""
    rest = beside_text(model)
    weights = [weight for weight in rest.values() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    if rest:
        count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in rest.values())
        notes.append(
            f"Training the language model of {type(model).__name__}; {count:,} weights that text does not reach are "
            f"frozen, and saved with it: {_listed(rest)}."
        )


def beside_text(model: Any) -> dict[str, nn.Parameter]:
    """Return name → weight for the parts of a model outside its language model, embeddings and LM head."""
    text = language_model(model)
    if text is model:
        return {}
    parts = (text, model.get_input_embeddings(), model.get_output_embeddings())
    reached = {id(weight) for module in parts if module is not None for weight in module.parameters()}
    return {name: weight for name, weight in model.named_parameters() if id(weight) not in reached}


def _sizes(files: Iterable[str]) -> dict[str, int]:
    """Return name → number of elements for the tensors in the files of a checkpoint."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                sizes |= {name: prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        else:
            sizes |= {
                name: tensor.numel()
                for name, tensor in torch.load(file, map_location="meta", weights_only=True).items()
            }
    return sizes


def _listed(names: Iterable[str]) -> str:
    """Return the first few of the names' distinct prefixes of two components."""
    return listed(list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names)))
