# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope in Triton: one read and one write of queries and keys in one launch, through their strides."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._norm import sum_columns, zero
from liger_triton._qk_norm_rope import backward_launch, forward_launch
from liger_triton.launch import (
    cdiv,
    contiguous,
    dense_like,
    differentiable_kernels,
    fuses,
    power_of_two,
    processors,
    supported,
)
from liger_triton.rope import table_strides

# A head is one row of a tile.
WIDEST_HEAD = 1024


class Shape(NamedTuple):
    """Columns of a tile (tokens × heads × width), programs per multiprocessor, pipeline stages, and warps."""

    columns: int
    programs: int
    stages: int
    warps: int


def forward_shape(width: int, q_heads: int, k_heads: int) -> Shape:
    """Return the forward shape. On one H100 (bfloat16), 32 + 4 heads of 64 take 61 µs; tiles of 1024 columns, 73."""
    if 64 < width < 256:
        return Shape(1024, 16, 2, 1)
    return Shape(2048, 8, 2, 1 if _sixteen(2048, width, q_heads, k_heads) else 2)


def backward_shape(width: int, q_heads: int, k_heads: int) -> Shape:
    """Return the backward shape: 32 + 8 heads of 128 reach .87 of copy bandwidth on one H200 (bfloat16)."""
    if width >= 256:
        return Shape(2048, 4, 3, 2)
    shape = Shape(4096, 2, 3, 4)
    if _sixteen(shape.columns, width, q_heads, k_heads):
        return Shape(1024, 8, 3, 1) if width > 64 else Shape(2048, 4, 3, 4)
    return shape


