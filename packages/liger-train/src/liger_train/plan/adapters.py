# SPDX-License-Identifier: Apache-2.0
"""LoRA as peft adds it, for planning where peft is not installed."""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from liger_core.errors import OptionError
from liger_core.private_names import replacing
from liger_train.adapters import adaptable, targeted
from liger_train.float8 import holds_experts
from liger_train.model import adapt, adapter_note
from liger_train.setup import ALL_LINEAR, Setup

NAME = "default"


class Adapted(nn.Module):
    """A frozen linear layer plus B A x · α / rank, with the parts and in the order of peft, which determine what Liger
    replaces and the lifetime of intermediate results.
    """

    disable_adapters = merged = False

    def __init__(self, base: Any, rank: int, alpha: int) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapters, self.scaling = [NAME], {NAME: alpha / rank}
        first, second = base.weight.shape
        self.in_features, self.out_features = (second, first) if isinstance(base, nn.Linear) else (first, second)
        with base.weight.device:
            a = nn.Linear(self.in_features, rank, bias=False, dtype=torch.float32)
            b = nn.Linear(rank, self.out_features, bias=False, dtype=torch.float32)
        self.lora_A, self.lora_B = nn.ModuleDict({NAME: a}), nn.ModuleDict({NAME: b})
        self.lora_dropout = nn.ModuleDict({NAME: nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        dtype, a, b = result.dtype, self.lora_A[NAME], self.lora_B[NAME]
        x = x.to(next(a.parameters()).dtype)
        result = result + b(a(x)) * self.scaling[NAME]
        return result.to(dtype)


def adapted(model: Any, setup: Setup, notes: list[str]) -> Any:
    """A replacement for model.adapt: uses peft if installed, otherwise builds a model with the same memory.

    Raises OptionError for a model with experts if peft, which has several ways to adapt them, is not installed.
    """
    if importlib.util.find_spec("peft") is not None:
        # swap_tensors rejects fake tensors.
        with replacing(torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new)):
            return adapt(model, setup, notes)
    if any(holds_experts(module) for module in model.modules()):
        raise OptionError(f"plan: --adapter {setup.adapter} needs peft for a model with experts; pip install peft")
    model.requires_grad_(False)
    linear, _ = adaptable(model)
    for name in linear:
        if setup.adapter_targets == ALL_LINEAR or targeted(setup, [name]):
            model.set_submodule(name, Adapted(model.get_submodule(name), setup.adapter_rank, setup.adapter_alpha))
    notes.append(adapter_note(model, setup))
    return model
