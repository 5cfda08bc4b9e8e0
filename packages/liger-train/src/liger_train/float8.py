# SPDX-License-Identifier: Apache-2.0
"""`--precision fp8`: linear layers with float8 matmuls, by torchao."""

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_train.compiling import GRAPHS
from liger_train.errors import SetupError
from liger_train.setup import FLOAT8_MULTIPLE as MULTIPLE
from liger_train.setup import Setup

# Value of --precision → recipe of torchao.
RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "fp8-pure": "tensorwise", "fp8-rowwise-pure": "rowwise"}
SCALES = {"tensorwise": "one scale per tensor", "rowwise": "one scale per row"}


def convert(model: Any, setup: Setup, notes: list[str]) -> None:
    """Convert linear layers to float8 matmuls, with a note on them and on the layers that are left out.

    On a GPU each layer is compiled, which fuses the casts into few passes over memory. The weights do not change, so a
    saved model has ordinary linear layers.

    Raises OptionError for a model without layers to convert.
    """
    names = chosen_layers(model, setup, notes)
    torchao = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(RECIPES[setup.precision])
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: name in names)
    if setup.device == "cuda":
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
        for name in names:
            model.get_submodule(name).compile(dynamic=False)


def chosen_layers(model: Any, setup: Setup, notes: list[str]) -> set[str]:
    """Return the names of the layers to convert, with a note on them and on the layers that are left out."""
    left_out: Counter[str] = Counter()
    names: set[str] = set()
    gathered = 0
    head = model.get_output_embeddings()
    for name, reason in _matmul_layers(model, head):
        if reason:
            left_out[reason] += 1
        else:
            names.add(name)
            gathered += gathers_in_float8(setup, model.get_submodule(name).out_features)
    others = ", ".join(f"{count} × {reason}" for reason, count in left_out.items())
    if not names:
        raise SetupError(
            f"--precision {setup.precision} needs linear layers whose dimensions are multiples of {MULTIPLE}, "
            f"got {setup.model} with {others or 'none'}; use --precision bf16"
        )
    scales = SCALES[RECIPES[setup.precision]]
    also = f", and FSDP2 gathers the weights of {gathered} in float8" if gathered else ""
    notes.append(
        f"--precision {setup.precision}: {len(names)} linear layers multiply in float8 with {scales}{also}; left out: "
        f"{others}."
    )
    return names


def gathers_in_float8(setup: Setup, rows: int) -> bool:
    """Return whether FSDP2 gathers weights with so many rows in float8.

    All ranks need the same scale before the cast, so not with a scale per row. torchao does not pad shards, and loses
    the scale of offloaded ones.
    """
    is_sharded = setup.shard == "fsdp2" and setup.offload == "none" and rows % setup.sharing_ranks == 0
    return is_sharded and RECIPES.get(setup.precision) == "tensorwise"


def cast_when_gathered(setup: Setup, layer: nn.Module, whole: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight and its shard, as tensors that FSDP2 casts to float8 before it gathers them if it can do so."""
    if type(layer).__name__ != "Float8Linear" or whole.dim() != 2 or not gathers_in_float8(setup, len(whole)):
        return whole, shard
    float8: Any = layer
    cast = importlib.import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
    dtype = float8.config.cast_config_weight.target_dtype
    return cast(whole, float8.linear_mm_config, dtype), cast(shard, float8.linear_mm_config, dtype)


def is_cast_when_gathered(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and hasattr(weight.to_local(), "fsdp_pre_all_gather")


def scale_after_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute the scales of a model's weights by one collective after each step, not by one for each weight later."""
    if any(map(is_cast_when_gathered, model.parameters())):
        scale = importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp
        optimizer.register_step_post_hook(lambda *_: scale(model))


def holds_experts(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Conv1d | nn.ConvTranspose1d) and any(w.dim() == 3 for w in layer.parameters(False))


def _matmul_layers(model: nn.Module, head: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer with a matmul, and why it is left out, or an empty string."""
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if module is head:
            yield name, "the LM head, whose matmul is part of the loss"
        elif holds_experts(module):
            yield name, "experts, whose matmuls are grouped"
        elif type(module) is nn.Linear:
            odd = module.in_features % MULTIPLE or module.out_features % MULTIPLE
            yield name, f"dimensions that are not multiples of {MULTIPLE}" if odd else ""
        elif isinstance(module, nn.Linear | Conv1D):
            yield name, "other classes of layers"
