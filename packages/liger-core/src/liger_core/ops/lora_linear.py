# SPDX-License-Identifier: Apache-2.0
"""lora_linear: a linear layer with a low-rank adapter (LoRA) beside it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Dtypes, Misuse, Product, Sample, Work, Workload, accumulator, autocast_dtype
from liger_core.ops._adapter import check_dtypes, check_shapes, fail_dtype, no_bias_beside
from liger_core.ops._composed import Supported, composed_op
from liger_core.ops._inputs import misuse_table, normal, sample_table, workload
from liger_core.ops._low_rank import TORCH_PASSES, low_rank

NAME = "lora_linear"
# The linear layers of Llama 3 8B: rows, input and output columns.
USUAL = ((32768, 4096, 4096), (32768, 4096, 14336), (32768, 14336, 4096))


def check(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, *, bias: Tensor | None = None,
    base: Tensor | None = None, column_scale: Tensor | None = None,
) -> None:  # fmt: skip
    checks.floating(NAME, 3, x=x, a=a, b=b, weight=weight, bias=bias, base=base, column_scale=column_scale)
    checks.at_least_one_dimension(NAME, "x", x)
    checks.finite(NAME, "scale", scale)
    check_shapes(NAME, x, weight, a, b, bias, base)
    if column_scale is None:
        no_bias_beside(NAME, bias, base)
    checks.vector(NAME, "column_scale", column_scale, b.shape[0], "b", b)
    check_dtypes(NAME, x, weight, a, b, bias, base)
    low = autocast_dtype(x.device.type)
    if column_scale is not None and column_scale.dtype not in (x.dtype, accumulator(x.dtype)) and low is None:
        fail_dtype(NAME, "column_scale", x.dtype, column_scale)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    wide, n = accumulator(dtype), functools.partial(normal, device)

    def call(
        rows: tuple[int, ...] = (5,), inner: int = 16, outer: int = 40, rank: int = 4, adapter_dtype: torch.dtype = wide
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, weight = n(dtype, *rows, inner), n(dtype, outer, inner, scale=inner**-0.5)
        return x, weight, n(adapter_dtype, rank, inner, scale=inner**-0.5), n(adapter_dtype, outer, rank, scale=0.3)

    def without(*sizes: Any) -> tuple[Any, ...]:
        """Return the arguments of a call without the weight."""
        x, _, a, b = call(*sizes)
        return x, None, a, b

    low = (5,), 16, 40, 4, dtype
    yield from sample_table(
        ("float32_adapter", (*call((6,), 32, 64, 16), 0.5), {}, "the adapter is in float32, as PEFT keeps it"),
        ("low_adapter", (*call((6,), 32, 64, 16, dtype), 2.0), {}, "the adapter has the dtype of x"),
        ("odd_sizes", (*call((7,), 33, 101, 3), 0.5), {}, "nothing is a power of two"),
        ("leading_shape", (*call((2, 3)), 2.0), {}, "any leading shape"),
        ("several_tiles", (*call((300,), 160, 200, 20), 0.5), {}, "rows and columns take several tiles of a kernel"),
        ("no_leading_shape", call(()), {}, "a single row without a leading dimension"),
    )
    bias = {"bias": n(dtype, 40)}
    yield from sample_table(
        ("bias", call(), bias, "the layer has a bias, with a gradient"),
        ("base", (*without((2, 5)), 0.5), {"base": n(dtype, 2, 5, 40)},
         "only its output is given: the weight is quantized"),
        ("base_low_adapter", without(*low), {"base": n(dtype, 5, 40)}, "as base, all in one dtype"),
        ("float32_base", without(), {"base": n(wide, 5, 40)}, "the layer's own output has more precision than x"),
    )  # fmt: skip
    yield from _samples_of_columns(device, dtype, call, bias)
    x, weight, a, b = call()
    new, why = (x, weight, a, torch.zeros_like(b)), "no work for the gradient of"
    yield from sample_table(
        ("new_adapter", new, {}, "b is zero before the first step: y is the layer's own"),
        ("dominant_adapter", (*call((6,), 32, 64, 16), 64.0), {}, "the layer's part is small beside the adapter's"),
        ("wide_rank", call((5,), 8, 12, 24), {}, "the rank is larger than both sides of the weight"),
        ("frozen_weight", (*call((9,), 20, 70, 8), 0.5), {}, f"{why} weight", "weight"),
        ("frozen_x", (*call((9,), 20, 70, 8), 0.5), {}, f"{why} x", "x"),
    )
    x, weight, a, b = call((16,))
    transposed = x.t().contiguous().t()[:, :16], weight.t().contiguous().t(), a, b
    yield from sample_table(
        ("transposed", transposed, {}, "x and weight are transposed views"),
        ("strided_rows", (n(dtype, 5, 48)[:, 7:23], weight, a, b), {}, "rows are read through their stride"),
        ("one_row", call((1,), 16, 30), {}, "a single row"),
        ("empty", call((0,), 16, 30), {}, "no rows: the gradients of the adapter are zero"),
    )


def _samples_of_columns(
    device: torch.device, dtype: torch.dtype, call: Callable[..., tuple[Tensor, ...]], bias: dict[str, Tensor]
) -> Iterator[Sample]:
    """Yield samples of one factor per output column, and of other scales."""
    wide, n = accumulator(dtype), functools.partial(normal, device)
    columns = n(wide, 40) + 2.0
    every, low = (*call(), 0.5), call((2, 3), 16, 40, 4, dtype)
    x, _, a, b = call((2, 5))
    base, precise = {"base": n(dtype, 2, 5, 40), **bias}, {"base": n(wide, 2, 5, 40)}
    scale, why = {"column_scale": columns}, "the layer's own output is given without its bias, which is not scaled"
    tall, tiles = (*call((300,), 16, 200), 0.5), {"column_scale": n(wide, 200)}
    fixed = {"column_scale": columns.clone(), **bias}
    yield from sample_table(
        ("column_scale", every, {**bias, **scale}, "one factor per output column, for DoRA"),
        ("low_column_scale", low, {"column_scale": columns.to(dtype)}, "everything in one dtype, and no bias"),
        ("column_scale_base", (x, None, a, b, 0.5), {**base, **scale}, why),
        ("column_scale_float32_base", (x, None, a, b), {**precise, **scale},
         "the layer's output is more precise than x"),
        ("column_scale_tiles", tall, tiles, "sums over rows and columns take several tiles"),
        ("fixed_column_scale", call(), fixed, "no work for the gradient of column_scale", "column_scale"),
        ("negative_scale", (*call(), -0.5), {}, "any scale: with 0 the adapter gets zero gradients"),
        ("zero_scale", (*call(), 0.0), {}, "any scale: with 0 the adapter gets zero gradients"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    x, w = torch.zeros(3, 8, device=device), torch.zeros(10, 8, device=device)
    a, b, base = torch.zeros(4, 8, device=device), torch.zeros(10, 4, device=device), torch.zeros(3, 10, device=device)
    yield from misuse_table(
        NAME, (x, w, a, b),
        ("a_shape", ShapeError, "a must have shape (rank, 8) to match x (3, 8), got (4, 7)", {}, x, w, a[:, :7], b),
        ("b_shape", ShapeError, "b must have shape (outputs, 4) to match a (4, 8), got (10, 3)", {}, x, w, a, b[:, :3]),
        ("weight_shape", ShapeError, "weight must have shape (10, 8) to match b and x, got (9, 8)", {}, x, w[:9], a, b),
        ("bias_shape", ShapeError, "bias must have shape (10,) to match b (10, 4), got (8,)", {"bias": x[0]}),
        ("base_shape", ShapeError, "base must have shape (3, 10) to match x and b, got (3, 8)",
         {"base": x}, x, None, a, b),
        ("neither", OptionError, "either weight or base must be given, got neither", {}, x, None, a, b),
        ("both", OptionError, "either weight or base must be given, got both", {"base": base}),
        ("base_and_bias", OptionError, "bias must be None where base is given, which has it already",
         {"base": base, "bias": w[:, 0]}, x, None, a, b),
        ("column_scale_shape", ShapeError, "column_scale must have shape (10,) to match b (10, 4), got (8,)",
         {"column_scale": x[0]}),
        ("column_scale_dtype", DtypeError,
         "column_scale must have dtype torch.float32 like x, or torch.float32, got torch.bfloat16; cast it",
         {"column_scale": torch.ones(10, device=device).bfloat16()}),
        ("weight_dtype", DtypeError,
         "weight must have dtype torch.float32 like x, got torch.bfloat16; cast one of them",
         {}, x, w.bfloat16(), a, b),
        ("adapter_dtypes", DtypeError, "b must have dtype torch.float32 like a, got torch.float64; cast one of them",
         {}, x, w, a, b.double()),
        ("base_dtype", DtypeError,
         "base must have dtype torch.float32 like x, or torch.float32, got torch.float64; cast it",
         {"base": base.double()}, x, None, a, b),
        ("low_adapter", DtypeError,
         "a and b must have dtype torch.float32 like x, or torch.float32, got torch.bfloat16; cast them",
         {}, x, w, a.bfloat16(), b.bfloat16()),
        ("integers", DtypeError, "x must have a floating dtype, got torch.int32", {}, x.int(), w, a, b),
        ("scale", OptionError, "scale must be a finite number, got nan", {"scale": float("nan")}),
    )  # fmt: skip


def workloads() -> Iterator[Workload]:
    def make(rows: int, inner: int, outer: int, rank: int, dora: bool) -> Callable[..., Any]:
        def draw(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
            wide = accumulator(dtype)
            x, weight = normal(device, dtype, rows, inner), normal(device, dtype, outer, inner, scale=inner**-0.5)
            options = {"column_scale": 1.0 + 0.1 * normal(device, wide, outer)} if dora else {}
            a, b = normal(device, wide, rank, inner, scale=inner**-0.5), normal(device, wide, outer, rank, scale=0.02)
            return (x, weight, a, b, 2.0), options

        return draw

    def of_size(
        rows: int, inner: int, outer: int, rank: int = 16, axis: str = "", quick: bool = False, dora: bool = False
    ) -> Workload:
        base = workload(make(rows, inner, outer, rank, dora), axis, quick, N=rows, K=inner, M=outer, R=rank)
        return Workload(base.name + "-dora" * dora, base.make, base.quick, ("weight",), base.axis)

    yield of_size(512, 256, 256, quick=True)
    for sizes in USUAL:
        yield of_size(*sizes)
    yield of_size(*USUAL[0], dora=True)
    for rank in (8, 32, 64, 128):
        yield of_size(*USUAL[0], rank, "R")


def work(x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Work:
    """The matmuls of the layer itself; what the adapter adds is small, and could be done in the same passes."""
    outer, inner, rows = b.shape[0], x.shape[-1], x.numel() // x.shape[-1]
    adapter_size, size = (a.numel() + b.numel()) * a.element_size(), x.element_size()
    moved = (x.numel() + rows * outer) * size + adapter_size
    operations = 2 * rows * inner * outer if weight is not None else 0
    if weight is None:
        added = 2 * rows * a.shape[0] * (inner + outer)
        return Work(moved + rows * outer * size, 3 * moved, added, 3 * added)
    products = (
        Product(rows, inner, outer, "right"),
        Product(rows, outer, inner, "", "x"),
        Product(outer, rows, inner, "left", "weight"),
    )
    read = weight.numel() * size
    return Work(moved + read, 2 * (moved + read), operations, 3 * operations, products[:1], products)


LAYOUT = Layout(
    {
        "x": "… (inner)", "weight": "(outer) (inner)", "a": "(rank) (inner)", "b": "(outer) (rank)", "bias": "(outer)",
        "base": "… (outer)",
        "column_scale": "(outer)",
    },
    ("x",),
)  # fmt: skip


@composed_op(
    TORCH_PASSES, low_rank, check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=LAYOUT, dtypes=Dtypes((("a", "b"),)),
)  # fmt: skip
def lora_linear(
    loop: Callable[..., Any], supported: Supported, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor,
    scale: float = 1.0, *, bias: Tensor | None = None, base: Tensor | None = None, column_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add a low-rank adapter to a linear layer.

        y = x weightᵀ + bias + scale · (x aᵀ) bᵀ        or        y = base + scale · (x aᵀ) bᵀ

    With column_scale, for DoRA magnitude / ‖weight + scale · b a‖ (the norm of each row):

        y = column_scale · (x weightᵀ + scale · (x aᵀ) bᵀ) + bias        or        y = column_scale · (base + scale
        · (x aᵀ) bᵀ) + bias

    x       (..., inner)   any floating dtype
    weight  (outer, inner) dtype of x (under autocast both are cast to its dtype); its gradient is computed only
            where it is required
    a       (rank, inner)  dtype of x, or float32
    b       (outer, rank)  dtype of a
    scale   alpha / rank for LoRA, alpha / √rank for rank-stabilized LoRA
    bias    (outer,)       dtype of x
    base    (..., outer)   dtype of x, or float32: what the layer computes by itself, instead of weight and bias,
            for weights that
                           are quantized or sharded
    column_scale (outer,)  dtype of x, or float32; with it, base does not include the bias
    returns (..., outer), dtype of x, or of base

    x is never cast to the dtype of the adapter. A float32 adapter beside a bfloat16 x is the sum of three bfloat16
    matrices, which tensor cores multiply in one pass over x: gradients of a and b are as accurate as in float32.
    Kept for the backward pass are x and the rows of x aᵀ; with a column_scale, what the layer computes by itself,
    too.

    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    Hu et al. 2021, arXiv:2106.09685; scale by √rank: Kalajdzievski 2023, arXiv:2312.03732; DoRA: Liu et al. 2024,
    arXiv:2402.09353.
    """
    supported(x, a)
    low = autocast_dtype(x.device.type)
    if low is not None:
        x, weight, bias = (None if t is None else t.to(low) for t in (x, weight, bias))  # type: ignore[assignment]
    if a.dtype not in (x.dtype, accumulator(x.dtype)):
        a, b = a.to(x.dtype), b.to(x.dtype)
    columns = None if column_scale is None else column_scale.to(accumulator(x.dtype))
    rows = x.reshape(-1, x.shape[-1])
    base_rows = None if base is None else base.reshape(-1, b.shape[0])
    y: Tensor = loop(rows, weight, a, b, float(scale), bias, base_rows, columns)
    return y.view(*x.shape[:-1], b.shape[0])
