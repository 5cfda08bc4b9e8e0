# SPDX-License-Identifier: Apache-2.0
"""Random tensors for samples and workloads, and wrong calls that ops share."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_core.errors import DtypeError, LigerError, OptionError, ShapeError
from liger_core.op import Misuse, Sample, Work, Workload

LONG = torch.int64
# The sizes of the benchmark's series: rows, widths, classes.
ROWS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
WIDTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CLASSES = (8192, 32000, 65536, 128256, 262144)


def normal(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Return normally distributed values, drawn in float32 so that every dtype sees the same ones."""
    return (torch.randn(shape, device=device) * scale).to(dtype)


def normals(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return `normal` for a device and a dtype."""
    return functools.partial(normal, device, dtype)


def sized(device: torch.device, on_gpus: int, elsewhere: int) -> int:
    """Return a size of a sample: the one for GPUs, or one that takes Triton's interpreter seconds instead of a minute.

    A GPU runs hundreds of programs at once, the interpreter a few.
    """
    return on_gpus if device.type == "cuda" else elsewhere


def sample_table(*rows: tuple[Any, ...], constants: tuple[str, ...] = ()) -> Iterator[Sample]:
    """Yield the samples of rows (name, args, options, why, *frozen); constants are frozen in all of them."""
    for name, args, options, why, *frozen in rows:
        yield Sample(name, tuple(args), options, why, (*constants, *frozen))


def row_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield samples for an op that maps every row by itself: shapes, strides and values that matter to kernels."""

    n = normals(device, dtype)
    impossible = n(5, 64)
    impossible[:, ::3] = -torch.inf
    yield Sample("one_block", (n(2, 3, 64),), why="the width is a power of two: no mask")
    yield Sample("odd_width", (n(5, 100),), why="masked lanes must change nothing")
    yield Sample("small_width", (n(37, 24),), why="many rows per program, rows not a multiple of them")
    yield Sample("whole_row", (n(3, 4096),), why="one row a program, as wide as its block")
    yield Sample("impossible", (impossible,), why="the probability of minus infinity is zero, and so is its gradient")
    yield Sample("strided_rows", (n(5, 160)[:, :80],), why="rows are read through their stride")
    yield Sample("transposed", (n(40, 6).t(),), why="the last dimension is not contiguous")
    yield Sample("one_column", (n(9, 1),), why="a probability that is 1 whatever x is")
    yield Sample("vector", (n(33),), why="no leading dimension")
    yield Sample("empty", (n(0, 16),), why="nothing is launched")


def row_work(forward: int, both: int) -> Callable[..., Work]:
    """Return the `work` of an op that moves its first tensor so many times, in the forward pass and in both."""
    return lambda x, *rest, **options: Work(forward * x.nbytes, both * x.nbytes)


def integers(device: torch.device, high: int, *shape: int) -> Tensor:
    """Return uniform class indices in [0, high)."""
    return torch.randint(high, shape, device=device, dtype=LONG)


def workload(
    make: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]], axis: str = "", quick: bool = False, **sizes: int
) -> Workload:
    """Return a workload named by its sizes; with an axis, it is one point of a series over that size."""
    name = "x".join(str(size) for size in sizes.values())
    if not axis:
        return Workload(name, make, quick)
    return Workload(f"{name}-{axis}", make, quick, axis=(axis, sizes[axis]))


def workloads_of(draw: Callable[..., tuple[Any, ...]], axes: str) -> Callable[..., Workload]:
    """Return a function (*sizes, axis="", quick=False) → a workload of what draw(device, dtype, *sizes) returns.

    axes  the letter of each size
    """

    def of_size(*sizes: int, axis: str = "", quick: bool = False) -> Workload:
        named = dict(zip(axes, sizes, strict=True))
        return workload(lambda device, dtype: (draw(device, dtype, *sizes), {}), axis, quick, **named)

    return of_size


