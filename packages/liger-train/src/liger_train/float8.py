# SPDX-License-Identifier: Apache-2.0
"""`--precision fp8`: linear layers whose matmuls are in float8, by torchao."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from liger_train.errors import SetupError
from liger_train.setup import FLOAT8_MULTIPLE as MULTIPLE
from liger_train.setup import Setup

# Value of --precision → torchao's recipe.
RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "fp8-pure": "tensorwise", "fp8-rowwise-pure": "rowwise"}
SCALES = {"tensorwise": "one scale per tensor", "rowwise": "one scale per row"}
HEAD, OTHER, ODD, EXPERTS = (
    "the LM head, whose matmul is part of the loss",
    "other classes of layers",
    f"dimensions that are not multiples of {MULTIPLE}",
    "experts, whose matmuls are grouped",
)
# Every shape of a layer is compiled for itself, with and without gradients; torch stops after 8, and runs the rest
# uncompiled.
COMPILED = 64


def convert(model: Any, setup: Setup, notes: list[str]) -> None:
    """Make the linear layers of a model multiply in float8; a note names those that do not.

    On a GPU they are compiled, each layer for itself: the casts are then few passes over memory. Weights stay as they
    are, so a saved model is one of plain linear layers.

    Raises OptionError for a model without such layers.
    """
    wanted = chosen_layers(model, setup, notes)
    torchao = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(RECIPES[setup.precision])
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: name in wanted)
    if setup.device == "cuda":
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED)
        for name in wanted:
            model.get_submodule(name).compile(dynamic=False)


def chosen_layers(model: Any, setup: Setup, notes: list[str]) -> set[str]:
    """The names of the layers that multiply in float8, with a note on them and on the others."""
    left: dict[str, int] = {}
    wanted: set[str] = set()
    head = model.get_output_embeddings()
    for name, reason in _linear(model, head):
        if reason:
            left[reason] = left.get(reason, 0) + 1
        else:
            wanted.add(name)
    others = ", ".join(f"{count} × {reason}" for reason, count in left.items())
    if not wanted:
        raise SetupError(
            f"--precision {setup.precision} needs linear layers whose dimensions are multiples of {MULTIPLE}, "
            f"got {setup.model} with {others or 'none'}; use --precision bf16"
        )
    scales = SCALES[RECIPES[setup.precision]]
    notes.append(
        f"--precision {setup.precision}: {len(wanted)} linear layers multiply in float8 with {scales}; left out: "
        f"{others}."
    )
    return wanted


def holds_experts(module: nn.Module) -> bool:
    return not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and any(
        p.dim() == 3 for p in module.parameters(recurse=False)
    )


def _linear(model: nn.Module, head: Any) -> Iterator[tuple[str, str]]:
    """Name, and reason to leave it, of every layer with a matmul."""
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if module is head:
            yield name, HEAD
        elif holds_experts(module):
            yield name, EXPERTS
        elif type(module) is nn.Linear:
            yield name, ODD if module.in_features % MULTIPLE or module.out_features % MULTIPLE else ""
        elif isinstance(module, nn.Linear | Conv1D):
            yield name, OTHER
