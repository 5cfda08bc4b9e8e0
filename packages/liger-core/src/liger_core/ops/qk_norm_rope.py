# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope: RMSNorm of every head of queries and keys, then rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.checks import Cast
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Work, Workload, op
from liger_core.ops._inputs import ROWS, misuses_of, normal
from liger_core.ops._rotary import DTYPES, HEADS, TABLE, angles, check_rotary
from liger_core.ops.rms_norm import rms_norm
from liger_core.ops.rope import rope


def check(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    weight_offset: float = 0.0, cast: Cast = "input", interleaved: bool = False,
) -> None:  # fmt: skip
    check_rotary("qk_norm_rope", q, k, cos, sin)
    checks.floating("qk_norm_rope", 3, q=q, q_weight=q_weight, k_weight=k_weight)
    checks.vector("qk_norm_rope", "q_weight", q_weight, q.shape[-1], "q", q)
    checks.vector("qk_norm_rope", "k_weight", k_weight, k.shape[-1], "k", k)
    checks.positive("qk_norm_rope", "eps", eps)
    checks.finite("qk_norm_rope", "weight_offset", weight_offset)
    checks.choice("qk_norm_rope", "cast", cast, ("input", "float32"))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def n(*shape: int, scale: float = 1.0) -> Tensor:
        return normal(device, dtype, *shape, scale=scale)

    def sample(
        name: str,
        q: Tensor,
        k: Tensor,
        tables: tuple[Tensor, Tensor],
        *,
        why: str,
        frozen: tuple[str, ...] = (),
        **options: Any,
    ) -> Sample:
        width = q.shape[-1]
        weights = options.pop("weights", None) or (n(width), n(width))
        eps = options.pop("eps", 1e-6)
        return Sample(name, (q, k, *weights, *tables, eps), options, why=why, frozen=("cos", "sin", *frozen))

    usual = angles(device, dtype, 5, 16)
    yield sample("one_block", n(2, 4, 5, 16), n(2, 2, 5, 16), usual, why="heads and columns are powers of two")
    yield sample("odd_heads", n(2, 6, 5, 16), n(2, 3, 5, 16), usual, why="neither number of heads is a power of two")
    q, k = n(2, 5, 6, 16).transpose(1, 2), n(2, 5, 2, 16).transpose(1, 2)
    yield sample("view", q, k, usual, why="(B, heads, T, D) views of (B, T, heads, D) are read through strides")
    packed = n(2, 5, (6 + 2 + 2) * 16)
    q, k = (
        packed[..., :96].unflatten(-1, (6, 16)).transpose(1, 2),
        packed[..., 96:128].unflatten(-1, (2, 16)).transpose(1, 2),
    )
    yield sample("packed_projection", q, k, usual, why="slices of one query-key-value projection")
    columns = n(2, 4, 16, 5).transpose(2, 3)
    yield sample(
        "column_strides", columns, n(2, 2, 5, 16), usual, why="neighboring columns of q are not neighbors in memory"
    )
    yield sample(
        "partial",
        n(1, 2, 5, 40),
        n(1, 1, 5, 40),
        usual,
        why="columns past the rotary width are normalized, not rotated",
    )
    gemma: dict[str, Any] = {"weight_offset": 1.0, "cast": "float32"}
    yield sample("gemma", n(2, 4, 5, 16), n(2, 1, 5, 16), usual, **gemma, why="1 + weight, multiplied in float32")
    yield sample(
        "partial_gemma",
        n(1, 2, 5, 24),
        n(1, 1, 5, 24),
        usual,
        **gemma,
        why="1 + weight on columns that are not rotated",
    )
    yield sample(
        "cast_input", n(2, 4, 5, 16, scale=30), n(2, 2, 5, 16), usual, cast="input", why="rounds before the weight"
    )
    inter = angles(device, dtype, 5, 24, interleaved=True)
    yield sample(
        "interleaved", n(2, 4, 5, 24), n(2, 2, 5, 24), inter, interleaved=True, why="neighboring columns are a pair"
    )
    part = angles(device, dtype, 5, 8, interleaved=True)
    yield sample(
        "interleaved_partial",
        n(1, 3, 5, 20),
        n(1, 1, 5, 20),
        part,
        interleaved=True,
        why="interleaved, partial, odd pairs",
    )
    per_batch = torch.stack([usual[0], usual[1]]), torch.stack([usual[1], usual[0]])
    yield sample("per_batch", n(2, 3, 5, 16), n(2, 3, 5, 16), per_batch, why="cos and sin differ by batch row")
    shared = usual[0][None], usual[1][None]
    yield sample("shared_batch", n(3, 2, 5, 16), n(3, 1, 5, 16), shared, why="cos and sin have a batch of one")
    yield sample(
        "unequal_halves",
        n(1, 2, 5, 16),
        n(1, 2, 5, 16),
        (n(5, 16), n(5, 16)),
        why="the halves of cos and sin need not be equal",
    )
    wide = angles(device, torch.float32, 5, 16)
    yield sample("float32_table", n(1, 2, 5, 16), n(1, 2, 5, 16), wide, why="cos and sin in another dtype than q")
    weights = normal(device, torch.float32, 16), n(16)
    yield sample(
        "float32_weight",
        n(1, 2, 5, 16),
        n(1, 2, 5, 16),
        usual,
        weights=weights,
        why="q_weight has another dtype than q",
    )
    yield sample(
        "frozen_weights",
        n(1, 2, 5, 16),
        n(1, 2, 5, 16),
        usual,
        frozen=("q_weight", "k_weight"),
        why="no weight gradients",
    )
    yield sample(
        "frozen_key", n(1, 2, 5, 16), n(1, 2, 5, 16), usual, frozen=("k", "k_weight"), why="only gradients of the query"
    )
    yield sample(
        "only_weights", n(1, 2, 5, 16), n(1, 2, 5, 16), usual, frozen=("q", "k"), why="only the weights' gradients"
    )
    yield sample(
        "large_eps", n(1, 2, 5, 16, scale=0.01), n(1, 2, 5, 16), usual, eps=0.1, why="eps dominates the mean square"
    )
    long = angles(device, dtype, 3169, 4)
    yield sample("many_tokens", n(1, 4, 3169, 4), n(1, 2, 3169, 4), long, why="several tokens a tile, on a GPU too")
    cos, sin = angles(device, dtype, 131, 8, interleaved=True)
    tables = torch.stack([cos, sin]), torch.stack([sin, cos])
    yield sample(
        "many_partial", n(2, 3, 131, 20), n(2, 1, 131, 20), tables, interleaved=True,
        why="several tokens a tile, which differ by batch row"
    )  # fmt: skip
    heads = angles(device, dtype, 2, 128)
    yield sample("many_heads", n(1, 40, 2, 128), n(1, 8, 2, 128), heads, why="the heads of q take several programs")
    yield sample(
        "widest",
        n(1, 2, 2, 1024),
        n(1, 1, 2, 1024),
        angles(device, dtype, 2, 1024),
        why="the widest heads that Triton takes",
    )
    yield sample(
        "no_query_heads", n(2, 0, 5, 16), n(2, 3, 5, 16), usual, why="no queries: their weight gradient is zero"
    )
    yield sample("no_key_heads", n(2, 3, 5, 16), n(2, 0, 5, 16), usual, why="no keys: their weight gradient is zero")
    yield sample(
        "empty", n(0, 2, 5, 16), n(0, 2, 5, 16), usual, why="no batch: nothing is launched, gradients are zero"
    )
    zeros = torch.zeros(1, 2, 5, 16, device=device, dtype=dtype)
    yield sample("zeros", zeros, n(1, 2, 5, 16), usual, why="the mean square is zero: eps alone")


