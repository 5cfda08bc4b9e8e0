# SPDX-License-Identifier: Apache-2.0
"""The values of --optimizer, for the table in techniques.py."""

import importlib
from typing import Any

from liger_train import combinations
from liger_train.technique import Technique

LOW_RANK = "rank=128,update_proj_gap=200"
GALORE = LOW_RANK + ",scale=0.25"
APOLLO = LOW_RANK + ",proj=random,scale=1.0,scale_type=channel"
APOLLO_MINI = "rank=1,update_proj_gap=200,proj=random,scale=128.0,scale_type=tensor"
# Start of --optimizer → module and class of objects in its state.
PROJECTORS = {
    "galore": ("galore_torch.galore_projector", "GaLoreProjector"),
    "apollo": ("apollo_torch.random_projector", "GradientProjector"),
}


def projectors(optimizer: str) -> list[Any]:
    """Return the classes in the state of an optimizer that torch.load must be allowed to load."""
    paths = [path for start, path in PROJECTORS.items() if optimizer.startswith(start)]
    return [getattr(importlib.import_module(module), name) for module, name in paths]


def _optim(name: str, problem: Any, *packages: str, low_rank: str = "", **more: Any) -> dict[str, Any]:
    """Return the fields of a Technique that is this optimizer of the Trainer."""
    if low_rank:
        more |= {"optim_target_modules": "all-linear", "optim_args": low_rank}
    return {"packages": packages, "arguments": lambda setup: {"optim": name, **more}, "problem": problem}


OPTIMIZERS: dict[str, Technique] = {
    "optimizer adamw": Technique(
        "AdamW with two moments, in the precision of the weights.",
        arguments=lambda setup: {"optim": "adamw_torch_fused"},
    ),
    "optimizer adamw-8bit": Technique(
        "AdamW with blockwise 8-bit moments; those of embeddings stay in 32 bits.",
        "6 of 8 bytes of optimizer state per weight",
        "lower-precision optimizer state",
        **_optim("adamw_bnb_8bit", combinations.unsharded_or_zero, "bitsandbytes"),
    ),
    "optimizer paged-adamw": Technique(
        "AdamW whose moments are paged to the host when GPU memory is short.",
        "all optimizer state, if necessary",
        "transfers when memory is short",
        **_optim("paged_adamw_32bit", combinations.unsharded, "bitsandbytes"),
    ),
    "optimizer paged-adamw-8bit": Technique(
        "AdamW with 8-bit moments that are paged to the host when GPU memory is short.",
        "6 of 8 bytes of optimizer state per weight, all if necessary",
        "lower-precision optimizer state, transfers when memory is short",
        **_optim("paged_adamw_8bit", combinations.unsharded, "bitsandbytes"),
    ),
    "optimizer adamw-torchao-8bit": Technique(
        "AdamW with blockwise 8-bit moments, compiled.",
        "6 of 8 bytes of optimizer state per weight",
        "lower-precision optimizer state; compiles in the first step",
        **_optim("adamw_torch_8bit", combinations.unsharded_or_fsdp2, "torchao"),
    ),
    "optimizer adamw-torchao-4bit": Technique(
        "AdamW with blockwise 4-bit moments, compiled.",
        "7 of 8 bytes of optimizer state per weight",
        "even lower-precision optimizer state; compiles in the first step",
        **_optim("adamw_torch_4bit", combinations.unsharded_or_fsdp2, "torchao"),
    ),
    "optimizer adafactor": Technique(
        "Factored second moments (a row and a column per weight), no first moments.",
        "nearly all optimizer state",
        "converges more slowly on some models",
        by="Transformers",
        **_optim("adafactor", combinations.unsharded),
    ),
    "optimizer galore": Technique(
        "AdamW on gradients of linear layers projected to rank 128; the projection is updated every 200 steps.",
        "moments of linear layers, by up to hidden size / 128",
        "low-rank updates; a singular value decomposition every 200 steps",
        **_optim("galore_adamw", combinations.unsharded, "galore-torch", low_rank=GALORE),
    ),
    "optimizer galore-8bit": Technique(
        "GaLore with blockwise 8-bit moments.",
        "as `galore`, and three quarters of the rest",
        "as `galore`, and lower-precision optimizer state",
        reason="bitsandbytes implements its update as a GPU kernel",
        **_optim("galore_adamw_8bit", combinations.unsharded, "galore-torch", "bitsandbytes", low_rank=GALORE),
    ),
    "optimizer galore-layerwise": Technique(
        "GaLore that updates each weight as soon as its gradient is computed, then frees the gradient.",
        "as `galore`, and nearly all gradients",
        "as `galore`; no gradient clipping",
        **_optim("galore_adamw_layerwise", combinations.layerwise, "galore-torch", low_rank=GALORE, max_grad_norm=0.0),
    ),
    "optimizer apollo": Technique(
        "Updates scaled per channel by AdamW on a random projection of the gradient to rank 128.",
        "moments of linear layers, by up to hidden size / 128",
        "approximate step sizes",
        **_optim("apollo_adamw", combinations.unsharded, "apollo-torch", low_rank=APOLLO),
    ),
    "optimizer apollo-mini": Technique(
        "APOLLO with a projection to rank 1 and one scale per weight tensor.",
        "nearly all moments of linear layers",
        "approximate step sizes",
        **_optim("apollo_adamw", combinations.unsharded, "apollo-torch", low_rank=APOLLO_MINI),
    ),
}
