# SPDX-License-Identifier: Apache-2.0
"""gated_rms_norm: an RMSNorm with a gate before or after it."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops._inputs import misuse_table, normal, normals, sample_table, tensor_workloads

Activation = Literal["silu", "sigmoid"]


def check(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0,
    activation: Activation = "silu", gate_first: bool = False, group_size: int | None = None,
) -> None:  # fmt: skip
    name = "gated_rms_norm"
    checks.floating(name, 2, x=x, gate=gate, weight=weight)
    checks.at_least_one_dimension(name, "x", x)
    if x.shape != gate.shape:
        checks.unlike(name, "gate", gate, "x", x)
    checks.vector(name, "weight", weight, x.shape[-1], "x", x)
    checks.positive(name, "eps", eps)
    checks.choice(name, "activation", activation, ("silu", "sigmoid"))
    checks.finite(name, "weight_offset", weight_offset)
    if weight is None and weight_offset != 0.0:
        checks.fail(OptionError, name, f"weight_offset must be 0 without a weight, got {weight_offset}")
    if group_size is None:
        return
    checks.integer(name, "group_size", group_size)
    if group_size < 1 or x.shape[-1] % group_size:
        checks.fail(OptionError, name, f"group_size must divide the width of x {checks.shape(x)}, got {group_size}")


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return n(*shape), n(*shape)

    first, wide = {"gate_first": True}, torch.float64 if dtype == torch.float64 else torch.float32
    yield from sample_table(
        ("one_block", (*pair(2, 3, 64), n(64)), {}, "the width is a power of two"),
        ("odd_width", (*pair(5, 100), n(100)), {}, "masks on rows and columns"),
        ("many_rows", (*pair(600, 24), n(24)), {}, "every program of the backward walks several rows"),
        ("whole_row", (*pair(3, 4096), n(4096)), {}, "one row a program"),
        ("sigmoid", (*pair(6, 96), n(96)), {"activation": "sigmoid"}, "the gate is a sigmoid"),
        ("gate_first", (*pair(6, 96), n(96)), first, "what is normalized is already gated"),
        ("groups", (*pair(6, 96), n(96)), {**first, "group_size": 24},
         "four norms a row, each with a part of the weight"),
        ("many_groups", (*pair(300, 96), n(96)), {"group_size": 12}, "programs of one group walk several rows"),
        ("first_sigmoid", (*pair(5, 40), n(40)), {**first, "activation": "sigmoid", "weight_offset": 1.0},
         "1 + weight"),
        ("offset", (*pair(5, 40), n(40)), {"weight_offset": 1.0}, "1 + weight after the norm"),
        ("weightless", pair(6, 96), {}, "no weight and no weight gradient"),
        ("weightless_groups", pair(6, 96), {**first, "group_size": 32}, "groups without a weight"),
        ("frozen_gate", (*pair(6, 96), n(96)), {}, "no gradient of the gate", "gate"),
        ("frozen_weight", (*pair(6, 96), n(96)), {}, "no work for the weight gradient", "weight"),
        ("frozen_input", (*pair(6, 96), n(96)), first, "only the gradients of gate and weight", "x"),
        ("large_gate", (n(6, 96), n(6, 96, scale=30), n(96)), {}, "the gate saturates on both sides"),
        ("large_eps", (n(4, 48, scale=0.01), n(4, 48), n(48), 0.1), {}, "eps dominates the mean square"),
        ("strided_rows", (n(5, 160)[:, :80], n(5, 240)[:, 80:160], n(80)), first,
         "both are slices, read through their strides"),
        ("transposed", (n(40, 6).t(), n(6, 40), n(40)), {}, "the last dimension of x is not contiguous"),
        ("wide_rows", (normal(device, wide, 5, 72), n(5, 72), n(72)), first,
         "float32 rows of a scan, beside a narrow gate"),
        ("vector", (*pair(33), n(33)), {}, "no leading dimension"),
        ("empty", (*pair(0, 64), n(64)), {}, "no rows: nothing is launched, gradients are zero"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    yield from misuse_table(
        "gated_rms_norm", (x, x),
        ("integers", DtypeError, "x must have a floating dtype, got torch.int32", {}, x.int(), x),
        ("gate_shape", ShapeError, "gate must have the shape of x (2, 8), got (1, 8)", {}, x, x[:1]),
        ("weight_shape", ShapeError, "weight must have shape (8,) to match x (2, 8), got (7,)", {}, x, x, weight[1:]),
        ("activation", OptionError, "activation must be one of 'silu', 'sigmoid', got 'gelu'", {"activation": "gelu"}),
        ("group_size", OptionError, "group_size must divide the width of x (2, 8), got 3", {"group_size": 3}),
        ("offset", OptionError, "weight_offset must be 0 without a weight, got 1.0", {"weight_offset": 1.0}),
    )  # fmt: skip


def workloads() -> Iterator[Workload]:
    # Heads of Qwen3-Next (8192 tokens of 32), rows of Mamba 2.
    return tensor_workloads("NH", ((262144, 128), (16384, 4096), (16384, 8192)), matrices=2, vectors=1)


def work(x: Tensor, gate: Tensor, *rest: Any, **options: Any) -> Work:
    return Work(2 * x.nbytes + gate.nbytes, 5 * x.nbytes + 3 * gate.nbytes)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout({"x": "… (width)", "gate": "… (width)", "weight": "(width)"}, ("x",)),
)  # fmt: skip
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0,
    activation: Activation = "silu", gate_first: bool = False, group_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Scale every row, or every group of a row, to unit root mean square, with a gate after it or before it.

        y = norm(x) · (weight_offset + weight) · act(gate)               Qwen3-Next
        y = norm(x · act(gate)) · (weight_offset + weight)               gate_first=True: Mamba 2
        norm(x) = x / sqrt(mean(x²) + eps)                               (mean over each group of group_size columns)

    x              (..., width)   any floating dtype
    gate           (..., width)   any floating dtype
    weight         (width,)       any floating dtype; without it the factor is 1
    eps            added to the mean square, in the units of x²; > 0
    weight_offset  1.0 for models that store weight - 1
    activation     "silu" or "sigmoid"
    gate_first     whether the gate comes before the norm, as in the second formula
    group_size     columns of a group, a divisor of the width; the whole row by default
    returns        (..., width), dtype of x; computed in float32 (float64 for float64) and rounded once

    Raises ShapeError if gate has another shape than x or weight is not (width,), DtypeError for integers, OptionError
    for eps ≤ 0 and a group_size that does not divide the width. Dao & Gu 2024, arXiv:2405.21060.
    """
    wide = accumulator(x.dtype)
    row, factor = x.to(wide), F.silu(gate.to(wide)) if activation == "silu" else torch.sigmoid(gate.to(wide))
    if gate_first:
        row = row * factor
    groups = row.unflatten(-1, (-1, x.shape[-1] if group_size is None else group_size)) if x.shape[-1] else row
    # Not · rsqrt(…), as in rms_norm.
    y = (groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + eps)).view(x.shape)
    if weight is not None:
        y = y * (weight.to(wide) + weight_offset)
    if not gate_first:
        y = y * factor
    return y.to(x.dtype)
