# SPDX-License-Identifier: Apache-2.0
"""The memory of each optimizer of `liger train`: its state, and its workspace in a step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from liger_train.plan.ledger import rounded

# In bitsandbytes: the smallest size of a weight with 8-bit moments, and with paged moments; the number of moments that
# share a scale.
SMALLEST_IN_8_BITS, SMALLEST_PAGED, BITSANDBYTES_BLOCK = 4096, 100_000, 256
# The rank of GaLore and APOLLO.
RANK = 128


@dataclass(frozen=True)
class Weight:
    """A trained weight; `elements` is the size of its shard on a rank."""

    elements: int
    shape: tuple[int, ...]
    itemsize: int
    embedding: bool = False
    linear: bool = False

    @property
    def low_rank(self) -> bool:
        """Whether GaLore and APOLLO project its gradient, as the Trainer sets up for linear layers."""
        return self.linear and len(self.shape) == 2


Size = Callable[[Weight], int]


@dataclass(frozen=True)
class Optimizer:
    """The memory of an optimizer.

    state            bytes of the state of a weight
    step             bytes of workspace while a weight is updated
    drops_gradients  whether each gradient is freed as soon as its weight is updated
    """

    state: Size
    step: Size = lambda weight: 0
    drops_gradients: bool = False


def weights_of(model: nn.Module) -> list[Weight]:
    """Return the trained weights of a model."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [
        Weight(p.numel(), tuple(p.shape), p.itemsize, id(p) in embeddings, name in names)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def _adamw(weight: Weight) -> int:
    """Return the bytes of two moments in the dtype of the weight, and of the step count."""
    return 2 * rounded(weight.elements * weight.itemsize) + rounded(4)


def _in_32_bits(weight: Weight) -> int:
    return 2 * rounded(4 * weight.elements)


def _in_8_bits(weight: Weight) -> int:
    if weight.elements < SMALLEST_IN_8_BITS or weight.embedding:
        return _in_32_bits(weight)
    return 2 * rounded(weight.elements) + _scales(weight.elements, BITSANDBYTES_BLOCK)


def _all_in_8_bits(weight: Weight) -> int:
    """Return the bytes of 8-bit moments; the Trainer exempts embeddings for bitsandbytes' optimizers only."""
    return _in_8_bits(replace(weight, embedding=False))


def _paged(state: Size, weight: Weight) -> int:
    """Return the bytes of moments that are not paged; the driver moves paged ones to the host if the device is full."""
    if weight.elements < SMALLEST_PAGED:
        return state(weight)
    all_paged = weight.embedding or state is _in_32_bits
    return 0 if all_paged else _scales(weight.elements, BITSANDBYTES_BLOCK)


def _torchao(bits: int, block: int, weight: Weight) -> int:
    if weight.elements < SMALLEST_IN_8_BITS or weight.elements % block:
        return _adamw(weight)
    return 2 * rounded(weight.elements * bits // 8) + _scales(weight.elements, block)


def _scales(elements: int, block: int) -> int:
    return 2 * rounded(4 * -(-elements // block))


def _adafactor(weight: Weight) -> int:
    """Return the bytes of a row and a column of second moments."""
    if len(weight.shape) < 2:
        return rounded(4 * weight.elements)
    return rounded(4 * weight.elements // weight.shape[-1]) + rounded(4 * weight.elements // weight.shape[-2])


def _adafactor_step(weight: Weight) -> int:
    """Return the bytes of the update and its squares, and of copies of weight and gradient, all in float32."""
    return (2 if weight.itemsize == 4 else 4) * rounded(4 * weight.elements)


def _low_rank(state: Size, projection: Size, weight: Weight, rank: int = RANK) -> int:
    """Return the bytes of projected moments, and of the projection."""
    if not weight.low_rank or min(weight.shape) <= rank:
        return state(weight)
    large = max(weight.shape)
    return state(Weight(rank * large, (large, rank), weight.itemsize)) + projection(weight)


def _galore(weight: Weight) -> int:
    """Return the bytes of the projection: in float32, a view of all singular vectors; otherwise a copy."""
    small = min(weight.shape)
    return rounded(4 * small * small if weight.itemsize == 4 else RANK * small * weight.itemsize)


def _apollo(weight: Weight, rank: int = RANK) -> int:
    return rounded(rank * min(weight.shape) * weight.itemsize)


def _galore_step(weight: Weight) -> int:
    """Return the bytes of the singular value decomposition in float32: a copy, two factors and a workspace.

    The update itself needs less.
    """
    return 4 * rounded(4 * weight.elements) if weight.low_rank else 2 * rounded(weight.elements * weight.itemsize)


def _galore_8bit_step(weight: Weight) -> int:
    """Return the workspace of GaLore for projected weights; other weights are updated in place."""
    return _galore_step(weight) if weight.low_rank else 0


def _apollo_step(weight: Weight) -> int:
    """Return the bytes of the scaled gradient, and of the product that computes it."""
    return 2 * rounded(weight.elements * weight.itemsize)


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(_adamw),
    "adamw-8bit": Optimizer(_in_8_bits),
    "paged-adamw": Optimizer(partial(_paged, _in_32_bits)),
    "paged-adamw-8bit": Optimizer(partial(_paged, _in_8_bits)),
    "adamw-torchao-8bit": Optimizer(partial(_torchao, 8, 256)),
    "adamw-torchao-4bit": Optimizer(partial(_torchao, 4, 128)),
    "adafactor": Optimizer(_adafactor, _adafactor_step),
    "galore": Optimizer(partial(_low_rank, _adamw, _galore), _galore_step),
    "galore-8bit": Optimizer(partial(_low_rank, _all_in_8_bits, _galore), _galore_8bit_step),
    "galore-layerwise": Optimizer(partial(_low_rank, _adamw, _galore), _galore_step, drops_gradients=True),
    "apollo": Optimizer(partial(_low_rank, _adamw, _apollo), _apollo_step),
    "apollo-mini": Optimizer(partial(_low_rank, _adamw, partial(_apollo, rank=1), rank=1), _apollo_step),
}
