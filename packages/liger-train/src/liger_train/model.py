# SPDX-License-Identifier: Apache-2.0
"""Build the model of a setup: preset or name, precision, adapters, activation checkpointing, Liger."""

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch import nn
from transformers.utils import logging as transformers_logging

from liger_hf.four_bits import described
from liger_hf.presets import PRESETS
from liger_train import checkpoint, checkpointing, merging, tied
from liger_train.adapters import add_adapters, note_of_adapters
from liger_train.compiling import compile_layers
from liger_train.configs import auto_class, config_of
from liger_train.float8 import RECIPES, cast_when_gathered, convert
from liger_train.implementations import PEER, patch_by_peer
from liger_train.random_weights import random_weights
from liger_train.setup import MLP_ROWS, ZERO, Setup
from liger_train.sharded_loading import copy_views, forget_initialization, in_shards, wait_on_meta
from liger_train.smoothing import smooth

# The dtype of activations; float8 has none of its own.
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16} | dict.fromkeys(
    RECIPES, torch.bfloat16
)
LOSS = "linear_cross_entropy"


@dataclass(frozen=True)
class Built:
    """A model that is ready to train.

    replaced  the ops that Liger inserted, and how often
    notes     decisions made for the user, one sentence each
    """

    model: Any
    replaced: str
    notes: list[str]


def build(
    setup: Setup, device: torch.device, *,
    load: Callable[..., Any] | None = None, adapters: Callable[..., Any] | None = None,
    to_float8: Callable[..., None] = convert, compile_layers: Callable[..., str] = compile_layers,
) -> Built:  # fmt: skip
    """Build the model of a setup: random weights by its seed, or the weights of a folder or hub name.

    The model is on the device, unless it is sharded: for ZeRO stage 3, it moves there piece by piece; for FSDP2, it is
    on the meta device, and its weights have the shards of this rank (sharded_loading.py). Under FakeTensorMode, nothing
    is allocated; a plan brings the functions that then load the model, add adapters, convert to float8 and compile.

    Raises OptionError for a model that cannot be found.
    """
    torch.manual_seed(setup.seed)
    notes: list[str] = []
    model = (load or (_quantized if setup.adapter == "qlora" else _loaded))(setup, device, notes)
    checkpoint.freeze_what_text_does_not_reach(model, notes)
    if setup.adapter != "none":
        model = (adapters or adapt)(model, setup, notes)
    if setup.precision in RECIPES:
        to_float8(model, setup, notes)
    if _loads_shards(setup):
        home = torch.device("cpu") if setup.offload == "parameters" else device
        wait_on_meta(model, home, partial(cast_when_gathered, setup))
    model.train()
    checkpointing.enable(model, setup.checkpoint)
    # After adapters, which wrap the modules that Liger replaces.
    replaced = _patched(model, setup, notes)
    smooth(model, setup, notes)
    if setup.compile == "graphs":
        notes.extend(filter(None, (tied.tie(model), "" if setup.mixed else merging.merge(model))))
    if setup.compile != "none":
        # In a graph, PyTorch 2.11 saves the results of bitsandbytes' autograd functions instead of recomputing them.
        # PyTorch 2.13 fails on the meshes of DTensors. A CUDA graph cannot draw random numbers again, and whether a
        # layer draws any is known after the first step.
        within = setup.compile == "default" and setup.adapter != "qlora" and setup.tp == 1
        notes.append(compile_layers(model, within))
    return Built(model, replaced, notes)


def unquantized(setup: Setup, device: torch.device) -> Any:
    """Return the model of a QLoRA setup as it was before quantization, without adapters."""
    model = _loaded(setup, device, [])
    if _is_random(setup):
        values = model.state_dict()
        for name, weight in random_weights(on_meta(setup), device, setup.seed).items():
            values[name].copy_(weight[...])
    return model


