# SPDX-License-Identifier: Apache-2.0
"""Descriptions of arguments that hypothesis draws: plain values, so that a failing example prints as Python that builds
it again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.variations import beside

FLOATS = ("float32", "bfloat16", "float16")
# What a composite strategy of hypothesis gets to draw with.
Draw = Callable[[st.SearchStrategy[Any]], Any]

# Failing examples shrink to the first sizes; then come primes, powers of two and their neighbors.
SMALL = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 61, 63, 64, 65)
SIZES = (*SMALL, 100, 127, 128, 129, 251, 256, 257, 509, 512, 513, 600, 1021, 1024, 1025)
WIDE = (2047, 2048, 2049, 4095, 4096, 4097, 5120, 7919, 8192, 8193, 16384, 16411)
# Strides of a tensor, see `arranged`; in the first ones every element has memory of its own, so that it can be written.
WRITABLE = ("dense", "sliced", "transposed", "spread", "rotated", "unaligned")
LAYOUTS = (*WRITABLE, "expanded")
SEEDS = st.integers(0, 9999)


@dataclass(frozen=True)
class Floats:
    """A floating tensor: values · scale + offset, cut to the range of its dtype.

    values  "normal"; "zeros"; "ones"; "steps", integers from -3 to 3, which tie; "outlier", one element in the
            thousands; "impossible", of which every third column is -inf
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str = "dense"
    values: str = "normal"
    scale: float = 1.0
    offset: float = 0.0
    seed: int = 0

    def build(self, device: torch.device) -> Tensor:
        dtype = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.values in ("zeros", "ones"):
            values = torch.full_like(values, self.values == "ones")
        elif self.values == "steps":
            values = torch.randint(-3, 4, self.shape, generator=generator).double()
        elif self.values == "outlier" and values.numel():
            values.view(-1)[self.seed % values.numel()] *= 4096
        most = torch.finfo(dtype).max
        values = (values * self.scale + self.offset).clamp(-most, most)
        if self.values == "impossible":
            values[..., 1::3] = -torch.inf
        return arranged(values.to(device, dtype), self.layout)


