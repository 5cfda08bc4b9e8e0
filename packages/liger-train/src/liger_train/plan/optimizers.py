# SPDX-License-Identifier: Apache-2.0
"""The memory of each optimizer of `liger train`: its state, and its workspace within a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from liger_train.plan.ledger import rounded

# bitsandbytes keeps the moments of smaller weights in float32 and pages those of larger ones; the moments of a block
# share a scale.
SMALLEST_IN_8_BITS, SMALLEST_PAGED, BITSANDBYTES_BLOCK = 4096, 100_000, 256
RANK = 128


@dataclass(frozen=True)
class Weight:
    """A trained weight, and the part of it on a rank."""

    elements: int
    shape: tuple[int, ...]
    itemsize: int
    embedding: bool = False
    linear: bool = False

    @property
    def low_rank(self) -> bool:
        """Whether GaLore and APOLLO project its gradient: the Trainer selects linear layers."""
        return self.linear and len(self.shape) == 2


# From a weight to bytes.
Size = Callable[[Weight], int]


@dataclass(frozen=True)
class Optimizer:
    """`state` is allocated from the first step on, `step` while a weight is updated."""

    state: Size
    step: Size = lambda weight: 0
    drops_gradients: bool = False


def weights_of(model: nn.Module) -> list[Weight]:
    """The trained weights of a model."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [
        Weight(p.numel(), tuple(p.shape), p.itemsize, id(p) in embeddings, name in names)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def _adamw(weight: Weight) -> int:
    """Two moments in the dtype of the weight, and the step count."""
    return 2 * rounded(weight.elements * weight.itemsize) + rounded(4)


def _in_32_bits(weight: Weight) -> int:
    return 2 * rounded(4 * weight.elements)


def _in_8_bits(weight: Weight) -> int:
    if weight.elements < SMALLEST_IN_8_BITS or weight.embedding:
        return _in_32_bits(weight)
    return 2 * rounded(weight.elements) + _scales(weight.elements, BITSANDBYTES_BLOCK)


def _all_in_8_bits(weight: Weight) -> int:
    """Two 8-bit moments, also of embeddings: the Trainer keeps those in 32 bits only for bitsandbytes optimizers."""
    return _in_8_bits(replace(weight, embedding=False))


def _paged(state: Size) -> Size:
    """Paged moments are in managed memory, which the driver moves to the host when the device is full."""

    def held(weight: Weight) -> int:
        if weight.elements < SMALLEST_PAGED:
            return state(weight)
        whole = weight.embedding or state is _in_32_bits
        return 0 if whole else _scales(weight.elements, BITSANDBYTES_BLOCK)

    return held


def _torchao(bits: int, block: int) -> Size:
    def held(weight: Weight) -> int:
        if weight.elements < SMALLEST_IN_8_BITS or weight.elements % block:
            return _adamw(weight)
        return 2 * rounded(weight.elements * bits // 8) + _scales(weight.elements, block)

    return held


def _scales(elements: int, block: int) -> int:
    return 2 * rounded(4 * -(-elements // block))


def _adafactor(weight: Weight) -> int:
    """A row and a column of second moments."""
    if len(weight.shape) < 2:
        return rounded(4 * weight.elements)
    return rounded(4 * weight.elements // weight.shape[-1]) + rounded(4 * weight.elements // weight.shape[-2])


def _adafactor_step(weight: Weight) -> int:
    """The update and its squares in float32, and float32 copies of the weight and its gradient if they have another
    dtype."""
    return (2 if weight.itemsize == 4 else 4) * rounded(4 * weight.elements)


def _low_rank(state: Size, projection: Size, rank: int = RANK) -> Size:
    """Projected moments, and the projection."""

    def held(weight: Weight) -> int:
        if not weight.low_rank or min(weight.shape) <= rank:
            return state(weight)
        large = max(weight.shape)
        return state(Weight(rank * large, (large, rank), weight.itemsize)) + projection(weight)

    return held


def _galore(weight: Weight) -> int:
    """The projection, which in float32 is a view that keeps all singular vectors alive, and otherwise a copy."""
    small = min(weight.shape)
    return rounded(4 * small * small if weight.itemsize == 4 else RANK * small * weight.itemsize)


def _apollo(weight: Weight) -> int:
    return rounded(RANK * min(weight.shape) * weight.itemsize)


def _apollo_mini(weight: Weight) -> int:
    return rounded(min(weight.shape) * weight.itemsize)


def _galore_step(weight: Weight) -> int:
    """The singular value decomposition in float32: a copy, two factors and a workspace.

    The update itself needs less.
    """
    return 4 * rounded(4 * weight.elements) if weight.low_rank else 2 * rounded(weight.elements * weight.itemsize)


def _galore_8bit_step(weight: Weight) -> int:
    """The workspace of GaLore for projected weights; other weights are updated in place."""
    return _galore_step(weight) if weight.low_rank else 0


def _apollo_step(weight: Weight) -> int:
    """The scaled gradient, and the product that computes it."""
    return 2 * rounded(weight.elements * weight.itemsize)


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(_adamw),
    "adamw-8bit": Optimizer(_in_8_bits),
    "paged-adamw": Optimizer(_paged(_in_32_bits)),
    "paged-adamw-8bit": Optimizer(_paged(_in_8_bits)),
    "adamw-torchao-8bit": Optimizer(_torchao(8, 256)),
    "adamw-torchao-4bit": Optimizer(_torchao(4, 128)),
    "adafactor": Optimizer(_adafactor, _adafactor_step),
    "galore": Optimizer(_low_rank(_adamw, _galore), _galore_step),
    "galore-8bit": Optimizer(_low_rank(_all_in_8_bits, _galore), _galore_8bit_step),
    "galore-layerwise": Optimizer(_low_rank(_adamw, _galore), _galore_step, drops_gradients=True),
    "apollo": Optimizer(_low_rank(_adamw, _apollo), _apollo_step),
    "apollo-mini": Optimizer(_low_rank(_adamw, _apollo_mini, rank=1), _apollo_step),
}
