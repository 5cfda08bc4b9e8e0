# SPDX-License-Identifier: Apache-2.0
"""What is generated around every sample: other strides of the upstream gradients, other magnitudes of the inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# (arguments, names of those that get a gradient) → arguments
Change = Callable[[Mapping[str, Any], list[str]], dict[str, Any]]


def expanded(dense: Tensor, output: int) -> Tensor:
    """One value with stride 0 everywhere, as `.sum().backward()` gives it."""
    return dense[(slice(0, 1),) * dense.dim()].expand(dense.shape)


def repeated_rows(dense: Tensor, output: int) -> Tensor:
    """One row for all of them, as a mean over tokens gives it."""
    return dense[(slice(0, 1),) * (dense.dim() - 1)].expand(dense.shape)


def repeated_columns(dense: Tensor, output: int) -> Tensor:
    """One value a row, as a sum over the width gives it."""
    return dense[..., :1].expand(dense.shape)


def transposed(dense: Tensor, output: int) -> Tensor:
    """The same values, the first dimension adjacent in memory."""
    backwards = tuple(reversed(range(dense.dim())))
    return dense.permute(backwards).contiguous().permute(backwards)


def beside(dense: Tensor) -> Any:
    """What stands beside a slice, and must not be read:

    NaN, or a number where the matmuls of this CPU do read it and multiply it by 0.
    """
    if not dense.is_floating_point():
        return dense.dtype != torch.bool and -7_777
    return 7_777.0 if dense.device.type == "cpu" and _reads_past_rows(dense.dtype) else torch.nan


@cache
def _reads_past_rows(dtype: torch.dtype) -> bool:
    """True for bfloat16 on CPUs with AMX, if the width is odd (torch 2.13)."""
    rows = torch.cat((torch.ones(64, 31, dtype=dtype), torch.full((64, 2), torch.nan, dtype=dtype)), 1)[:, :31]
    return bool((rows @ torch.ones(31, 16, dtype=dtype)).isnan().any())


def sliced(dense: Tensor, output: int) -> Tensor:
    """The same values as columns of a wider tensor, or as every other element of a longer one.

    Outputs get row strides of their own, so that none can be read with another's. The first value is not aligned to 16
    bytes.
    """
    other = beside(dense)
    if dense.dim() == 1:
        return torch.stack((torch.full_like(dense, other), dense), dim=-1)[:, 1]
    left, right = (dense.new_full((*dense.shape[:-1], size), other) for size in (1, 2 + output))
    return torch.cat((left, dense, right), dim=-1)[..., 1 : -2 - output]


@dataclass(frozen=True)
class Layout:
    """Strides of an upstream gradient:

    `make(dense, number of the output)`, for outputs of at least so many dimensions.
    """

    make: Callable[[Tensor, int], Tensor]
    dimensions: int

    def __call__(self, dense: Tensor, output: int) -> Tensor:
        return self.make(dense, output) if dense.dim() >= self.dimensions else dense


LAYOUTS = {
    "expanded": Layout(expanded, 1),
    "repeated_rows": Layout(repeated_rows, 2),
    "repeated_columns": Layout(repeated_columns, 2),
    "transposed": Layout(transposed, 2),
    "sliced": Layout(sliced, 1),
}


def scaled(factor: float) -> Change:
    """Multiply every input that gets a gradient."""

    def change(arguments: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        return {n: v * factor if n in names else v for n, v in arguments.items()}

    return change


def shifted(name: str, offset: float) -> Change:
    """Add a common offset to one input."""

    def change(arguments: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        return {**arguments, name: arguments[name] + offset}

    return change


def laid(layout: str) -> Change:
    """Give every input these strides, targets and masks too; its values stay."""

    def change(arguments: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        return {
            n: LAYOUTS[layout](v.detach(), i) if isinstance(v, Tensor) and v.dim() else v
            for i, (n, v) in enumerate(arguments.items())
        }

    return change


# Strides that keep all values.
INPUT_LAYOUTS = {"inputs_transposed": laid("transposed"), "inputs_sliced": laid("sliced")}
# Small enough to show what cancels near 0, large enough to saturate an exponential.
SCALES = {"small": scaled(1e-3), "large": scaled(30.0)}
# Beyond the range of exp in float32, on either side.
OFFSETS = {"raised": 1000.0, "lowered": -1000.0}
