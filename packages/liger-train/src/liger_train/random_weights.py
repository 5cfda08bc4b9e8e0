# SPDX-License-Identifier: Apache-2.0
"""Random weights, one module at a time: a model that is quantized as it loads is never whole in 16 bits."""

import copy
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def random_weights(model: Any, device: torch.device, seed: int) -> Mapping[str, Any]:
    """Return a state dict for a model on the meta device, each of whose values is initialized when it is read.

    A value depends on the seed and its name alone, not on the order of reading. Tied weights are there once.
    """
    weights, known = {}, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            weights[name] = _RandomWeight(model, name, device, seed)
        known.add(id(tensor))
    return weights


class _RandomWeight:
    """A weight that reads like one of a safetensors file: `weight[...]` makes the tensor."""

    def __init__(self, model: Any, name: str, device: torch.device, seed: int) -> None:
        self.model, self.name, self.device, self.seed = model, name, device, seed

    def __getitem__(self, _: Any) -> Tensor:
        path, _, last = self.name.rpartition(".")
        module = copy.deepcopy(self.model.get_submodule(path)).to_empty(device=self.device, recurse=False)
        with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed + zlib.crc32(self.name.encode()))
            self._initializer(path)._init_weights(module)
        return module.state_dict()[last]

    def _initializer(self, path: str) -> Any:
        """Return the innermost Transformers model around a module; it knows how to initialize the module."""
        parts = path.split(".")
        around = [self.model.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1)]
        return next((module for module in around if isinstance(module, PreTrainedModel)), self.model)
