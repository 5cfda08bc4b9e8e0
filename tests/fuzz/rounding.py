# SPDX-License-Identifier: Apache-2.0
"""Random rounding: estimates the error of plain PyTorch by perturbing every arithmetic result by one rounding.

A call of a few elements may be rounded all luckily, so that one run of a formula says little about what is fair. Under
`Rounding` its results, in the forward and in the backward pass, move by up to an ulp, and sums of n terms by up to √n/2
ulp of the sum of magnitudes, as another order of summation would move them, term after term for instance. Inputs, and
what only moves values, stay as they are: a difference of two inputs is as exact as before. (Parker 1997, Monte Carlo
arithmetic.)
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
POINTWISE = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.reciprocal, aten.pow, aten.sqrt, aten.rsqrt, aten.exp,
    aten.log, aten.tanh, aten.erf, aten.sigmoid, aten.tanh_backward, aten.sigmoid_backward,
}  # fmt: skip
SUMS = {aten.sum, aten.mean, aten.mm, aten.bmm, aten.addmm, aten.dot, aten.mv}


def sum_of_magnitudes(func: Any, args: Any, kwargs: Any) -> Tensor:
    return func(*tree_map_only(Tensor, torch.abs, args), **kwargs)


class Reach(TorchDispatchMode):
    """Notes whether a result, or the sum of the magnitudes of what it sums, comes within a factor of 2 of overflow of
    its dtype."""

    near_overflow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point() and result.numel():
            size = sum_of_magnitudes(func, args, kwargs) if func.overloadpacket in SUMS else result
            self.near_overflow |= bool((size.abs() > torch.finfo(size.dtype).max / 2).any())
        return result


class Rounding(TorchDispatchMode):
    """Moves every arithmetic result by a random part of a rounding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if func.overloadpacket in SUMS:
            terms = args[1 if func.overloadpacket is aten.addmm else 0]
            reduces = func.overloadpacket in (aten.sum, aten.mean)
            count = terms.numel() // max(1, result.numel()) if reduces else terms.shape[-1]
            return self.moved(result, sum_of_magnitudes(func, args, kwargs), max(1.0, count**0.5 / 2))
        narrowed = (
            func.overloadpacket is aten._to_copy and args[0].is_floating_point() and result.itemsize < args[0].itemsize
        )
        return self.moved(result, result) if narrowed or func.overloadpacket in POINTWISE else result

    def moved(self, result: Tensor, magnitude: Tensor, roundings: float = 1.0) -> Tensor:
        # From -1 to 1: less than half an ulp would be rounded away.
        part = (2.0 * torch.rand(result.shape, generator=self.generator, dtype=torch.float64) - 1.0).to(result.device)
        limits = torch.finfo(result.dtype)
        # Below the normal numbers all roundings are as large.
        ulp = roundings * limits.eps * magnitude.double().abs().clamp(min=limits.smallest_normal)
        moved = (result.double() + part * ulp).to(result.dtype)
        return torch.where(moved.isfinite(), moved, result)