@dataclass(frozen=True)
class Labels:
    """Targets in [0, classes), of which every n-th is ignored: none for 0, all for 1. Every `possible`-th class occurs.

    distinct  the last dimension holds different classes
    """

    shape: tuple[int, ...]
    classes: int
    ignore_index: int = -100
    ignored: int = 0
    possible: int = 1
    layout: str = "dense"
    seed: int = 0
    distinct: bool = False

    def build(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        target = torch.randint(-(-self.classes // self.possible), self.shape, generator=generator) * self.possible
        if self.distinct:
            order = torch.rand(*self.shape[:-1], self.classes, generator=generator).argsort(-1)
            target = order[..., : self.shape[-1]].contiguous()
        if self.ignored and target.numel():
            target.view(-1)[:: self.ignored] = self.ignore_index
        return arranged(target.to(device), self.layout)


@dataclass(frozen=True)
class Scalar:
    """A tensor without dimensions."""

    value: float
    dtype: str

    def build(self, device: torch.device) -> Tensor:
        return torch.tensor(self.value, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class Example:
    """One call of an op, and what is asked of it.

    asked     the inputs that get a gradient
    upstream  the layouts of the upstream gradients, output by output in turn; "none": the output is not used
    factor    scale of the upstream gradients
    twice     the backward pass runs two more times, the last of which frees the graph
    shared    inputs that are another one: name → the other's name
    """

    arguments: Mapping[str, Any]
    asked: tuple[str, ...]
    upstream: tuple[str, ...] = ("dense",)
    factor: float = 1.0
    twice: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def build(self, device: torch.device) -> dict[str, Any]:
        """The arguments of the call."""
        built = dict(self.arguments)
        for name, value in built.items():
            if isinstance(value, Floats | Labels | Scalar):
                built[name] = value.build(device)
            elif isinstance(value, Tensor):
                built[name] = value.to(device)
        return {**built, **{name: built[other] for name, other in self.shared.items()}}


def arranged(dense: Tensor, layout: str) -> Tensor:
    """The same values with other strides; differentiable.

    sliced      columns of a wider tensor, the first one not aligned
    spread      every other element of a longer tensor
    transposed  the last two dimensions lie in memory the other way round
    rotated     the first dimension is adjacent in memory
    unaligned   dense, from the second element of its memory on
    expanded    the first slice for all of them, by a stride of 0
    """
    if dense.dim() == 0 or layout == "dense":
        return dense
    if layout == "expanded":
        return dense[:1].expand(dense.shape)
    if layout in ("transposed", "rotated") and dense.dim() > 1:
        source, target = (-1, -2) if layout == "transposed" else (0, -1)
        return dense.movedim(source, target).contiguous().movedim(target, source)
    other = beside(dense)
    if layout == "unaligned":
        return torch.cat((dense.new_full((1,), other), dense.reshape(-1)))[1:].view(dense.shape)
    if layout == "sliced" and dense.dim() > 1:
        left, right = (dense.new_full((*dense.shape[:-1], columns), other) for columns in (1, 2))
        return torch.cat((left, dense, right), dim=-1)[..., 1:-2]
    return torch.stack((torch.full_like(dense, other), dense), dim=-1)[..., 1]


def weighted(*values: tuple[int, Sequence[Any]]) -> st.SearchStrategy[Any]:
    """(weight, values): one of the values, of the first ones most often."""
    return st.sampled_from([value for weight, group in values for _ in range(weight) for value in group])


def one_of(draw: Draw, values: Sequence[Any]) -> Any:
    return draw(st.sampled_from(values))


def mostly(draw: Draw, weight: int, usual: Any, *others: Any) -> Any:
    """The first value, so many times as often as each of the others."""
    return draw(weighted((weight, (usual,)), (1, others)))


def rarely(draw: Draw, weight: int) -> bool:
    """Whether it is the one call among so many others."""
    return bool(mostly(draw, weight, False, True))


# Most tensors are dense and moderate, or hypothesis would hardly ever draw a call with one oddity only.
layouts = weighted((4, ("dense",)), (1, LAYOUTS))
writable = weighted((4, ("dense",)), (1, WRITABLE))
scales = weighted((8, (1.0,)), (1, (1e-3, 1e-6, 30.0, 1e3, 1e6, 1e18)))
offsets = weighted((8, (0.0,)), (1, (10.0, -10.0, 1e3, -1e3, 1e5, -1e5)))
values = weighted((8, ("normal",)), (1, ("zeros", "ones", "steps", "outlier")))


def floats(
    draw: Draw, shape: tuple[int, ...], dtype: str, layout: st.SearchStrategy[str] = layouts, scale: float = 1.0
) -> Floats:
    """A tensor of any layout and magnitude."""
    return Floats(shape, dtype, draw(layout), draw(values), scale * draw(scales), draw(offsets), draw(SEEDS))


def moderate(draw: Draw, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Floats:
    """A tensor of any layout with moderate values."""
    return Floats(shape, dtype, draw(layouts), scale=scale, seed=draw(SEEDS))


def size(draw: Draw, most: int, sizes: Sequence[int] = SIZES, least: int = 0) -> int:
    """One of the sizes, 0 in one call out of twenty."""
    some = [s for s in sizes if max(1, least) <= s <= most]
    return int(draw(st.sampled_from(some if least else some * -(-19 // len(some)) + [0])))


def leading(draw: Draw, most: int) -> tuple[int, ...]:
    """Up to three leading dimensions with at most so many rows."""
    shape: tuple[int, ...] = ()
    for _ in range(draw(weighted((2, (1, 2)), (1, (0, 3))))):
        shape += (size(draw, max(1, most // max(1, prod(shape)))),)
    return shape


def subset(draw: Draw, names: Sequence[str]) -> tuple[str, ...]:
    """Which inputs get a gradient: mostly all."""
    some = rarely(draw, 2)
    return tuple(name for name in names if not some or draw(st.booleans()))


def example(draw: Draw, arguments: Mapping[str, Any], names: Sequence[str], **more: Any) -> Example:
    """A call with these arguments, of which these may get a gradient."""
    upstream = draw(st.lists(weighted((4, ("dense",)), (1, (*LAYOUTS, "none"))), min_size=1, max_size=2))
    factor = mostly(draw, 6, 1.0, -3.0, 1e-4, 1e4, 0.0)
    asked = subset(draw, [n for n in names if arguments.get(n) is not None])
    return Example(dict(arguments), asked, tuple(upstream), factor, rarely(draw, 3), seed=draw(SEEDS), **more)