def misuses(device: torch.device) -> Iterator[Misuse]:
    def z(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    misuse = misuses_of("qk_norm_rope")
    q, k, w, t = z(2, 4, 5, 16), z(2, 2, 5, 16), z(16), z(5, 16)
    message = "q must have shape (batch, heads, tokens, width), got (4, 5, 16)"
    yield misuse("dimensions", (q[0], k, w, w, t, t), ShapeError, message)
    message = "k must have shape (2, heads, 5, 16) to match q (2, 4, 5, 16), got (2, 2, 6, 16)"
    yield misuse("key_tokens", (q, z(2, 2, 6, 16), w, w, t, t), ShapeError, message)
    message = "q_weight must have shape (16,) to match q (2, 4, 5, 16), got (64,)"
    yield misuse("q_weight_shape", (q, k, z(64), w, t, t), ShapeError, message)
    message = "k_weight must have shape (16,) to match k (2, 2, 5, 16), got (32,)"
    yield misuse("k_weight_shape", (q, k, w, z(32), t, t), ShapeError, message)
    message = "the rotary width of cos must be even and at most 16, the width of q, got 18"
    yield misuse("rotary_width", (q, k, w, w, z(5, 18), z(5, 18)), ShapeError, message)
    message = "k must have dtype torch.float32 like q, got torch.bfloat16; cast one of them"
    yield misuse("dtypes", (q, k.bfloat16(), w, w, t, t), DtypeError, message)
    yield misuse("no_weight", (q, k, None, w, t, t), DtypeError, "q_weight must be a tensor, got NoneType")
    elsewhere = torch.zeros(16, device="meta")
    yield misuse("device", (q, k, w, elsewhere, t, t), DeviceError, f"k_weight must be on {q.device} like q, got meta")
    yield misuse("eps_zero", (q, k, w, w, t, t, 0.0), OptionError, "eps must be a finite number > 0, got 0.0")
    message = "weight_offset must be a finite number, got '1'"
    yield misuse("offset", (q, k, w, w, t, t), OptionError, message, weight_offset="1")
    message = "cast must be one of 'input', 'float32', got 'bf16'"
    yield misuse("cast", (q, k, w, w, t, t), OptionError, message, cast="bf16")


def workloads() -> Iterator[Workload]:
    def shape(
        batch: int, tokens: int, heads: int, key_heads: int, width: int, axis: str = "", quick: bool = False
    ) -> Workload:
        def make(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
            q = normal(device, dtype, batch, tokens, heads, width).transpose(1, 2)
            k = normal(device, dtype, batch, tokens, key_heads, width).transpose(1, 2)
            weights = normal(device, dtype, width), normal(device, dtype, width)
            return (q, k, *weights, *angles(device, dtype, tokens, width)), {}

        name = f"{batch}x{tokens}x{heads}+{key_heads}x{width}"
        return Workload(f"{name}-{axis}", make, quick, axis=(axis, tokens)) if axis else Workload(name, make, quick)

    yield shape(1, 256, 8, 2, 64, quick=True)
    # Qwen3 8B, and few heads as in Gemma 3 4B.
    yield shape(4, 4096, 32, 8, 128)
    yield shape(4, 4096, 8, 4, 256)
    for tokens in ROWS:
        yield shape(1, tokens, 32, 8, 128, "T", quick=tokens <= 1024)


def work(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    weight_offset: float = 0.0, cast: Cast = "input", interleaved: bool = False,
) -> Work:  # fmt: skip
    size = (q.numel() + k.numel()) * q.element_size()
    return Work(2 * size, 5 * size)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout(
        {"q": HEADS, "k": HEADS, "q_weight": "(width)", "k_weight": "(width)", "cos": TABLE, "sin": TABLE}, ("q", "k"),
    ),
    dtypes=DTYPES,
)  # fmt: skip
def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    weight_offset: float = 0.0, cast: Cast = "input", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalize every head of queries and keys, then rotate pairs of its columns by position-dependent angles.

        y = rope(rms_norm(x, weight, eps), cos, sin)          for x = q and x = k, each with its weight

    q                         (batch, heads, tokens, width)       any floating dtype and strides
    k                         (batch, key_heads, tokens, width)   dtype of q (under autocast both get the wider of
                              theirs); any number of heads
    q_weight, k_weight        (width,)                            any floating dtype
    cos, sin                  (tokens, R), (1, tokens, R) or (batch, tokens, R); R even, at most width; any floating
                              dtype. Columns past R are only normalized
    eps, weight_offset, cast  as in rms_norm
    interleaved               as in rope
    returns                   queries and keys, shapes, dtypes and (where dense) strides of the inputs; statistics are
                              accumulated in float32 (float64 for float64)

    Raises ShapeError for shapes that do not match, DtypeError for integers or if q and k differ, OptionError for eps ≤
    0. Dehghani et al. 2023, arXiv:2302.05442 (normalized queries and keys); Su et al. 2021, arXiv:2104.09864 (rotary
    embedding).
    """
    normed = [
        rms_norm.reference(x, weight, eps, weight_offset=weight_offset, cast=cast)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    return rope.reference(normed[0], normed[1], cos, sin, interleaved=interleaved)