def parallelism(setup: Setup) -> ParallelismConfig | None:
    """Return the mesh of a setup's ranks, or None if all ranks are data-parallel in one way."""
    sizes = {"dp_replicate_size": setup.replicate, "tp_size": setup.tp, "cp_size": setup.cp}
    if max(sizes.values()) == 1:
        return None
    return ParallelismConfig(**sizes, dp_shard_size=setup.replicas // setup.replicate)


def on_meta(setup: Setup) -> Any:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return _from_config(setup)


def weights_dtype(setup: Setup) -> torch.dtype:
    """Return the dtype of the weights: float32 if they are trained, unless DeepSpeed's optimizer has a float32 copy."""
    low = setup.pure or setup.adapter != "none" or setup.shard in ZERO
    return LOW.get(setup.precision, torch.float32) if low else torch.float32


def _loaded(setup: Setup, device: torch.device, notes: list[str]) -> Any:
    config, options = config_of(setup), {"dtype": weights_dtype(setup)}
    if setup.tp > 1 or _loads_shards(setup):
        options |= _tensor_parallelism(setup, device) if setup.tp > 1 else {}
        with in_shards(setup, device):
            random = _is_random(setup)
            model = _random(setup, config, **options) if random else checkpoint.load(setup, config, notes, **options)
        if setup.tp > 1:
            forget_initialization(model)
            copy_views(model)
        return model
    # DeepSpeed moves the model to the device layer by layer.
    in_pieces = setup.shard == "zero3"
    if _is_random(setup):
        with contextlib.nullcontext() if in_pieces else device:
            return _from_config(setup)
    placement = {} if in_pieces else {"device_map": {"": device}}
    return checkpoint.load(setup, config, notes, **options, **placement)


def _tensor_parallelism(setup: Setup, device: torch.device) -> dict[str, Any]:
    """Return the options that load this rank's shards of the layers and of the LM head, by Transformers' plan."""
    from transformers.distributed import DistributedConfig

    ranks = parallelism(setup)
    return {
        # The ranks of FSDP2 are counted here, but Transformers leaves them to others.
        "distributed_config": DistributedConfig(tp_size=setup.tp, fsdp_size=setup.ranks // setup.tp),
        "device_mesh": ranks.get_device_mesh(device.type)["tp"] if ranks else None,
    }


def _random(setup: Setup, config: Any, **options: Any) -> Any:
    """Make a model with random weights, as Transformers initializes those that a checkpoint lacks."""
    # It reports all weights as missing.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return type(on_meta(setup)).from_pretrained(None, config=config, state_dict={}, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)


def _from_config(setup: Setup) -> Any:
    config, dtype = config_of(setup), weights_dtype(setup)
    return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=setup.trust_remote_code)


def _is_random(setup: Setup) -> bool:
    return setup.model in PRESETS or setup.random_weights


def _loads_shards(setup: Setup) -> bool:
    """Whether each rank loads its shards of FSDP2 alone. Over tensor parallelism, it loads the shards of the latter."""
    return setup.shard == "fsdp2" and setup.tp == 1


def _quantized(setup: Setup, device: torch.device, notes: list[str]) -> Any:
    from transformers import BitsAndBytesConfig

    from liger_hf.quantizer import loading_in_four_bits

    config, low = config_of(setup), LOW.get(setup.precision, torch.float32)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=low
    )
    options: dict[str, Any] = {"dtype": low, "quantization_config": four_bits, "device_map": {"": device}}
    with loading_in_four_bits():
        if not _is_random(setup):
            return checkpoint.load(setup, config, notes, **options)
        # Each weight is quantized before the next one is made.
        model = on_meta(setup)
        weights = random_weights(model, device, setup.seed)
        return type(model).from_pretrained(None, config=config, state_dict=weights, **options)


def adapt(model: Any, setup: Setup, notes: list[str]) -> Any:
    """Return the model with the adapters of the setup.

    Frozen weights keep their dtypes. peft.prepare_model_for_kbit_training would convert those that are not quantized to
    float32, and with them the activations between the layers, which take twice the memory then.
    """
    with described(model):
        model = add_adapters(model, setup)
        notes.append(adapter_note(model, setup))
    return model


def adapter_note(model: Any, setup: Setup, in_four_bits: Collection[int] = ()) -> str:
    """Return a sentence that says which layers of the model have adapters, and in which dtypes."""
    low = str(weights_dtype(setup)).removeprefix("torch.")
    return note_of_adapters(model, setup, low if setup.shard in ZERO else "float32", in_four_bits)


def _patched(model: nn.Module, setup: Setup, notes: list[str]) -> str:
    tokens = setup.batch * setup.sequence // setup.cp
    rows = MLP_ROWS if setup.mlp == "tiled" and tokens > MLP_ROWS else None
    if setup.liger == "none" and rows is None:
        return ""
    if setup.liger == PEER:
        patch_by_peer(model)
        return ""
    import liger_hf
    from liger_hf.causal_mask import NOTE
    from liger_hf.report import EXCLUDED, LEFT, UNLISTED

    known: dict[str, dict[str, Any]] = {"none": {"only": ()}, "all": {}, "all-but-loss": {"exclude": [LOSS]}}
    names = known.get(setup.liger, {"only": setup.liger.split(",")})
    report = liger_hf.apply(model, **names, mlp_rows=rows)
    # That note is about compiling the model, which does not happen here.
    notes.extend(note for note in report.notes if note != NOTE)
    notes.extend(
        f"Liger did not replace {row.count} × {row.pattern}: {row.reason}."
        for row in report.rows
        if row.verdict == LEFT and not row.reason.endswith((EXCLUDED, UNLISTED))
    )
    return ", ".join(f"{op} {count}" for op, count in report.replaced.items())