def _sixteen(columns: int, width: int, *heads: int) -> bool:
    """Whether a tile has 16 heads, which two or four warps load in a badly pipelined way."""
    return 16 in (_heads(number, columns // power_of_two(width)) for number in heads)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    weight_offset: float = 0.0, cast: Literal["input", "float32"] = "input", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    supported(q, k, q_weight, k_weight, cos, sin)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise Unsupported("gradients for cos and sin")
    if q.shape[-1] > WIDEST_HEAD:
        raise Unsupported(f"heads of more than {WIDEST_HEAD} columns")
    result: tuple[Tensor, Tensor] = _qk_norm_rope(
        q, k, q_weight, k_weight, cos, sin, eps, weight_offset, cast == "input", interleaved
    )
    return result


def _allocate(q: Tensor, k: Tensor, *rest: object) -> Outputs:
    return _like(q), _like(k), _scales(q), _scales(k)


def _scales(x: Tensor) -> Tensor:
    """Allocate (batch, tokens, heads), the order of projections in memory."""
    batch, heads, tokens, _ = x.shape
    return x.new_empty((batch, tokens, heads), dtype=torch.float32)


def _like(x: Tensor) -> Tensor:
    """Allocate memory in the order of x's strides, with adjacent columns."""
    like = torch.empty_like(x)
    return like if like.stride(-1) == 1 else dense_like(x)


def _launch(
    out_q: Tensor, out_k: Tensor, inverse_q: Tensor, inverse_k: Tensor, /, q: Tensor, k: Tensor, q_weight: Tensor,
    k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, weight_offset: float, cast_input: bool, interleaved: bool,
) -> None:  # fmt: skip
    q, k, cos, sin = (_columns(t) for t in (q, k, cos, sin))
    batch, _, tokens, width = q.shape
    shape = forward_shape(width, q.shape[1], k.shape[1])
    rows, options = _options(width, cos.shape[-1], interleaved, shape)
    q_heads, k_heads = (_heads(x.shape[1], rows) for x in (q, k))
    q_tiles, k_tiles = cdiv(q.shape[1], q_heads), cdiv(k.shape[1], k_heads)
    # A program has one tile of heads of q and one of k in one batch row; programs with the same ones share tokens.
    different, most = batch * math.lcm(max(1, q_tiles), max(1, k_tiles)), shape.programs * processors(q.device)
    programs = different * min(tokens, max(1, most // max(1, different))) if q_tiles + k_tiles else 0
    # The tokens of a tile: at most as many as every program has.
    q_tokens, k_tokens = (
        max(1, min(rows // heads, power_of_two(batch * tokens * tiles // max(1, programs) + 1) // 2))
        for heads, tiles in ((q_heads, q_tiles), (k_heads, k_tiles))
    )
    if 2 * programs <= most:
        # With few tokens, there is room for more threads: one token of 32 + 8 heads takes 2.7 µs on one H200, not 3.7.
        options["num_warps"] = 4 if programs < processors(q.device) else 2
    if programs:
        forward_launch(
            (programs,), q, k, out_q, out_k, inverse_q, inverse_k, q_weight.contiguous(), k_weight.contiguous(), cos,
            sin,
            *q.stride()[:3], *k.stride()[:3], *out_q.stride()[:3], *out_k.stride()[:3], *_tables(cos, sin, q.shape[0]),
            batch, tokens, q.shape[1], k.shape[1], q_tiles, k_tiles, programs, eps, weight_offset,
            HALF=cos.shape[-1] // 2, WIDTH=width, CAST_INPUT=cast_input,
            Q_TOKENS=q_tokens, Q_HEADS=q_heads, K_TOKENS=k_tokens, K_HEADS=k_heads,
            Q_EVEN=q.shape[1] % q_heads == 0, K_EVEN=k.shape[1] % k_heads == 0, **options,
        )  # fmt: skip


def _allocate_backward(
    grad_out_q: Tensor | None, grad_out_k: Tensor | None, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor,
    sin: Tensor, inverse_q: Tensor, inverse_k: Tensor, weight_offset: float, interleaved: bool, needs: list[bool],
) -> Outputs:  # fmt: skip
    return (
        _like(q) if needs[0] and grad_out_q is not None else None,
        _like(k) if needs[1] and grad_out_k is not None else None,
        dense_like(q_weight) if needs[2] and grad_out_q is not None else None,
        dense_like(k_weight) if needs[3] and grad_out_k is not None else None,
    )


def _launch_backward(
    grad_q: Tensor | None, grad_k: Tensor | None, grad_q_weight: Tensor | None, grad_k_weight: Tensor | None, /,
    grad_out_q: Tensor | None, grad_out_k: Tensor | None, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor,
    sin: Tensor, inverse_q: Tensor, inverse_k: Tensor, weight_offset: float, interleaved: bool, needs: list[bool],
) -> None:  # fmt: skip
    """Launch the backward pass; a second kernel adds the programs' float32 sums for the weight gradients."""
    q, k, cos, sin = (_columns(t) for t in (q, k, cos, sin))
    # Rows without a gradient are not walked, so any tensor can stand in for it.
    above_q, above_k = (x if grad is None else _columns(grad) for grad, x in ((grad_out_q, q), (grad_out_k, k)))
    into_q, into_k = (x if grad is None else grad for grad, x in ((grad_q, q), (grad_k, k)))
    shape = backward_shape(q.shape[3], q.shape[1], k.shape[1])
    rows, options = _options(q.shape[3], cos.shape[-1], interleaved, shape)
    q_tile, k_tile = (_tile(x.shape[0] * x.shape[2], x.shape[1], rows) for x in (q, k))
    q_count = q_tile.number if grad_q is not None or grad_q_weight is not None else 0
    k_count = k_tile.number if grad_k is not None or grad_k_weight is not None else 0
    sums = (grad_q_weight is not None) + (grad_k_weight is not None)
    programs = min(q_count + k_count, shape.programs * processors(q.device))
    if not programs:
        zero(grad_q_weight, grad_k_weight)
        return
    partials = q.new_empty((sums, programs, q.shape[3]), dtype=torch.float32) if sums else None
    backward_launch(
        (programs,), above_q, above_k, q, k, grad_q, grad_k, inverse_q, inverse_k,
        contiguous(q_weight), contiguous(k_weight), cos, sin, grad_q_weight, grad_k_weight, partials,
        *above_q.stride()[:3], *above_k.stride()[:3], *q.stride()[:3], *k.stride()[:3],
        *into_q.stride()[:3], *into_k.stride()[:3], *_tables(cos, sin, q.shape[0]),
        q.shape[0] * q.shape[2], q.shape[2], q.shape[1], k.shape[1], cos.shape[-1] // 2, q.shape[3],
        q_count, k_count, programs, weight_offset,
        Q_TOKENS=q_tile.tokens, Q_HEADS=q_tile.heads, K_TOKENS=k_tile.tokens, K_HEADS=k_tile.heads, **options,
    )  # fmt: skip
    if partials is not None:
        sum_columns(partials, grad_q_weight, grad_k_weight)


def _options(width: int, rotary: int, interleaved: bool, shape: Shape) -> tuple[int, dict[str, object]]:
    """Return the number of heads that fit in a tile, and the compile-time arguments of both kernels."""
    # With whole heads in halves, no column is read twice.
    pairs = rotary == width and not interleaved
    options: dict[str, object] = {
        "INTERLEAVED": interleaved, "PAIRS": pairs, "LANES": power_of_two(width // 2 if pairs else width),
        "STAGES": shape.stages, "num_warps": shape.warps,
        # A sum of pairs leaves no product that another thread could fuse differently (`fuses`).
        "enable_fp_fusion": pairs or fuses(width),
    }  # fmt: skip
    return max(1, shape.columns // power_of_two(width)), options


def _heads(heads: int, rows: int) -> int:
    """Return the heads of a token in a tile, all used if a power of two divides them; they share its cos and sin."""
    even = heads & -heads
    return min(rows, even if even >= 4 else power_of_two(heads))


class Tile(NamedTuple):
    """A tiling of the (tokens, heads) of a tensor: tokens and heads of a tile, and the number of tiles."""

    tokens: int
    heads: int
    number: int


def _tile(tokens: int, heads: int, rows: int) -> Tile:
    if not tokens * heads:
        return Tile(1, 1, 0)
    per_tile = _heads(heads, rows)
    per_program = max(1, min(rows // per_tile, power_of_two(tokens)))
    return Tile(per_program, per_tile, cdiv(tokens, per_program) * cdiv(heads, per_tile))


def _columns(x: Tensor) -> Tensor:
    """Return x with adjacent columns, copied only if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(cos: Tensor, sin: Tensor, batch: int) -> tuple[int, ...]:
    return *table_strides(cos, batch), *table_strides(sin, batch)


_qk_norm_rope = differentiable_kernels(
    "qk_norm_rope", _allocate, _launch, _launch_backward, _allocate_backward, public=2
)