def row_workloads(
    draw: Callable[[torch.device, torch.dtype, int, int], tuple[Any, ...]],
    axes: str,
    usual: Sequence[tuple[int, int]],
    *,
    quick: tuple[int, int] = (512, 1024),
    rows: Sequence[int] = ROWS,
    columns: int = 4096,
    widths: Sequence[int] = WIDTHS,
) -> Iterator[Workload]:
    """Yield a quick workload, the usual ones, and two series: rows of `columns` columns, and 8192 rows of `widths`.

    draw  (device, dtype, rows, columns) → the arguments
    axes  the letters of rows and columns
    """
    of_size = workloads_of(draw, axes)
    yield of_size(*quick, quick=True)
    for count, width in usual:
        yield of_size(count, width)
    for count, width, axis in [
        *((count, columns, axes[0]) for count in rows),
        *((8192, width, axes[1]) for width in widths),
    ]:
        yield of_size(count, width, axis=axis, quick=count * width <= 1024 * 4096)


def tensor_workloads(
    axes: str, usual: Sequence[tuple[int, int]], matrices: int = 1, vectors: int = 0, **sizes: Any
) -> Iterator[Workload]:
    """Yield `row_workloads` of an op whose arguments are tensors (rows, columns), then vectors of so many columns."""

    def draw(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> tuple[Tensor, ...]:
        shapes = [(rows, width)] * matrices + [(width,)] * vectors
        return tuple(normal(device, dtype, *shape) for shape in shapes)

    return row_workloads(draw, axes, usual, **sizes)


def misuses_of(op: str) -> Callable[..., Misuse]:
    """Return a function that makes the misuses of an op.

    `misuse("eps", (x,), OptionError, "eps must be > 0, got 0", eps=0)`; the op's name is put before the message.
    """

    def misuse(name: str, args: tuple[Any, ...], error: type[LigerError], message: str, **options: Any) -> Misuse:
        return Misuse(name, args, options, error, f"{op}: {message}")

    return misuse


def misuse_table(op: str, call: tuple[Any, ...], *rows: tuple[Any, ...]) -> Iterator[Misuse]:
    """Yield the wrong calls of rows (name, error, message without the name of the op, options, *arguments); a row
    without arguments has those of `call`."""
    for name, error, message, options, *args in rows:
        yield Misuse(name, tuple(args) or call, options, error, f"{op}: {message}")


def scaling_misuses(op: str, device: torch.device, inputs: int) -> Iterator[Misuse]:
    """Yield wrong calls with `inputs` tensors of rows before the weight."""
    misuse = misuses_of(op)

    def rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        return (torch.zeros(shape, device=device, dtype=dtype),) * inputs

    x, weight = rows(2, 4), torch.zeros(4, device=device)
    message = "weight must have shape (64,) to match x (2, 512, 64), got (4,)"
    yield misuse("weight_shape", (*rows(2, 512, 64), weight), ShapeError, message)
    yield misuse("scalar", rows(), ShapeError, "x must have at least one dimension, got a scalar")
    yield misuse("integers", rows(2, 4, dtype=torch.int64), DtypeError, "x must have a floating dtype, got torch.int64")
    yield misuse("eps_zero", (*x, weight, 0.0), OptionError, "eps must be a finite number > 0, got 0.0")
    yield misuse("eps_text", (*x, weight, "a"), OptionError, "eps must be a finite number > 0, got 'a'")
    yield misuse("no_tensor", (None, *x[1:]), DtypeError, "x must be a tensor, got NoneType")
    yield misuse("weight_list", (*x, [1.0] * 4), DtypeError, "weight must be a tensor, got list")
    yield misuse("cast", (*x, weight), OptionError, "cast must be one of 'input', 'float32', got 'bf16'", cast="bf16")
    yield misuse("offset", x, OptionError, "weight_offset must be 0 without a weight, got 1.0", weight_offset=1.0)


def power_of_two_above(number: Tensor) -> Tensor:
    """Return the power of two above a number ≥ 0 on the device; 0 counts as 1."""
    return torch.ldexp(torch.ones_like(number), torch.frexp(torch.where(number > 0, number, 1.0))[1])


def row_blocks(matrix: Tensor, elements: int) -> list[slice]:
    """Return slices of rows that hold at most so many elements each, and at least one row."""
    rows = max(1, elements // max(1, matrix.shape[1]))
    return [slice(i, min(i + rows, matrix.shape[0])) for i in range(0, matrix.shape[0], rows)]
