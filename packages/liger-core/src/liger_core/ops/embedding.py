# SPDX-License-Identifier: Apache-2.0
"""embedding: look up rows of a table, whose gradient is summed in float32."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.autograd import differentiable
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError, TargetError
from liger_core.kernels import Outputs, reference_kernel
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops._inputs import integers, misuse_table, normal, normals, workloads_of

# The reference sums the gradient of so many columns in float32 at a time, a fraction of the table.
COLUMNS = 512


def check(index: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> None:
    checks.tensor("embedding", "index", index)
    if index.dtype not in (torch.int64, torch.int32):
        checks.fail(DtypeError, "embedding", f"index must have dtype torch.int64 or torch.int32, got {index.dtype}")
    checks.tensor("embedding", "weight", weight)
    checks.floating("embedding", weight=weight)
    if weight.dim() != 2:
        checks.misshapen("embedding", "weight must have shape (rows, width)", weight)
    checks.same_device("embedding", "index", index, weight=weight)
    rows = weight.shape[0]
    if padding_idx is not None:
        checks.integer("embedding", "padding_idx", padding_idx)
        if not 0 <= padding_idx < rows:
            wanted = f"a row of weight, in [0, {rows})"
            checks.fail(OptionError, "embedding", f"padding_idx must be {wanted}, got {padding_idx}")
    if checks.readable(index):
        wrong = (index < 0) | (index >= rows)
        if bool(wrong.any()):
            checks.fail(TargetError, "embedding", f"every index must be in [0, {rows}), got {int(index[wrong][0])}")


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)

    def i(high: int, *shape: int) -> Tensor:
        return integers(device, high, *shape)

    yield Sample("one_block", (i(11, 2, 7), n(11, 64)), why="the width is a power of two: no mask")
    yield Sample("odd_width", (i(11, 9), n(11, 101)), why="mask on the last block")
    yield Sample("several_tiles", (i(5, 6), n(5, 2500)), why="a row takes several column tiles")
    yield Sample(
        "one_row_many_times", (i(1, 150), n(3, 16)), why="one sum over several spans, which begins and ends with them"
    )
    yield Sample("long_runs", (i(3, 200), n(4, 24)), why="sums begin inside of a span and end inside of another")
    yield Sample(
        "mostly_alone",
        (torch.arange(130, device=device).flip(0), n(140, 8)),
        why="sums of one row each, spans that share none",
    )
    runs = torch.arange(4, device=device).repeat_interleave(32)
    yield Sample("whole_spans", (runs, n(5, 16)), why="sums end where spans end")
    why = "no gradient for the padding row, in the middle of the order"
    yield Sample("padding", (i(4, 3, 40), n(4, 32)), {"padding_idx": 2}, why=why, stops=True)
    yield Sample("int32", (i(9, 12).int(), n(9, 32)), why="indices of 32 bits")
    yield Sample("strided_index", (i(9, 6, 4).t(), n(9, 32)), why="the index is not contiguous")
    yield Sample("strided_table", (i(9, 6), n(9, 64)[:, :40]), why="rows of the table are read through their stride")
    yield Sample("transposed_table", (i(9, 6), n(40, 9).t()), why="the last dimension of the table is not contiguous")
    yield Sample("scalar", (i(9), n(9, 16)), why="one index without a dimension")
    yield Sample("empty", (i(9, 0), n(9, 16)), why="no index: nothing is read, and the gradient is zero")
    yield Sample("no_columns", (i(9, 4), n(9, 0)), why="rows without columns")


def misuses(device: torch.device) -> Iterator[Misuse]:
    index, weight = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(7, 8, device=device)
    elsewhere = torch.zeros(7, 8, device="meta")
    yield from misuse_table(
        "embedding", (index, weight),
        ("float_index", DtypeError, "index must have dtype torch.int64 or torch.int32, got torch.float32",
         {}, index.float(), weight),
        ("integer_table", DtypeError, "weight must have a floating dtype, got torch.int32", {}, index, weight.int()),
        ("dimensions", ShapeError, "weight must have shape (rows, width), got (8,)", {}, index, weight[0]),
        ("padding", OptionError, "padding_idx must be a row of weight, in [0, 7), got 7", {"padding_idx": 7}),
        ("padding_kind", OptionError, "padding_idx must be an integer, got 1.5", {"padding_idx": 1.5}),
        ("device", DeviceError, f"weight must be on {index.device} like index, got meta", {}, index, elsewhere),
    )  # fmt: skip
    if device.type == "cpu":
        message = "every index must be in [0, 7), got 7"
        yield from misuse_table("embedding", (index + 7, weight), ("out_of_range", TargetError, message, {}))


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, tokens: int, width: int, rows: int) -> tuple[Tensor, ...]:
        # A few tokens make up most of a text: half of the indices are in the first hundredth of the rows.
        half = tokens // 2
        common, others = integers(device, max(1, rows // 100), half), integers(device, rows, tokens - half)
        index = torch.cat((common, others))[torch.randperm(tokens, device=device)]
        return index, normal(device, dtype, rows, width)

    of_size = workloads_of(draw, "NHV")
    yield of_size(512, 256, 4096, quick=True)
    yield of_size(8192, 2048, 128256)
    yield of_size(16384, 4096, 128256)
    yield of_size(16384, 2560, 262144)


def work(index: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Work:
    size, rows = weight.element_size(), index.numel() * weight.shape[1]
    indices = index.numel() * index.element_size()
    # A row of the table is read once; all of its gradient is written.
    forward = indices + (rows + index.unique().numel() * weight.shape[1]) * size
    return Work(forward, forward + indices + rows * size + weight.numel() * size)


def _allocate(index: Tensor, weight: Tensor, padding: int) -> Outputs:
    return (weight.new_empty((*index.shape, weight.shape[1])),)


def _launch(y: Tensor, /, index: Tensor, weight: Tensor, padding: int) -> None:
    torch.index_select(weight, 0, index.reshape(-1), out=y.view(index.numel(), weight.shape[1]))


def _allocate_backward(grad_y: Tensor, index: Tensor, weight: Tensor, padding: int, needs: list[bool]) -> Outputs:
    return (torch.empty(weight.shape, dtype=weight.dtype, device=weight.device),)


def _launch_backward(
    grad_weight: Tensor, /, grad_y: Tensor, index: Tensor, weight: Tensor, padding: int, needs: list[bool]
) -> None:
    flat, rows = index.reshape(-1), grad_y.reshape(index.numel(), weight.shape[1])
    for first in range(0, weight.shape[1], COLUMNS):
        columns = slice(first, first + COLUMNS)
        upstream, gradient = rows[:, columns].to(accumulator(rows.dtype)), grad_weight[:, columns]
        total = (
            gradient.zero_() if gradient.dtype == upstream.dtype else torch.zeros_like(gradient, dtype=upstream.dtype)
        )
        if total.device.type == "cpu":
            total.index_add_(0, flat, upstream)
        else:
            # On other devices, index_add_ adds in any order, while index_put_ sorts the indices.
            total.index_put_((flat.long(),), upstream, accumulate=True)
        if padding >= 0:
            total[padding] = 0.0
        if total is not gradient:
            gradient.copy_(total)


_embedding = differentiable(
    reference_kernel("embedding", _allocate, _launch),
    reference_kernel("embedding_backward", _allocate_backward, _launch_backward),
    saves=("index", "weight"),
)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout({"index": "…", "weight": "(rows) width"}, ("… width",)),
)  # fmt: skip
def embedding(index: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Look up rows of a table; the gradient of the table is summed in float32, in the same order in every run.

        y[i] = weight[index[i]]
        d weight[v] = Σ d y[i] over the i with index[i] = v          0 for v = padding_idx

    index        (...)           int64 or int32, in [0, rows)
    weight       (rows, width)   any floating dtype
    padding_idx  a row that gets no gradient; None for none
    returns      (..., width), dtype of weight

    An index outside [0, rows) raises TargetError on the CPU; on other devices, where reading it would stall the queue,
    fused backends return NaN. Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    """
    result: Tensor = _embedding(index, weight, -1 if padding_idx is None else padding_idx)
    return result
