# SPDX-License-Identifier: Apache-2.0
"""attention_residual: the input of a layer as attention over the outputs of earlier layers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops._inputs import ROWS, WIDTHS, misuse_table, normal, normals, sample_table, sized, workloads_of


def check(layers: Tensor, query: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> None:
    name = "attention_residual"
    checks.floating(name, 2, layers=layers, query=query, weight=weight)
    if layers.dim() < 2 or not layers.shape[0]:
        checks.misshapen(name, "layers must have the dimensions (depth ≥ 1, ..., width)", layers)
    checks.vector(name, "query", query, layers.shape[-1], "layers", layers)
    checks.vector(name, "weight", weight, layers.shape[-1], "layers", layers)
    checks.positive(name, "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)

    def call(depth: int, rows: int, width: int) -> tuple[Tensor, ...]:
        # Scores stay small at every width: among scores of hundreds, the round-off of one decides the gradients.
        return n(depth, rows, width), n(width, scale=2.5 / width**0.5), n(width)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield from sample_table(
        # Some of 48 rows have close scores, and gradients beyond round-off even if scores are thirty times as large.
        ("one_block", (n(3, 4, 12, 64), n(64, scale=0.3), n(64)), {}, "the width is a power of two"),
        ("odd_width", call(4, 5, 100), {}, "masks on rows and columns"),
        ("many_rows", call(2, sized(device, 420, 40), 2600), {}, "programs of the backward walk several rows"),
        ("whole_row", call(3, 6, 4096), {}, "every chunk of a row is full"),
        ("last_chunk", call(3, 3, 2200), {}, "only the last chunk of a row is masked"),
        ("one_layer", call(1, 5, 40), {}, "a softmax of one score: y is the layer, and the query has no gradient"),
        ("deep", call(17, 3, 40), {}, "many layers, one after the other"),
        ("weightless", call(3, 48, 72)[:2], {}, "keys are normalized without a weight"),
        ("zero_query", (n(3, 5, 72), torch.zeros_like(n(72)), n(72)), {},
         "the initial query of the paper: a mean over layers"),
        ("sharp", (n(3, 48, 72), n(72, scale=2), n(72)), {}, "one layer gets nearly all attention"),
        ("large_eps", (n(3, 5, 72, scale=0.01), n(72), n(72), 0.1), {}, "eps dominates the mean square"),
        ("float32_weights", (n(3, 5, 72), normal(device, wide, 72, scale=0.3), normal(device, wide, 72)), {},
         "float32 parameters"),
        ("frozen_query", call(3, 48, 72), {}, "the gradient of the weight alone", "query"),
        ("frozen_weights", call(3, 48, 72), {}, "no work for weight gradients", "query", "weight"),
        ("frozen_layers", call(3, 48, 72), {}, "only weight gradients", "layers"),
        ("strided_rows", (n(3, 5, 160)[..., :72], *call(3, 5, 72)[1:]), {}, "a slice is read through its strides"),
        ("depth_inside", (n(5, 3, 72).transpose(0, 1), *call(3, 5, 72)[1:]), {}, "the layers of a row are neighbors"),
        ("transposed", (n(3, 72, 5).mT, *call(3, 5, 72)[1:]), {}, "the last dimension of layers is not contiguous"),
        ("one_row", (n(3, 40), n(40, scale=0.3), n(40)), {}, "no dimension between depth and width"),
        ("empty", (n(3, 0, 64), n(64), n(64)), {}, "no rows: nothing is launched, gradients are zero"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    layers, query = torch.zeros(3, 2, 8, device=device), torch.zeros(8, device=device)
    dimensions = "layers must have the dimensions (depth ≥ 1, ..., width), got"
    yield from misuse_table(
        "attention_residual", (layers, query),
        ("integers", DtypeError, "layers must have a floating dtype, got torch.int32", {}, layers.int(), query),
        ("vector", ShapeError, f"{dimensions} (8,)", {}, query, query),
        ("no_layers", ShapeError, f"{dimensions} (0, 2, 8)", {}, layers[:0], query),
        ("query_shape", ShapeError, "query must have shape (8,) to match layers (3, 2, 8), got (7,)",
         {}, layers, query[1:]),
        ("weight_shape", ShapeError, "weight must have shape (8,) to match layers (3, 2, 8), got (7,)",
         {}, layers, query, query[1:]),
        ("eps", OptionError, "eps must be a finite number > 0, got 0.0", {}, layers, query, query, 0.0),
    )  # fmt: skip


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, depth: int, rows: int, width: int) -> tuple[Tensor, ...]:
        vectors = normal(device, dtype, width, scale=width**-0.5), torch.ones(width, device=device, dtype=dtype)
        return normal(device, dtype, depth, rows, width), *vectors

    of_size = workloads_of(draw, "DNH")
    yield of_size(4, 256, 512, quick=True)
    # The blocks of Kimi Linear, and all layers of a small model.
    for sizes in ((9, 8192, 2304), (9, 8192, 4096), (25, 4096, 2048)):
        yield of_size(*sizes)
    for rows in ROWS[:-2]:
        yield of_size(9, rows, 4096, axis="N", quick=rows <= 1024)
    for width in WIDTHS[:-2]:
        yield of_size(9, 8192, width, axis="H", quick=width <= 512)


def work(layers: Tensor, *rest: Any, **options: Any) -> Work:
    size, layer_size = layers.nbytes, layers.nbytes // max(1, layers.shape[0])
    return Work(size + layer_size, 3 * size + 2 * layer_size)


@op(check=check, samples=samples, misuses=misuses, workloads=workloads, work=work)
def attention_residual(layers: Tensor, query: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Attend over depth: sum the outputs of earlier layers, weighted by a softmax of their scores.

        y = Σ_k a_k · layers_k,   a = softmax(s)                        (over the layers, for each position)
        s_k = Σ query · weight · layers_k / sqrt(mean(layers_k²) + eps)  (over the width)

    layers   (depth, ..., width)   any floating dtype; the outputs of earlier layers, or of blocks of layers, stacked
    query    (width,)              any floating dtype; learned, one for each layer that attends
    weight   (width,)              any floating dtype; of the RMSNorm of the keys; without it the factor is 1
    eps      added to the mean square, in the units of layers²; > 0
    returns  (..., width), dtype of layers; computed in float32 (float64 for float64) and rounded once

    Raises ShapeError if query or weight is not (width,) or there are no layers, DtypeError for integers, OptionError
    for eps ≤ 0. Kimi Team 2026, arXiv:2603.15031.
    """
    wide = accumulator(layers.dtype)
    value = layers.to(wide)
    by = query.to(wide) if weight is None else query.to(wide) * weight.to(wide)
    score = (value * by).sum(-1) / torch.sqrt(value.square().mean(-1) + eps)
    attention = torch.softmax(score, 0).unsqueeze(-1)
    # As Σ a_k = 1, values may be relative to that of the highest score, for which softmax would cancel in 1 - a.
    nearest = value.gather(0, score.argmax(0, keepdim=True).unsqueeze(-1).expand_as(value[:1]))
    fixed = attention.detach()
    return (fixed * value + (attention - fixed) * (value - nearest)).sum(0).to(layers.dtype)
