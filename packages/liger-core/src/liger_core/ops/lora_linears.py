# SPDX-License-Identifier: Apache-2.0
"""lora_linears: two or three linear layers with low-rank adapters (LoRA) that read one input, such as gate and up, or
q, k and v."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Dtypes, Misuse, Product, Sample, Work, Workload, accumulator, autocast_dtype
from liger_core.ops._adapter import check_dtypes, check_shapes, no_bias_beside
from liger_core.ops._composed import Supported, composed_op
from liger_core.ops._inputs import misuses_of, normal, sample_table, workload
from liger_core.ops._low_rank import TORCH_PASSES
from liger_core.ops._low_rank_layers import Own, low_rank_layers

NAME = "lora_linears"
# Gate and up, and q, k and v, of Llama 3 8B: rows, input columns, and output columns of each layer.
USUAL = ((32768, 4096, (14336, 14336)), (32768, 4096, (4096, 1024, 1024)))


def check(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, weight_2: Tensor | None, a_2: Tensor, b_2: Tensor,
    weight_3: Tensor | None = None, a_3: Tensor | None = None, b_3: Tensor | None = None, scale: float = 1.0, *,
    bias: Tensor | None = None, bias_2: Tensor | None = None, bias_3: Tensor | None = None,
    base: Tensor | None = None, base_2: Tensor | None = None, base_3: Tensor | None = None,
) -> None:  # fmt: skip
    of_third = {"weight_3": weight_3, "a_3": a_3, "b_3": b_3, "bias_3": bias_3, "base_3": base_3}
    others = {"weight": weight, "weight_2": weight_2, "bias": bias, "bias_2": bias_2, "base": base, "base_2": base_2}
    checks.floating(NAME, 5, x=x, a=a, b=b, a_2=a_2, b_2=b_2, **others, **of_third)
    checks.at_least_one_dimension(NAME, "x", x)
    checks.finite(NAME, "scale", scale)
    layers: list[tuple[Any, ...]] = [("", weight, a, b, bias, base), ("_2", weight_2, a_2, b_2, bias_2, base_2)]
    if a_3 is not None and b_3 is not None:
        layers.append(("_3", weight_3, a_3, b_3, bias_3, base_3))
    elif any(tensor is not None for tensor in of_third.values()):
        alone = ", ".join(name for name, tensor in of_third.items() if tensor is not None)
        checks.fail(OptionError, NAME, f"a third layer must have a_3 and b_3, got {alone}")
    for suffix, matrix, first, second, added, layer_output in layers:
        check_shapes(NAME, x, matrix, first, second, added, layer_output, suffix)
        no_bias_beside(NAME, added, layer_output, suffix)
        check_dtypes(NAME, x, matrix, first, second, added, layer_output, suffix)
    names = [f"weight{suffix}" if layer_output is None else f"base{suffix}" for suffix, *_, layer_output in layers]
    if len({name[0] for name in names}) > 1:
        checks.fail(OptionError, NAME, f"all layers must have a weight, or all a base, got {', '.join(names)}")


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    wide = accumulator(dtype)

    def layer(inner: int, outer: int, rank: int, kind: torch.dtype = wide) -> tuple[Tensor, Tensor, Tensor]:
        weight = normal(device, dtype, outer, inner, scale=inner**-0.5)
        factors = normal(device, kind, rank, inner, scale=inner**-0.5), normal(device, kind, outer, rank, scale=0.3)
        return weight, *factors

    def two(rows: tuple[int, ...], inner: int, outer: int, rank: int, kind: torch.dtype = wide) -> tuple[Any, ...]:
        return normal(device, dtype, *rows, inner), *layer(inner, outer, rank, kind), *layer(inner, outer, rank, kind)

    def three(rows: tuple[int, ...], inner: int, *sizes: tuple[int, int]) -> tuple[Any, ...]:
        return normal(device, dtype, *rows, inner), *(tensor for size in sizes for tensor in layer(inner, *size))

    def without(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments without the weights."""
        return tuple(None if index % 3 == 1 else value for index, value in enumerate(arguments))

    def n(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return normal(device, kind, *shape)

    why, wide_ranks = "all ranks together are more than a kernel multiplies at once", ((24, 32), (16, 30), (40, 20))
    square, ranks, sizes = ((64, 16), (16, 16), (16, 16)), ((41, 3), (30, 8), (17, 5)), ((40, 4), (20, 4), (12, 4))
    half, twice = {"scale": 0.5}, {"scale": 2.0}
    yield from sample_table(
        ("float32_adapters", two((6,), 32, 64, 16), half, "adapters are in float32, as PEFT keeps them"),
        ("low_adapters", two((6,), 32, 64, 16, dtype), twice, "adapters have the dtype of x"),
        ("three", three((2, 3), 32, *square), twice, "q, k and v, with a leading shape"),
        ("ranks", three((7,), 33, *ranks), half, "each layer has a rank of its own; nothing is a power of two"),
        ("several_tiles", two((300,), 160, 200, 20), half, "rows and columns take several tiles of a kernel"),
        ("wide_ranks", three((9,), 40, *wide_ranks), {}, why),
    )
    all_biased, biases = three((5,), 16, *sizes), {"bias": n(40), "bias_2": n(20), "bias_3": n(12)}
    one_biased, one_bias = three((5,), 16, *sizes), {"bias_2": n(20)}
    bases = {"base": n(2, 5, 40), "base_2": n(2, 5, 20), "base_3": n(2, 5, 12)}
    quantized = without(three((2, 5), 16, *sizes))
    precise = {"base": n(5, 40, kind=wide), "base_2": n(5, 40, kind=wide)}
    weights = ("weight", "weight_2", "weight_3")
    yield from sample_table(
        ("bias", all_biased, biases, "biases, with gradients"),
        ("one_bias", one_biased, one_bias, "only one layer has a bias"),
        ("bases", quantized, bases, "the layers' own outputs are given: they are quantized"),
        ("float32_bases", without(two((5,), 16, 40, 4)), precise, "the layers' outputs are more precise than x"),
        ("frozen_weights", three((9,), 20, *sizes), half, "no work for gradients of weights", *weights),
        ("frozen_x", two((9,), 20, 70, 8), {}, "no work for the gradient of x", "x", *weights[:2]),
    )
    strided = (n(5, 48)[:, 7:23], *layer(16, 40, 4), *layer(16, 24, 4))
    yield from sample_table(
        ("strided_rows", strided, {}, "rows are read through their stride"),
        ("one_row", two((1,), 16, 30, 4), {}, "a single row"),
        ("empty", two((0,), 16, 30, 4), {}, "no rows: the gradients of the adapters are zero"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of(NAME)
    x, w = torch.zeros(3, 8, device=device), torch.zeros(10, 8, device=device)
    a, b, base = torch.zeros(4, 8, device=device), torch.zeros(10, 4, device=device), torch.zeros(3, 10, device=device)
    good = (x, w, a, b, w, a, b)
    yield misuse("no_tensor", (*good[:5], None, b), DtypeError, "a_2 must be a tensor, got NoneType")
    message = "a_2 must have shape (rank, 8) to match x (3, 8), got (4, 7)"
    yield misuse("a_shape", (*good[:5], a[:, :7], b), ShapeError, message)
    message = "b_2 must have shape (outputs, 4) to match a_2 (4, 8), got (10, 3)"
    yield misuse("b_shape", (*good[:6], b[:, :3]), ShapeError, message)
    yield misuse(
        "weight_shape", (x, w[:9], *good[2:]), ShapeError, "weight must have shape (10, 8) to match b and x, got (9, 8)"
    )
    yield misuse(
        "bias_shape", good, ShapeError, "bias_2 must have shape (10,) to match b_2 (10, 4), got (8,)", bias_2=x[0]
    )
    message = "base_2 must have shape (3, 10) to match x and b_2, got (3, 8)"
    yield misuse("base_shape", (*good[:4], None, a, b), ShapeError, message, base_2=x)
    yield misuse(
        "neither", (*good[:4], None, a, b), OptionError, "either weight_2 or base_2 must be given, got neither"
    )
    yield misuse("both", good, OptionError, "either weight or base must be given, got both", base=base)
    message = "bias_2 must be None where base_2 is given, which has it already"
    yield misuse("base_and_bias", (*good[:4], None, a, b), OptionError, message, base_2=base, bias_2=w[:, 0])
    yield misuse("half_a_layer", (*good, w, a), OptionError, "a third layer must have a_3 and b_3, got weight_3, a_3")
    message = "a_2 must have dtype torch.bfloat16 like a, got torch.float32; cast one of them"
    low = (x.bfloat16(), w.bfloat16(), a.bfloat16(), b.bfloat16(), w.bfloat16(), a, b)
    yield misuse("adapter_dtypes", low, DtypeError, message)
    message = "all layers must have a weight, or all a base, got weight, base_2"
    yield misuse("weight_and_base", (*good[:4], None, a, b), OptionError, message, base_2=base)
    bases = {"base": base.bfloat16(), "base_2": base}
    message = "base_2 must have dtype torch.bfloat16 like base, got torch.float32; cast one of them"
    yield misuse("base_dtypes", (x.bfloat16(), None, a, b, None, a, b), DtypeError, message, **bases)
    yield misuse("integers", (x.int(), *good[1:]), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("scale", good, OptionError, "scale must be a finite number, got nan", scale=float("nan"))


def workloads() -> Iterator[Workload]:
    def make(rows: int, inner: int, outer: tuple[int, ...], rank: int) -> Callable[..., Any]:
        def draw(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
            wide = accumulator(dtype)
            layers = [
                (
                    normal(device, dtype, columns, inner, scale=inner**-0.5),
                    normal(device, wide, rank, inner, scale=inner**-0.5),
                    normal(device, wide, columns, rank, scale=0.02),
                )
                for columns in outer
            ]
            tensors = [tensor for layer in layers for tensor in layer]
            return (normal(device, dtype, rows, inner), *tensors), {"scale": 2.0}

        return draw

    def of_size(rows: int, inner: int, outer: tuple[int, ...], rank: int = 16, quick: bool = False) -> Workload:
        base = workload(make(rows, inner, outer, rank), "", quick, N=rows, K=inner, M=sum(outer), R=rank)
        return Workload(base.name, base.make, base.quick, ("weight", "weight_2", "weight_3"), base.axis)

    yield of_size(512, 256, (256, 128, 128), quick=True)
    for sizes in USUAL:
        yield of_size(*sizes)


def work(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, weight_2: Tensor | None, a_2: Tensor, b_2: Tensor,
    weight_3: Tensor | None = None, a_3: Tensor | None = None, b_3: Tensor | None = None, *rest: Any, **options: Any,
) -> Work:  # fmt: skip
    """The matmuls of the layers themselves, and one read of x; what the adapters add is small, and could be done in the
    same passes."""
    inner, rows, size = x.shape[-1], x.numel() // x.shape[-1], x.element_size()
    factors = [(weight, a, b), (weight_2, a_2, b_2)]
    factors += [(weight_3, a_3, b_3)] if a_3 is not None and b_3 is not None else []
    moved = x.numel() * size
    forward: list[Product] = []
    full: list[Product] = []
    for name, (matrix, first, second) in zip(("weight", "weight_2", "weight_3"), factors, strict=False):
        outer = second.shape[0]
        # A base is read, a weight too.
        moved += rows * outer * size + (rows * outer if matrix is None else matrix.numel()) * size
        moved += (first.numel() + second.numel()) * first.element_size()
        if matrix is not None:
            forward.append(Product(rows, inner, outer, "right"))
            full += [forward[-1], Product(rows, outer, inner, "", "x"), Product(outer, rows, inner, "left", name)]
    operations = sum(2 * p.rows * p.inner * p.columns for p in forward)
    return Work(moved, 2 * moved, operations, 3 * operations, tuple(forward), tuple(full))


DTYPES = Dtypes((("a", "a_2", "a_3", "b", "b_2", "b_3"), ("base", "base_2", "base_3")))
LAYOUT = Layout(
    {"x": "… (inner)"}
    | {
        f"{name}{suffix}": shape.replace("outer", f"outer{suffix}").replace("rank", f"rank{suffix}")
        for suffix in ("", "_2", "_3")
        for name, shape in (("weight", "(outer) (inner)"), ("a", "(rank) (inner)"), ("b", "(outer) (rank)"),
            ("bias", "(outer)"), ("base", "… (outer)"))
    },
    ("x", "x", "x"),
)  # fmt: skip


@composed_op(
    TORCH_PASSES, low_rank_layers, check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=LAYOUT, dtypes=DTYPES,
)  # fmt: skip
def lora_linears(
    loop: Callable[..., Any], supported: Supported,
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, weight_2: Tensor | None, a_2: Tensor, b_2: Tensor,
    weight_3: Tensor | None = None, a_3: Tensor | None = None, b_3: Tensor | None = None, scale: float = 1.0, *,
    bias: Tensor | None = None, bias_2: Tensor | None = None, bias_3: Tensor | None = None,
    base: Tensor | None = None, base_2: Tensor | None = None, base_3: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Add low-rank adapters to two or three linear layers of one input, as `lora_linear` does for each.

        y_i = x weight_iᵀ + bias_i + scale · (x a_iᵀ) b_iᵀ        or        y_i = base_i + scale · (x a_iᵀ) b_iᵀ

    x        (..., inner)     any floating dtype
    weight   (outer, inner)   dtype of x (under autocast all are cast to its dtype); gradients are computed only
             where they are required
    a        (rank, inner)    dtype of x, or float32, the same for all layers
    b        (outer, rank)    dtype of a
    scale    alpha / rank, the same for all layers
    bias     (outer,)         dtype of x
    base     (..., outer)     dtype of x, or float32, the same for all layers: what each computes by itself, instead
             of weights and biases,
                              for weights that are quantized or sharded
    weight_2, weight_3 (outer, inner), with the sizes of their layer; the third is optional
    a_2, a_3           (rank, inner)
    b_2, b_3           (outer, rank)
    bias_2, bias_3     (outer,)
    base_2, base_3     (..., outer)
    returns            (..., outer) for each layer, dtype of x, or of the bases

    All adapters meet x in one pass over it, and so do their gradients. The gradients that x gets through the layers
    are added up inside the matmuls, instead of one after another. Kept for the backward pass are x and the rows of
    every x aᵀ.

    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    Hu et al. 2021, arXiv:2106.09685.
    """
    supported(x, a)
    weights, terms = [weight, weight_2, weight_3], Own(bias, base, bias_2, base_2, bias_3, base_3)
    first, second = [a, a_2, a_3], [b, b_2, b_3]
    low = autocast_dtype(x.device.type)
    if low is not None:
        x, *weights = (None if t is None else t.to(low) for t in (x, *weights))  # type: ignore[assignment]
        terms = Own._make(t if t is None or index % 2 else t.to(low) for index, t in enumerate(terms))
    if a.dtype not in (x.dtype, accumulator(x.dtype)):
        first, second = ([None if t is None else t.to(x.dtype) for t in factors] for factors in (first, second))
    flat_terms = Own._make(
        t if t is None or not index % 2 else t.reshape(-1, t.shape[-1]) for index, t in enumerate(terms)
    )
    outputs = loop(x.reshape(-1, x.shape[-1]), weights, first, second, float(scale), flat_terms)
    return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in outputs)
