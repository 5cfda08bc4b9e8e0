# SPDX-License-Identifier: Apache-2.0
"""LoRA on the matrices of experts: PEFT hands its factors to the op, instead of parametrizing the matrices.

By itself, PEFT parametrizes a matrix as W + s · B A in each call, which computes the sum once for torch's checks alone.
Of a matrix in 4 bits it would dequantize W three times for that, and PEFT 0.21 would not take the adapter away again.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from liger_hf.patch import Patch
from liger_hf.private_transformers import ACTIVATE

# An attribute of forwards that take factors, and the attribute of a module that holds them in a call.
TAKES_FACTORS, FACTORS = "__liger_takes_factors__", "liger_factors"


class Adapter(NamedTuple):
    """The active adapter of a wrapper of PEFT around one parameter."""

    wrapper: Any
    name: str

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A (experts, rank, inner) and s · B (experts, outer, rank)."""
        a, b = self.wrapper.lora_A[self.name].weight, self.wrapper.lora_B[self.name].weight
        count = self.wrapper.num_experts
        # In PEFT's order, the same element of all experts is adjacent.
        b = (b.view(b.shape[0], -1, count).permute(2, 0, 1) * self.wrapper.scaling[self.name]).contiguous()
        return a.view(count, -1, a.shape[1]), b


def patches(model: nn.Module) -> Iterator[Patch]:
    """Yield patches that make the wrappers of PEFT around replaced experts hand over their factors."""
    for module in model.modules():
        if hasattr(module, ACTIVATE) and hasattr(module, "parameter_name") and _takes_factors(module):
            yield Patch(module, ACTIVATE, MethodType(_activate, module))


def _takes_factors(wrapper: Any) -> bool:
    return hasattr(wrapper.get_base_layer().__dict__.get("forward"), TAKES_FACTORS)


@contextmanager
def _activate(wrapper: Any, active: list[str]) -> Iterator[None]:
    names = [name for name in active if name in wrapper.lora_A]
    if len(names) != 1 or wrapper.num_experts < 2 or not _takes_factors(wrapper):
        with getattr(type(wrapper), ACTIVATE)(wrapper, active):
            yield
        return
    adapters = wrapper.get_base_layer().__dict__.setdefault(FACTORS, {})
    adapters[wrapper.parameter_name] = Adapter(wrapper, names[0])
    try:
        yield
    finally:
        del adapters[wrapper.parameter_name]


@contextmanager
def added(module: Any) -> Iterator[None]:
    """Within this context, the adapters of this call are added to the matrices that the module reads."""
    with ExitStack() as stack:
        for name, adapter in module.__dict__.get(FACTORS, {}).items():
            a, b = adapter.factors()
            step = _Sum(a, b, module.is_transposed)
            parametrize.register_parametrization(module, name, step, unsafe=True)
            stack.callback(_remove_last, module, name)
        if module.__dict__.get(FACTORS):
            stack.enter_context(parametrize.cached())
        yield


def _remove_last(module: Any, name: str) -> None:
    steps = module.parametrizations[name]
    if len(steps) > 1:
        del steps[-1]
    else:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


class _Sum(nn.Module):
    """Adds a low-rank adapter to matrices."""

    def __init__(self, a: Tensor, b: Tensor, transposed: bool) -> None:
        super().__init__()
        self.a, self.b, self.transposed = a, b, transposed

    def forward(self, matrices: Tensor) -> Tensor:
        with torch.autocast(matrices.device.type, enabled=False):
            product = self.b.to(matrices.dtype) @ self.a.to(matrices.dtype)
        return matrices + (product.mT if self.transposed else product)
