# SPDX-License-Identifier: Apache-2.0
"""Matmuls of groups of rows with a matrix each, in plain PyTorch; and the order of rows that makes the groups."""

from collections.abc import Iterator
from itertools import pairwise, starmap

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Outputs, multiply, reference_kernel


def grouped(index: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots of index (tokens, k), numbered row by row, by their groups 0 … count - 1.

    order  (slots,)   the slot of each row; slots of one group keep their order, and those that name no group come last
    row    (slots,)   the row of each slot
    ends   (count,)   where the rows of each group end, int32
    """
    flat = index.reshape(-1)
    group = torch.where((flat >= 0) & (flat < count), flat, count).int()
    group, order = torch.sort(group, stable=True)
    ends = torch.searchsorted(
        group, torch.arange(count, dtype=torch.int32, device=index.device), right=True, out_int32=True
    )
    rows = torch.arange(flat.shape[0], device=index.device)
    return order, torch.empty_like(order).scatter_(0, order, rows), ends


def grouped_linear(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Apply `linear` to each group of rows with its own matrix; rows after the last end give 0.

    rows      (n, inner)
    matrices  (groups, outer, inner)
    ends      (groups,), the row where each group ends
    returns   (n, outer)
    """
    result: Tensor = _grouped_linear(rows, matrices, ends)
    return result


def adapted_linear(rows: Tensor, matrices: Tensor, a: Tensor | None, b: Tensor | None, ends: Tensor) -> Tensor:
    """Return `grouped_linear`, plus the low-rank adapter of each group if there is one.

    a  (groups, rank, inner)
    b  (groups, outer, rank)
    """
    y = grouped_linear(rows, matrices, ends)
    return y if a is None or b is None else y + grouped_linear(grouped_linear(rows, a, ends), b, ends)


def _allocate(rows: Tensor, matrices: Tensor, ends: Tensor) -> Outputs:
    return (rows.new_empty(rows.shape[0], matrices.shape[1]),)


def _launch(out: Tensor, /, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    _multiply(out, rows, matrices.mT, ends)


def _allocate_backward(grad_out: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor, needs: list[bool]) -> Outputs:
    return torch.empty_like(rows) if needs[0] else None, torch.empty_like(matrices) if needs[1] else None


def _launch_backward(
    grad_rows: Tensor | None, grad_matrices: Tensor | None, /, grad_out: Tensor, rows: Tensor, matrices: Tensor,
    ends: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if grad_rows is not None:
        _multiply(grad_rows, grad_out, matrices, ends)
    if grad_matrices is not None:
        for number, group in enumerate(_groups(ends, rows.shape[0])):
            multiply(grad_matrices[number], _of_group(grad_out, group).t(), _of_group(rows, group))


def _multiply(out: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    out.zero_()
    for matrix, group in zip(matrices, _groups(ends, rows.shape[0]), strict=True):
        if isinstance(group, slice):
            multiply(out[group], rows[group], matrix)
        else:
            product = torch.empty_like(out)
            multiply(product, rows, matrix)
            # Not a sum with zeros: a NaN in the matrix must not reach the rows of other groups.
            out.copy_(torch.where(group, product, out))


def _groups(ends: Tensor, count: int) -> Iterator[slice | Tensor]:
    """Yield the slice of each group's rows on the CPU, elsewhere a mask (count, 1).

    Slicing would synchronize to learn the size of a group.
    """
    if ends.device.type == "cpu":
        yield from starmap(slice, pairwise([0, *ends.tolist()]))
        return
    group = torch.searchsorted(ends, torch.arange(count, dtype=torch.int32, device=ends.device), right=True)
    for number in range(ends.shape[0]):
        yield (group == number).unsqueeze(1)


def _of_group(x: Tensor, group: slice | Tensor) -> Tensor:
    """Return the rows of a group; all rows, zeros outside the group, if it is a mask."""
    return x[group] if isinstance(group, slice) else torch.where(group, x, 0.0)


_grouped_linear = differentiable(
    reference_kernel("grouped_linear", _allocate, _launch),
    reference_kernel("grouped_linear_backward", _allocate_backward, _launch_backward),
    saves=("rows", "matrices", "ends"),
)
