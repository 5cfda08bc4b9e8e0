# SPDX-License-Identifier: Apache-2.0
"""How calls are drawn: for every op, a strategy over all shapes, strides, dtypes and options that its docstring allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st

from fuzz.drawing import (
    SEEDS,
    SIZES,
    SMALL,
    WIDE,
    Draw,
    Example,
    Floats,
    Labels,
    Scalar,
    example,
    floats,
    layouts,
    leading,
    moderate,
    mostly,
    one_of,
    rarely,
    size,
    values,
    weighted,
    writable,
)
from liger_core.ops._divergence import KINDS

# The number of elements of the largest tensor of a call, and of rows that have their own program.
ELEMENTS, ROWS = 20_000, 300
# The norms' programs take many rows of so many columns.
SHORT = 17


@dataclass(frozen=True)
class Limits:
    """The limits of an implementation.

    dtypes    those of its tensors
    elements  of the largest tensor
    rows      that programs of their own may walk; more where a program takes several
    """

    dtypes: Sequence[str]
    elements: int = ELEMENTS
    rows: int = ROWS


Strategy = Callable[[Draw, Limits], Example]
NORMALIZERS = (37.0, 3, 1e-3, 1e6, Scalar(37.0, "float32"), Scalar(12, "int64"))
EPS = weighted((4, (1e-6, 1e-5)), (1, (1e-12, 1e-3, 0.1, 1.0, 100.0)))


def rms_norm(draw: Draw, limits: Limits) -> Example:
    return _norm(draw, limits, summed=False)


def add_rms_norm(draw: Draw, limits: Limits) -> Example:
    return _norm(draw, limits, summed=True)


def _norm(draw: Draw, limits: Limits, *, summed: bool) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, 16 * limits.rows)
    arguments: dict[str, Any] = {"x": floats(draw, shape, dtype)}
    shared = {}
    if summed:
        arguments["residual"] = floats(draw, shape, dtype)
        if rarely(draw, 9):
            shared = {"residual": "x"}
    arguments |= {"weight": _vector(draw, limits, shape[-1]), "eps": draw(EPS)}
    arguments["cast"] = one_of(draw, ("input", "float32"))
    if arguments["weight"] is not None:
        arguments["weight_offset"] = one_of(draw, (0.0, 1.0, -1.0, 0.5))
    names = ("x", "weight") if shared or not summed else ("x", "residual", "weight")
    return example(draw, arguments, names, shared=shared)


def layer_norm(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, 16 * limits.rows)
    weight, bias = _vector(draw, limits, shape[-1]), _vector(draw, limits, shape[-1])
    arguments = {"x": floats(draw, shape, dtype), "weight": weight, "bias": bias, "eps": draw(EPS)}
    return example(draw, arguments, ("x", "weight", "bias"))


def add_layer_norm(draw: Draw, limits: Limits) -> Example:
    normed = layer_norm(draw, limits)
    x = normed.arguments["x"]
    arguments = {"x": x, "residual": floats(draw, x.shape, x.dtype)} | normed.arguments
    shared = {"residual": "x"} if rarely(draw, 9) else {}
    return example(draw, arguments, ("x", *(() if shared else ("residual",)), "weight", "bias"), shared=shared)


def dyt(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, limits.rows)
    alpha = moderate(draw, one_of(draw, ((), (1,))), one_of(draw, limits.dtypes))
    weight, bias = _vector(draw, limits, shape[-1]), _vector(draw, limits, shape[-1])
    arguments = {"x": floats(draw, shape, dtype), "alpha": alpha, "weight": weight, "bias": bias}
    return example(draw, arguments, tuple(arguments))


def gated_rms_norm(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, 16 * limits.rows)
    size = mostly(draw, 2, None, 1, 3, 16)
    if size is not None:
        # Each group has a program.
        shape = (*shape[:-1], min(shape[-1] // size, limits.rows) * size)
    gate = floats(draw, shape, one_of(draw, (dtype, *limits.dtypes)))
    arguments = {"x": floats(draw, shape, dtype), "gate": gate, "weight": _vector(draw, limits, shape[-1])}
    arguments |= {"eps": draw(EPS), "activation": one_of(draw, ("silu", "sigmoid"))}
    arguments |= {"gate_first": draw(st.booleans()), "group_size": size}
    if arguments["weight"] is not None:
        arguments["weight_offset"] = one_of(draw, (0.0, 1.0, 0.5))
    return example(draw, arguments, ("x", "gate", "weight"))


def modulated_rms_norm(draw: Draw, limits: Limits) -> Example:
    return _modulated(draw, limits, weighted=True)


def modulated_layer_norm(draw: Draw, limits: Limits) -> Example:
    return _modulated(draw, limits, weighted=False)


def _modulated(draw: Draw, limits: Limits, *, weighted: bool) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, limits.rows)
    shape = shape if len(shape) > 1 else (1, *shape)
    of_samples, modulation = (*shape[:-2], shape[-1]), one_of(draw, (dtype, *limits.dtypes))
    arguments: dict[str, Any] = {"x": floats(draw, shape, dtype), "scale": floats(draw, of_samples, modulation)}
    arguments["eps"] = draw(EPS)
    arguments["shift"] = floats(draw, of_samples, modulation) if draw(st.booleans()) else None
    if weighted:
        arguments["weight"] = _vector(draw, limits, shape[-1])
    return example(draw, arguments, ("x", "scale", "shift", *(("weight",) if weighted else ())))


def group_norm(draw: Draw, limits: Limits) -> Example:
    dtype, groups = one_of(draw, limits.dtypes), one_of(draw, (1, 2, 3, 8))
    channels = groups * one_of(draw, (1, 2, 5))
    # Of eight groups each: enough for the programs of a GPU to hold long ones.
    samples = one_of(draw, (0, 1, 2, 7, max(3, limits.rows // 8)))
    space = draw(weighted((3, ((5,), (4, 4), (3, 7))), (1, ((), (1,), (40, 40)))))
    weight, bias = _vector(draw, limits, channels), _vector(draw, limits, channels)
    arguments = {"x": floats(draw, (samples, channels, *space), dtype), "num_groups": groups}
    arguments |= {"weight": weight, "bias": bias, "eps": draw(EPS)}
    return example(draw, arguments, ("x", "weight", "bias"))


def mix_streams(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _streams(draw, limits)
    pre = floats(draw, shape[:-1], one_of(draw, (dtype, *limits.dtypes)))
    return example(draw, {"x": floats(draw, shape, dtype), "pre": pre}, ("x", "pre"))


def project_streams(draw: Draw, limits: Limits) -> Example:
    dtype, (*positions, streams, width) = one_of(draw, limits.dtypes), _streams(draw, limits)
    # The gradient of a single column, which the norm makes 1 or -1, is nothing but rounding.
    shape = (*positions, streams, max(2, width))
    columns, count = shape[-2] * shape[-1], one_of(draw, (24, 1, 3, 8, 16, 17))
    count = max(1, min(count, limits.elements // columns))
    # Of equal products, a matmul that adds one after the other rounds each in the same direction.
    weight = moderate(draw, (count, columns), one_of(draw, (dtype, *limits.dtypes)), scale=columns**-0.5)
    return example(draw, {"x": floats(draw, shape, dtype), "weight": weight, "eps": draw(EPS)}, ("x", "weight"))


def merge_streams(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _streams(draw, limits)
    own = one_of(draw, (dtype, *limits.dtypes))
    arguments: dict[str, Any] = {"x": floats(draw, shape, dtype), "y": floats(draw, (*shape[:-2], shape[-1]), dtype)}
    arguments |= {"post": floats(draw, shape[:-1], own), "res": None}
    if not rarely(draw, 3):
        arguments["res"] = floats(draw, (*shape[:-1], shape[-2]), own)
    return example(draw, arguments, ("x", "y", "post", "res"))


def _streams(draw: Draw, limits: Limits) -> tuple[int, ...]:
    *positions, width = _rows(draw, limits, limits.rows)
    count = mostly(draw, 3, 4, 1, 2, 3, 7, 8)
    return (*positions, count, max(1, width // count))


def sinkhorn(draw: Draw, limits: Limits) -> Example:
    dtype, count = one_of(draw, limits.dtypes), mostly(draw, 3, 4, 1, 2, 3, 7, 8)
    shape = (*leading(draw, limits.rows), count, count)
    # Entries far below eps are what rounding makes of them.
    x = moderate(draw, shape, dtype, one_of(draw, (0.01, 1.0, 3.0)))
    arguments = {"x": x, "iterations": one_of(draw, (20, 1, 2, 5)), "eps": one_of(draw, (1e-6, 1e-3, 0.1))}
    return example(draw, arguments, ("x",))


def attention_residual(draw: Draw, limits: Limits) -> Example:
    dtype, depth = one_of(draw, limits.dtypes), one_of(draw, (1, 2, 3, 9))
    shape = _rows(draw, limits, 16 * limits.rows)
    shape = (*shape[:-1], max(1, shape[-1] // depth))
    own = one_of(draw, limits.dtypes)
    query = moderate(draw, (shape[-1],), own, one_of(draw, (0.0, 0.1, 1.0)))
    arguments = {"layers": floats(draw, (depth, *shape), dtype), "query": query, "weight": None, "eps": draw(EPS)}
    if draw(st.booleans()):
        arguments["weight"] = moderate(draw, (shape[-1],), own)
    return example(draw, arguments, ("layers", "query", "weight"))


def poly_norm(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, limits.rows)
    # The cube of a large value leaves the range of float32.
    weight = moderate(draw, (3,), one_of(draw, limits.dtypes))
    arguments: dict[str, Any] = {"x": moderate(draw, shape, dtype), "weight": weight, "eps": draw(EPS)}
    if draw(st.booleans()):
        arguments["bias"] = moderate(draw, one_of(draw, ((), (1,))), one_of(draw, limits.dtypes))
    return example(draw, arguments, ("x", "weight", "bias"))


def sparsemax(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, 16 * limits.rows)
    x = moderate(draw, (*shape[:-1], max(1, shape[-1])), dtype, one_of(draw, (0.01, 1.0, 10.0)))
    return example(draw, {"x": x}, ("x",))


def softmax(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, 16 * limits.rows)
    return example(draw, {"x": floats(draw, shape, dtype)}, ("x",))


def swiglu(draw: Draw, limits: Limits) -> Example:
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options |= {"limit": one_of(draw, (None, 0.3, 7.0)), "alpha": one_of(draw, (1.0, 1.702, -0.5))}
        options |= {"shift": one_of(draw, (0.0, 1.0)), "gate_scale": one_of(draw, (1.0, 0.37, -2.0))}
        options |= {"scale": one_of(draw, (1.0, 0.22, -3))}
    return _gated(draw, limits, **options)


def geglu(draw: Draw, limits: Limits) -> Example:
    return _gated(draw, limits, approximate=one_of(draw, ("tanh", "none")))


def _gated(draw: Draw, limits: Limits, **options: Any) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, limits.rows)
    arguments: dict[str, Any] = {**options, "overwrite": rarely(draw, 3)}
    shared = {}
    if not rarely(draw, 2):
        arguments |= {"gate": floats(draw, shape, dtype), "up": floats(draw, shape, dtype)}
        if rarely(draw, 9):
            shared = {"up": "gate"}
    else:
        arguments |= {"gate": floats(draw, (*shape[:-1], 2 * shape[-1]), dtype), "up": None}
    return example(draw, arguments, ("gate",) if shared else ("gate", "up"), shared=shared)


def relu_squared(draw: Draw, limits: Limits) -> Example:
    dtype, shape = one_of(draw, limits.dtypes), _rows(draw, limits, limits.rows)
    up = mostly(draw, 1, None, floats(draw, shape, dtype))
    return example(draw, {"x": floats(draw, shape, dtype), "up": up}, ("x", "up"))


def embedding(draw: Draw, limits: Limits) -> Example:
    width = size(draw, limits.elements, mostly(draw, 4, SIZES, WIDE))
    rows = size(draw, max(1, limits.elements // max(1, width)), SMALL, least=1)
    shape = leading(draw, max(1, min(limits.rows, limits.elements // max(1, width))))
    arguments = {
        "index": Labels(shape, rows, layout=draw(layouts), seed=draw(SEEDS)),
        "weight": floats(draw, (rows, width), one_of(draw, limits.dtypes)),
        "padding_idx": mostly(draw, 2, None, 0, rows - 1),
    }
    return example(draw, arguments, ("weight",))


def experts(draw: Draw, limits: Limits) -> Example:
    dtype = one_of(draw, limits.dtypes)
    count, tokens = size(draw, 9, SMALL, least=1), size(draw, min(limits.rows, 100), SMALL)
    most = max(1, limits.elements // (2 * count))
    hidden = size(draw, min(65, most), SMALL, least=1)
    inner = size(draw, min(65, most // hidden), SMALL, least=1)
    gated, biased = not rarely(draw, 3), rarely(draw, 2)
    outer, shape = inner * (1 + gated), (tokens, one_of(draw, (1, 2, 3, 8)))
    activation = mostly(draw, 3, "silu", "gelu", "gelu_tanh", "relu_squared")
    arguments = {
        "x": floats(draw, (tokens, hidden), dtype),
        "gate_up": moderate(draw, (count, outer, hidden), dtype, hidden**-0.5),
        "down": moderate(draw, (count, hidden, inner), dtype, inner**-0.5),
        # Outside the experts on either side, or none.
        "index": Labels(shape, count, one_of(draw, (-1, count)), mostly(draw, 3, 0, 1, 2, 3), seed=draw(SEEDS)),
        "weight": moderate(draw, shape, one_of(draw, (dtype, "float32"))),
        "gate_up_bias": moderate(draw, (count, outer), dtype) if biased else None,
        "down_bias": moderate(draw, (count, hidden), dtype) if biased else None,
        "activation": activation,
        "limit": one_of(draw, (None, None, 0.3, 7.0)),
        "alpha": one_of(draw, (1.0, 1.702)) if activation == "silu" else 1.0,
        "shift": one_of(draw, (0.0, 1.0)) if gated else 0.0,
        "interleaved": gated and draw(st.booleans()),
    }
    for name, rows, columns in (("gate_up", outer, hidden), ("down", hidden, inner)):
        if rarely(draw, 3):
            rank = one_of(draw, (1, 3, 8))
            arguments[f"{name}_a"] = moderate(draw, (count, rank, columns), dtype, 0.3 * columns**-0.5)
            arguments[f"{name}_b"] = moderate(draw, (count, rows, rank), dtype, 0.3)
    floating = "x gate_up down weight gate_up_bias down_bias gate_up_a gate_up_b down_a down_b"
    return example(draw, arguments, floating.split())


def rope(draw: Draw, limits: Limits) -> Example:
    dtype = one_of(draw, limits.dtypes)
    half = size(draw, 65, (*SMALL, 127, 128), least=1)
    width = 2 * half + mostly(draw, 2, 0, 1, 2, 5, 64)
    batch = size(draw, 4)
    tokens = size(draw, max(1, min(limits.rows, limits.elements // max(1, batch * width))), SMALL)
    heads, key_heads = (
        size(draw, max(1, min(17, limits.elements // max(1, batch * tokens * width)))) for _ in range(2)
    )
    inplace = rarely(draw, 3)
    strides = writable if inplace else layouts
    table = one_of(draw, ((tokens, 2 * half), (1, tokens, 2 * half), (batch, tokens, 2 * half)))
    table_dtype = one_of(draw, (dtype, *limits.dtypes))
    arguments = {
        "q": floats(draw, (batch, heads, tokens, width), dtype, strides),
        "k": floats(draw, (batch, key_heads, tokens, width), dtype, strides),
        "cos": moderate(draw, table, table_dtype),
        "sin": moderate(draw, table, table_dtype),
        "interleaved": draw(st.booleans()),
        "inplace": inplace,
    }
    return example(draw, arguments, ("q", "k", *(("cos", "sin") if not inplace and rarely(draw, 5) else ())))


def qk_norm_rope(draw: Draw, limits: Limits) -> Example:
    turned = rope(draw, limits)
    arguments: dict[str, Any] = {name: turned.arguments[name] for name in ("q", "k", "cos", "sin", "interleaved")}
    width = arguments["q"].shape[-1]
    arguments |= {f"{name}_weight": moderate(draw, (width,), one_of(draw, limits.dtypes)) for name in ("q", "k")}
    arguments |= {"eps": draw(EPS), "cast": one_of(draw, ("input", "float32"))}
    arguments["weight_offset"] = one_of(draw, (0.0, 1.0, 0.5))
    return example(draw, arguments, ("q", "k", "q_weight", "k_weight"))


def cross_entropy(draw: Draw, limits: Limits) -> Example:
    dtype, classes = one_of(draw, limits.dtypes), _classes(draw, limits)
    shape = leading(draw, min(limits.rows, max(1, limits.elements // classes)))
    options, target = _loss_options(draw, limits, shape, classes)
    if "class_weight" in options:
        options["weight"] = options.pop("class_weight")
    options["temperature"] = mostly(draw, 3, 1.0, 0.7, 3.0)
    logits = floats(draw, (*shape, classes), dtype)
    if classes > 2 and not options.get("label_smoothing") and rarely(draw, 9):
        # Classes 1, 4, 7, … are impossible, so that no target may name them.
        logits, target = replace(logits, values="impossible"), replace(target, possible=3)
    return example(draw, {"logits": logits, "target": target, **options}, ("logits",))


def linear_cross_entropy(draw: Draw, limits: Limits) -> Example:
    arguments, shape, classes = _head(draw, limits)
    options, arguments["target"] = _loss_options(draw, limits, shape, classes)
    if rarely(draw, 3):
        dtype, factor = one_of(draw, limits.dtypes), one_of(draw, (1.0, 1.0, 1e-4, 1e3))
        options["token_weight"] = Floats(shape, dtype, draw(layouts), draw(values), factor, seed=1)
    return example(draw, arguments | options, ("hidden", "weight", "bias"))


def lora_linear(draw: Draw, limits: Limits) -> Example:
    dtype = one_of(draw, limits.dtypes)
    own = dtype if "float64" in limits.dtypes else one_of(draw, (dtype, "float32"))
    inner, outer = (size(draw, max(1, min(300, limits.elements // 64)), least=1) for _ in range(2))
    shape = leading(draw, min(limits.rows, max(1, limits.elements // max(inner, outer))))
    rank = size(draw, 40, least=1)
    factor = st.sampled_from((0.1, 0.3, 1.0))
    arguments: dict[str, Any] = {
        "x": floats(draw, (*shape, inner), dtype),
        "weight": None,
        # The product of three large factors is in range or not by the order of its sums, and products of two cancel by
        # it.
        "a": moderate(draw, (rank, inner), own, scale=draw(factor)),
        "b": moderate(draw, (outer, rank), own, scale=draw(factor)),
        "scale": draw(weighted((3, (1.0, 2.0)), (1, (0.0, -0.5, 16.0)))),
    }
    if not rarely(draw, 2):
        arguments["weight"] = floats(draw, (outer, inner), dtype, scale=draw(factor))
    else:
        arguments["base"] = floats(draw, (*shape, outer), one_of(draw, (dtype, own)))
    if rarely(draw, 3):
        arguments["column_scale"] = moderate(draw, (outer,), one_of(draw, (dtype, own)), scale=draw(factor))
    if (arguments["weight"] or "column_scale" in arguments) and draw(st.booleans()):
        arguments["bias"] = floats(draw, (outer,), dtype)
    return example(draw, arguments, ("x", "weight", "a", "b", "bias", "base", "column_scale"))


def lora_linears(draw: Draw, limits: Limits) -> Example:
    dtype = one_of(draw, limits.dtypes)
    own = dtype if "float64" in limits.dtypes else one_of(draw, (dtype, "float32"))
    inner = size(draw, max(1, min(200, limits.elements // 128)), least=1)
    shape = leading(draw, min(limits.rows, max(1, limits.elements // (4 * inner))))
    factor = st.sampled_from((0.1, 0.3, 1.0))
    arguments: dict[str, Any] = {"x": floats(draw, (*shape, inner), dtype)}
    has_weights, base = not rarely(draw, 2), one_of(draw, (dtype, own))
    for suffix in ("", "_2", "_3")[: one_of(draw, (2, 3))]:
        outer, rank = size(draw, max(1, min(200, limits.elements // 128)), least=1), size(draw, 40, least=1)
        arguments |= {
            f"weight{suffix}": floats(draw, (outer, inner), dtype, scale=draw(factor)) if has_weights else None,
            f"a{suffix}": moderate(draw, (rank, inner), own, scale=draw(factor)),
            f"b{suffix}": moderate(draw, (outer, rank), own, scale=draw(factor)),
        }
        if not has_weights:
            arguments[f"base{suffix}"] = floats(draw, (*shape, outer), base)
        elif draw(st.booleans()):
            arguments[f"bias{suffix}"] = floats(draw, (outer,), dtype)
    arguments["scale"] = draw(weighted((3, (1.0, 2.0)), (1, (0.0, -0.5, 16.0))))
    return example(draw, arguments, tuple(name for name in arguments if name != "scale"))


def linear_log_prob(draw: Draw, limits: Limits) -> Example:
    arguments, shape, classes = _head(draw, limits)
    several = mostly(draw, 3, (), (1,), (2,), (5,), (17,))
    arguments |= {
        "target": _target(draw, (*shape, *several), classes, ignore_index := _ignored(draw, classes)),
        "ignore_index": ignore_index,
        "temperature": mostly(draw, 3, 1.0, 0.7, 3.0, 0.01, 100.0),
        "softcap": _softcap(draw),
    }
    if rarely(draw, 3):
        dtype = one_of(draw, limits.dtypes)
        arguments["temperature"] = Floats(shape, dtype, draw(layouts), "normal", 0.1, 1.0, seed=3)
    if arguments["hidden"].dtype != "float64" and rarely(draw, 3):
        arguments["logits_dtype"] = torch.float32
    arguments["batch_invariant"] = rarely(draw, 3)
    result = one_of(draw, ("log_prob", "return_entropy", "return_statistics"))
    if result != "log_prob":
        arguments[result] = True
    if not several and result != "return_statistics" and rarely(draw, 3):
        number, ignored = min(classes, one_of(draw, (1, 3, 8))), one_of(draw, (0, 1, 2, 3))
        arguments["allowed"] = Labels((*shape, number), classes, ignore_index, ignored, seed=4, distinct=True)
    return example(draw, arguments, ("hidden", "weight", "bias"))


def linear_divergence(draw: Draw, limits: Limits) -> Example:
    arguments, shape, classes = _head(draw, limits)
    dtype = arguments["hidden"].dtype if "float64" in limits.dtypes else one_of(draw, limits.dtypes)
    width = size(draw, max(1, min(257, limits.elements // max(prod(shape), classes))), least=1)
    arguments |= {
        "teacher_hidden": floats(draw, (*shape, width), dtype),
        "teacher_weight": floats(draw, (classes, width), dtype, scale=one_of(draw, (0.1, 0.3, 1.0))),
        "kind": one_of(draw, KINDS),
        "beta": draw(_SHARE),
        "temperature": mostly(draw, 3, 1.0, 0.7, 3.0, 0.1, 100.0),
        "softcap": _softcap(draw),
        "teacher_logit_scale": mostly(draw, 3, 1.0, 0.25, 2.0, -0.5, 0.0, 30.0),
        "teacher_softcap": _softcap(draw),
        "ignore_index": _ignored(draw, classes),
        **_reduction(draw),
    }
    if draw(st.booleans()):
        arguments["teacher_bias"] = floats(draw, (classes,), dtype)
    if draw(st.booleans()):
        arguments["target"] = _target(draw, shape, classes, arguments["ignore_index"])
        arguments["hard_weight"] = mostly(draw, 1, 0.0, 0.1, 0.5)
    if "budget" in arguments:
        arguments["budget"] += classes * getattr(torch, dtype).itemsize
    return example(draw, arguments, ("hidden", "weight", "bias"))


def kl_div(draw: Draw, limits: Limits) -> Example:
    return _divergence(draw, limits, reverse=draw(st.booleans()), skew=mostly(draw, 2, 0.0, 0.1, 0.5, 0.9))


def jsd(draw: Draw, limits: Limits) -> Example:
    return _divergence(draw, limits, beta=draw(_SHARE))


def total_variation(draw: Draw, limits: Limits) -> Example:
    return _divergence(draw, limits)


_SHARE = weighted((2, (0.5,)), (1, (0.1, 0.3, 0.9, 0.999)))


def _divergence(draw: Draw, limits: Limits, **options: Any) -> Example:
    dtype, classes = one_of(draw, limits.dtypes), _classes(draw, limits)
    shape = (*leading(draw, min(limits.rows, max(1, limits.elements // classes))), classes)
    student, teacher = floats(draw, shape, dtype), floats(draw, shape, dtype)
    if classes > 1 and rarely(draw, 9):
        student, teacher = replace(student, values="impossible"), replace(teacher, values="impossible")
    options |= {"temperature": mostly(draw, 3, 1.0, 0.7, 3.0, 0.1, 100.0), **_reduction(draw, "classes")}
    return example(draw, {"student": student, "teacher": teacher, **options}, ("student",))


def _reduction(draw: Draw, *more: str) -> dict[str, Any]:
    """How a divergence is reduced."""
    reduction = one_of(draw, ("mean", "sum", "none", *more))
    number = one_of(draw, NORMALIZERS)
    return {"reduction": reduction, "normalizer": number if reduction == "mean" and rarely(draw, 2) else None}


def _head(draw: Draw, limits: Limits) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """Hidden and weight with the options of how they are multiplied; the leading shape; the classes."""
    dtype, classes = one_of(draw, limits.dtypes), _classes(draw, limits)
    shape = leading(draw, min(limits.rows, max(1, limits.elements // classes)))
    rows = prod(shape)
    width = size(draw, max(1, min(257, limits.elements // max(rows, classes))), least=1)
    arguments: dict[str, Any] = {
        "hidden": floats(draw, (*shape, width), dtype),
        "weight": floats(draw, (classes, width), dtype, scale=one_of(draw, (0.1, 0.3, 1.0))),
        "logit_scale": mostly(draw, 3, 1.0, 0.25, 2.0, -0.5, 0.0, 30.0),
        "accumulate_dtype": None,
        "pack": not rarely(draw, 2),
    }
    if draw(st.booleans()):
        arguments["bias"] = floats(draw, (classes,), dtype)
    if rarely(draw, 3):
        wide = (torch.float64,) if dtype == "float64" else (torch.float32, torch.float64)
        arguments["accumulate_dtype"] = one_of(draw, wide)
    held = one_of(draw, ("default", "chunk", "budget"))
    if held == "chunk":
        arguments["chunk"] = one_of(draw, (1, 2, 3, 4, 7, 8, 64, rows + 1, "report"))
    elif held == "budget":
        row = classes * getattr(torch, dtype).itemsize
        arguments["budget"] = row * one_of(draw, (1, 2, 5, 1000)) + one_of(draw, (0, 4 * classes * width))
    if rarely(draw, 5):
        arguments["main_grad"] = Floats((classes, width), "float32", values="zeros")
    return arguments, shape, classes


def _loss_options(draw: Draw, limits: Limits, shape: tuple[int, ...], classes: int) -> tuple[dict[str, Any], Labels]:
    """The options that both losses have, most of them at their defaults, and the targets."""
    options: dict[str, Any] = {
        "ignore_index": _ignored(draw, classes),
        "label_smoothing": mostly(draw, 3, 0.0, 0.1, 0.5, 0.99, 1.0),
        "z_loss": mostly(draw, 3, 0.0, 1e-4, 1e-2, 1.0),
        "softcap": _softcap(draw),
        "reduction": one_of(draw, ("mean", "sum", "none")),
        "return_metrics": rarely(draw, 2),
    }
    if rarely(draw, 3):
        kind = one_of(draw, ("ones", "normal", "zeros"))
        # Positive weights only: otherwise a mean could divide by almost zero.
        offset = {"normal": 4.0}.get(kind, 0.0)
        dtype = one_of(draw, limits.dtypes)
        options["class_weight"] = Floats((classes,), dtype, draw(layouts), kind, 0.5, offset, 2)
    if options["reduction"] == "mean" and rarely(draw, 2):
        options["normalizer"] = one_of(draw, (*NORMALIZERS, Scalar(5.5, "float64"), Scalar(100.0, "bfloat16")))
    return options, _target(draw, shape, classes, options["ignore_index"])


def _target(draw: Draw, shape: tuple[int, ...], classes: int, ignore_index: int) -> Labels:
    ignored = draw(weighted((2, (0, 3)), (1, (1, 2))))
    return Labels(shape, classes, ignore_index, ignored, layout=draw(layouts), seed=draw(st.integers(0, 99)))


def _ignored(draw: Draw, classes: int) -> int:
    """The ignored index: the usual one, or a class, or another that is none."""
    return int(mostly(draw, 3, -100, 0, classes - 1, -1, classes + 5))


def _softcap(draw: Draw) -> float | None:
    return mostly(draw, 3, None, 1e-2, 1.0, 30.0, 1e4)  # type: ignore[no-any-return]


def _classes(draw: Draw, limits: Limits) -> int:
    return size(draw, limits.elements, mostly(draw, 4, SIZES, WIDE), least=1)


def _rows(draw: Draw, limits: Limits, short: int) -> tuple[int, ...]:
    """(..., width), with up to `short` rows where they are short."""
    width = size(draw, limits.elements, mostly(draw, 4, SIZES, WIDE))
    rows = limits.rows if width > SHORT else short
    return (*leading(draw, max(1, min(rows, limits.elements // max(1, width)))), width)


def _vector(draw: Draw, limits: Limits, width: int) -> Floats | None:
    """A weight or bias of any dtype, or none."""
    return None if rarely(draw, 3) else floats(draw, (width,), one_of(draw, limits.dtypes))
