# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope in Triton: one read and one write of queries and keys in one launch, through their strides."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs, differentiable
from liger_triton._norm_sum import sum_columns, zero
from liger_triton.launch import Launcher, TritonKernel, cdiv, contiguous, dense_like, fuses, power_of_two, processors, supported
from liger_triton.rope import rows_at, table_strides

# A head is one row of a tile.
WIDEST_HEAD = 1024


class Shape(NamedTuple):
    """Columns of a tile (tokens × heads × width), programs per multiprocessor, tiles on their way, and warps."""

    columns: int
    programs: int
    stages: int
    warps: int


def forward_shape(width: int, q_heads: int, k_heads: int) -> Shape:
    """One H100 (bfloat16, 4 × 4096 tokens): 32 + 4 heads of 64 columns 61 µs, with 1024 columns in a tile 73; 4 + 1 of 256 38.5 µs, 39.0."""
    if 64 < width < 256:
        return Shape(1024, 16, 2, 1)
    return Shape(2048, 8, 2, 1 if _sixteen(2048, width, q_heads, k_heads) else 2)


def backward_shape(width: int, q_heads: int, k_heads: int) -> Shape:
    """Share of copy bandwidth on one H200 (bfloat16): 32 + 8 heads of 128 columns .87, 16 + 8 .78, 16 + 8 of 256 .88.

    In the shape of other heads of 128 columns, 16 + 8 reach .49.
    """
    if width >= 256:
        return Shape(2048, 4, 3, 2)
    shape = Shape(4096, 2, 3, 4)
    if _sixteen(shape.columns, width, q_heads, k_heads):
        return Shape(1024, 8, 3, 1) if width > 64 else Shape(2048, 4, 3, 4)
    return shape


def _sixteen(columns: int, width: int, *heads: int) -> bool:
    """Whether a tile has 16 heads, of which two or four warps load each in a way that is not pipelined well."""
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
    result: tuple[Tensor, Tensor] = _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, weight_offset, cast == "input", interleaved)
    return result


def _allocate(q: Tensor, k: Tensor, *rest: object) -> Outputs:
    return _like(q), _like(k), _scales(q), _scales(k)


def _scales(x: Tensor) -> Tensor:
    """(batch, tokens, heads), as projections lie in memory."""
    batch, heads, tokens, _ = x.shape
    return x.new_empty((batch, tokens, heads), dtype=torch.float32)


def _like(x: Tensor) -> Tensor:
    """New memory in the order of x's strides, with adjacent columns."""
    like = torch.empty_like(x)
    return like if like.stride(-1) == 1 else dense_like(x)


def _launch(
    out_q: Tensor, out_k: Tensor, inverse_q: Tensor, inverse_k: Tensor, /, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, eps: float, weight_offset: float, cast_input: bool, interleaved: bool,
) -> None:  # fmt: skip
    q, k, cos, sin = (_columns(t) for t in (q, k, cos, sin))
    batch, _, tokens, width = q.shape
    shape = forward_shape(width, q.shape[1], k.shape[1])
    rows, options = _options(width, cos.shape[-1], interleaved, shape)
    q_heads, k_heads = (_heads(x.shape[1], rows) for x in (q, k))
    q_tiles, k_tiles = cdiv(q.shape[1], q_heads), cdiv(k.shape[1], k_heads)
    # Every program has one tile of heads of q and one of k, in one batch row; programs that have the same ones share the tokens.
    different, most = batch * math.lcm(max(1, q_tiles), max(1, k_tiles)), shape.programs * processors(q.device)
    programs = different * min(tokens, max(1, most // max(1, different))) if q_tiles + k_tiles else 0
    # Tokens of a tile: at most as many as every program has.
    q_tokens, k_tokens = (
        max(1, min(rows // heads, power_of_two(batch * tokens * tiles // max(1, programs) + 1) // 2))
        for heads, tiles in ((q_heads, q_tiles), (k_heads, k_tiles))
    )
    if 2 * programs <= most:
        # So few tokens that there is room for more threads. One H200: one token of 32 + 8 heads 2.7 µs with four warps, 3.7 with two.
        options["num_warps"] = 4 if programs < processors(q.device) else 2
    if programs:
        forward_launch(
            (programs,), q, k, out_q, out_k, inverse_q, inverse_k, q_weight.contiguous(), k_weight.contiguous(), cos, sin,
            *q.stride()[:3], *k.stride()[:3], *out_q.stride()[:3], *out_k.stride()[:3], *_tables(cos, sin, q.shape[0]),
            batch, tokens, q.shape[1], k.shape[1], q_tiles, k_tiles, programs, eps, weight_offset,
            HALF=cos.shape[-1] // 2, WIDTH=width, CAST_INPUT=cast_input,
            Q_TOKENS=q_tokens, Q_HEADS=q_heads, K_TOKENS=k_tokens, K_HEADS=k_heads,
            Q_EVEN=q.shape[1] % q_heads == 0, K_EVEN=k.shape[1] % k_heads == 0, **options,
        )  # fmt: skip


def _allocate_backward(
    grad_out_q: Tensor | None, grad_out_k: Tensor | None, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
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
    grad_out_q: Tensor | None, grad_out_k: Tensor | None, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, inverse_q: Tensor, inverse_k: Tensor, weight_offset: float, interleaved: bool, needs: list[bool],
) -> None:  # fmt: skip
    """Weight gradients by float32 partial sums of each program, which a second kernel adds."""
    q, k, cos, sin = (_columns(t) for t in (q, k, cos, sin))
    # Rows without a gradient are not walked; any tensor stands for what is then not read.
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
    part = q.new_empty((sums, programs, q.shape[3]), dtype=torch.float32) if sums else None
    backward_launch(
        (programs,), above_q, above_k, q, k, grad_q, grad_k, inverse_q, inverse_k, contiguous(q_weight), contiguous(k_weight), cos, sin,
        grad_q_weight, grad_k_weight, part,
        *above_q.stride()[:3], *above_k.stride()[:3], *q.stride()[:3], *k.stride()[:3], *into_q.stride()[:3], *into_k.stride()[:3],
        *_tables(cos, sin, q.shape[0]),
        q.shape[0] * q.shape[2], q.shape[2], q.shape[1], k.shape[1], cos.shape[-1] // 2, q.shape[3], q_count, k_count, programs,
        weight_offset, Q_TOKENS=q_tile.tokens, Q_HEADS=q_tile.heads, K_TOKENS=k_tile.tokens, K_HEADS=k_tile.heads, **options,
    )  # fmt: skip
    if part is not None:
        sum_columns(part, grad_q_weight, grad_k_weight)


def _options(width: int, rotary: int, interleaved: bool, shape: Shape) -> tuple[int, dict[str, object]]:
    """Heads that a tile has room for, and the compile-time arguments that both kernels have."""
    # Whole heads in halves: no column is read twice.
    pairs = rotary == width and not interleaved
    options: dict[str, object] = {
        "INTERLEAVED": interleaved, "PAIRS": pairs, "LANES": power_of_two(width // 2 if pairs else width),
        "STAGES": shape.stages, "num_warps": shape.warps,
        # A sum of pairs has no product that another thread could fuse into it otherwise (`fuses`).
        "enable_fp_fusion": pairs or fuses(width),
    }  # fmt: skip
    return max(1, shape.columns // power_of_two(width)), options


def _heads(heads: int, rows: int) -> int:
    """Heads of a token in a tile, which share its cos and sin: no idle rows where a power of two divides the heads."""
    even = heads & -heads
    return min(rows, even if even >= 4 else power_of_two(heads))


class Tile(NamedTuple):
    """How tiles cover (tokens, heads) of a tensor: tokens and heads of one, and how many there are."""

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
    """x with adjacent columns, copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(cos: Tensor, sin: Tensor, batch: int) -> tuple[int, ...]:
    return *table_strides(cos, batch), *table_strides(sin, batch)


@triton.jit
def columns(half, width, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr):
    """The columns of a tile and their partners in the rotation, which lanes hold a column and which are rotated, and whose sine is negative.

    PAIRS: the second column of each pair is only a partner. Else every column is in the tile, and those of pairs are partners, too.
    """
    lane = tl.arange(0, LANES)
    if PAIRS:
        return lane, lane + half, lane < half, lane < half, lane < half
    elif INTERLEAVED:
        first = lane % 2 == 0
        return lane, lane + tl.where(first, 1, -1), lane < width, lane < 2 * half, first
    else:
        first = lane < half
        return lane, lane + tl.where(first, half, -half), lane < width, lane < 2 * half, first


@triton.jit
def partners(
    value, row, partner, mask, turned, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """What the partners of a tile's columns hold: neighbors are in the tile already, columns of the other half are read."""
    if INTERLEAVED:
        even, odd = tl.split(tl.reshape(value, (TOKENS, HEADS, LANES // 2, 2)))
        return tl.where(turned[None, None, :], tl.reshape(tl.join(odd, even), (TOKENS, HEADS, LANES)), 0.0)
    else:
        return tl.load(row + partner[None, None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def table(row, column, mask, otherwise):
    """The columns of cos or sin of a tile's tokens."""
    return tl.load(row + column[None, :], mask=mask, other=otherwise).to(tl.float32)[:, None, :]


@triton.jit
def factor(weight, column, mask, offset):
    """What a normalized row is multiplied by."""
    return (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)[None, None, :]


@triton.jit
def normalized(value, scale, weight, out, CAST_INPUT: tl.constexpr):
    value = value * scale
    if CAST_INPUT:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    return value * weight


@triton.jit
def share(program, programs, tiles, batches, heads, TOKENS: tl.constexpr, HEADS: tl.constexpr, EVEN: tl.constexpr):
    """What a program computes: its batch row, its first token, how far apart its tiles are, its heads, and which of them are there."""
    # Programs of neighboring tiles of heads run side by side.
    tile = program % tiles
    walker = program // tiles
    walkers = programs // (tiles * batches)
    head = tile * HEADS + tl.arange(0, HEADS)
    there = tl.full((HEADS,), 1, dtype=tl.int1) if EVEN else head < heads
    return (walker // walkers).to(tl.int64), walker % walkers * TOKENS, walkers * TOKENS, head, there[None, :, None]


@triton.jit
def forward_tiles(
    program, programs, tiles, x, out, inverse, weight, cos, sin, x_batch, x_head, x_token, out_batch, out_head, out_token,
    cos_batch, cos_token, sin_batch, sin_token, batches, tokens, heads, eps, offset,
    HALF: tl.constexpr, WIDTH: tl.constexpr, CAST_INPUT: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr,
    LANES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the same heads of all tokens that are this program's, TOKENS adjacent ones at a time.

    y1 = m1·cos1 - m2·sin1,  y2 = m2·cos2 + m1·sin2,  where m = x · inverse · (weight + offset) and inverse = 1 / sqrt(mean(x²) + eps).
    """
    batch, start, step, head, there = share(program, programs, tiles, batches, heads, TOKENS, HEADS, EVEN)
    column, partner, inside, turned, negative = columns(HALF, WIDTH, INTERLEAVED, PAIRS, LANES)
    mask = there & inside[None, None, :]
    partner_mask = there & turned[None, None, :]
    table_mask = turned[None, :]
    weight1 = factor(weight, column, inside, offset)
    weight2 = factor(weight, partner, turned, offset)
    # The rows of the first tokens of the batch row, from which those of every tile are equally far.
    index = tl.arange(0, TOKENS).to(tl.int64)
    x = rows_at(x, batch, index, head, x_batch, x_head, x_token)
    out = rows_at(out, batch, index, head, out_batch, out_head, out_token)
    inverse += ((batch * tokens + index) * heads)[:, None, None] + head[None, :, None]
    cos += (batch * cos_batch + index * cos_token)[:, None]
    sin += (batch * sin_batch + index * sin_token)[:, None]
    for number in tl.range(start, tokens, step, num_stages=STAGES):
        # No mask for tokens: the last tile ends with the last token, and stores some tokens that the tile before it stores, too.
        token = tl.cast(tl.minimum(number, tokens - TOKENS), tl.int64)
        row = x + token * x_token
        cos_row = cos + token * cos_token
        sin_row = sin + token * sin_token
        a = tl.load(row + column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        b = partners(a, row, partner, partner_mask, turned, INTERLEAVED, TOKENS, HEADS, LANES)
        cos1 = table(cos_row, column, table_mask, 1.0)
        sin1 = table(sin_row, column, table_mask, 0.0)
        squares = tl.sum(a * a + b * b, 2) if PAIRS else tl.sum(a * a, 2)
        scale = tl.rsqrt(squares * (1.0 / WIDTH) + eps)[:, :, None]
        tl.store(inverse + token * heads, scale, mask=there)
        a = normalized(a, scale, weight1, out, CAST_INPUT)
        b = normalized(b, scale, weight2, out, CAST_INPUT)
        out_row = out + token * out_token
        first = a * cos1 - b * sin1 if PAIRS else a * cos1 + b * tl.where(negative[None, None, :], -sin1, sin1)
        tl.store(out_row + column[None, None, :], first.to(out.dtype.element_ty), mask=mask)
        if PAIRS:
            cos2 = table(cos_row, partner, table_mask, 1.0)
            sin2 = table(sin_row, partner, table_mask, 0.0)
            tl.store(out_row + partner[None, None, :], (b * cos2 + a * sin2).to(out.dtype.element_ty), mask=partner_mask)


@triton.jit
def forward_kernel(
    q, k, out_q, out_k, inverse_q, inverse_k, q_weight, k_weight, cos, sin,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    out_q_batch, out_q_head, out_q_token, out_k_batch, out_k_head, out_k_token,
    cos_batch, cos_token, sin_batch, sin_token,
    batches, tokens, q_heads, k_heads, q_tiles, k_tiles, programs, eps, offset,
    HALF: tl.constexpr, WIDTH: tl.constexpr, CAST_INPUT: tl.constexpr,
    Q_TOKENS: tl.constexpr, Q_HEADS: tl.constexpr, K_TOKENS: tl.constexpr, K_HEADS: tl.constexpr,
    Q_EVEN: tl.constexpr, K_EVEN: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every program walks its tokens with a tile of heads of q, then with one of k: what does not depend on the token is computed once."""
    program = tl.program_id(0)
    if q_tiles > 0:
        forward_tiles(
            program, programs, q_tiles, q, out_q, inverse_q, q_weight, cos, sin, q_batch, q_head, q_token, out_q_batch, out_q_head, out_q_token,
            cos_batch, cos_token, sin_batch, sin_token, batches, tokens, q_heads, eps, offset,
            HALF, WIDTH, CAST_INPUT, INTERLEAVED, PAIRS, LANES, Q_TOKENS, Q_HEADS, Q_EVEN, STAGES,
        )  # fmt: skip
    if k_tiles > 0:
        forward_tiles(
            program, programs, k_tiles, k, out_k, inverse_k, k_weight, cos, sin, k_batch, k_head, k_token, out_k_batch, out_k_head, out_k_token,
            cos_batch, cos_token, sin_batch, sin_token, batches, tokens, k_heads, eps, offset,
            HALF, WIDTH, CAST_INPUT, INTERLEAVED, PAIRS, LANES, K_TOKENS, K_HEADS, K_EVEN, STAGES,
        )  # fmt: skip


@triton.jit
def place(tile, rows, tokens, heads, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """The batch and token of each of a tile's tokens, the heads, which tokens and which heads of them are there, and their scales."""
    tiles = tl.cdiv(heads, HEADS)
    # In 32 bits: a 64-bit division takes more instructions than the rest of a small tile.
    index = (tile // tiles) * TOKENS + tl.arange(0, TOKENS)
    head = (tile % tiles) * HEADS + tl.arange(0, HEADS)
    there = (index < rows)[:, None, None] & (head < heads)[None, :, None]
    scales = (index.to(tl.int64) * heads)[:, None, None] + head[None, :, None]
    return (index // tokens).to(tl.int64), (index % tokens).to(tl.int64), head, index < rows, there, scales


@triton.jit
def backward_tiles(
    start, count, programs, above, x, grad, inverse, weight, cos, sin, part_row, wanted,
    above_batch, above_head, above_token, x_batch, x_head, x_token, grad_batch, grad_head, grad_token,
    cos_batch, cos_token, sin_batch, sin_token, rows, tokens, heads, half, width, offset,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk the tiles start, start + programs, …, and store the column sums for the weight gradient, if it is wanted, in part_row.

    With n = x · inverse and the gradient d of n · (weight + offset), which is the upstream one rotated back,
    d1 = g1·cos1 + g2·sin2,  d2 = g2·cos2 - g1·sin1,  and h = d · (weight + offset):
    grad_weight = Σ d · n,  grad_x = inverse · (h - n · mean(h · n)).
    """
    column, partner, inside, turned, negative = columns(half, width, INTERLEAVED, PAIRS, LANES)
    weight1 = factor(weight, column, inside, offset)
    if PAIRS:
        weight2 = factor(weight, partner, turned, offset)
    # Tiles, added up once at the end: all threads that know a sum of a column know the same bits.
    sum1 = tl.zeros((TOKENS, HEADS, LANES), dtype=tl.float32)
    sum2 = tl.zeros((TOKENS, HEADS, LANES), dtype=tl.float32)
    for tile in tl.range(start, count, programs, num_stages=STAGES):
        batch, token, head, token_mask, there, scales = place(tile, rows, tokens, heads, TOKENS, HEADS)
        above_row = rows_at(above, batch, token, head, above_batch, above_head, above_token)
        row = rows_at(x, batch, token, head, x_batch, x_head, x_token)
        cos_row = cos + (batch * cos_batch + token * cos_token)[:, None]
        sin_row = sin + (batch * sin_batch + token * sin_token)[:, None]
        mask = there & inside[None, None, :]
        partner_mask = there & turned[None, None, :]
        table_mask = token_mask[:, None] & turned[None, :]
        g1 = tl.load(above_row + column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        g2 = partners(g1, above_row, partner, partner_mask, turned, INTERLEAVED, TOKENS, HEADS, LANES)
        n1 = tl.load(row + column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse + scales, mask=there, other=0.0)
        cos1 = table(cos_row, column, table_mask, 1.0)
        sin2 = table(sin_row, partner, table_mask, 0.0)
        d1 = g1 * cos1 + g2 * (sin2 if PAIRS else tl.where(negative[None, None, :], sin2, -sin2))
        n1 = n1 * scale
        h1 = d1 * weight1
        if PAIRS:
            n2 = tl.load(row + partner[None, None, :], mask=partner_mask, other=0.0).to(tl.float32) * scale
            cos2 = table(cos_row, partner, table_mask, 1.0)
            sin1 = table(sin_row, column, table_mask, 0.0)
            d2 = g2 * cos2 - g1 * sin1
            h2 = d2 * weight2
            products = tl.sum(h1 * n1 + h2 * n2, 2)
        else:
            products = tl.sum(h1 * n1, 2)
        if wanted is not None:
            sum1 += d1 * n1
            if PAIRS:
                sum2 += d2 * n2
        if grad is not None:
            average = (products / width)[:, :, None]
            grad_row = rows_at(grad, batch, token, head, grad_batch, grad_head, grad_token)
            result = ((h1 - n1 * average) * scale).to(grad.dtype.element_ty)
            tl.store(grad_row + column[None, None, :], result, mask=mask)
            if PAIRS:
                result = ((h2 - n2 * average) * scale).to(grad.dtype.element_ty)
                tl.store(grad_row + partner[None, None, :], result, mask=partner_mask)
    if wanted is not None:
        tl.store(part_row + column, tl.sum(tl.sum(sum1, 0), 0), mask=inside)
        if PAIRS:
            tl.store(part_row + partner, tl.sum(tl.sum(sum2, 0), 0), mask=turned)


@triton.jit
def backward_kernel(
    above_q, above_k, q, k, grad_q, grad_k, inverse_q, inverse_k, q_weight, k_weight, cos, sin, grad_q_weight, grad_k_weight, part,
    above_q_batch, above_q_head, above_q_token, above_k_batch, above_k_head, above_k_token,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    grad_q_batch, grad_q_head, grad_q_token, grad_k_batch, grad_k_head, grad_k_token,
    cos_batch, cos_token, sin_batch, sin_token,
    rows, tokens, q_heads, k_heads, half, width, q_tiles, k_tiles, programs, offset,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr,
    Q_TOKENS: tl.constexpr, Q_HEADS: tl.constexpr, K_TOKENS: tl.constexpr, K_HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every program walks its share of the tiles of q, then of k. Its sums go to its row of part (sums, programs, width)."""
    program = tl.program_id(0)
    part_row = part
    if part is not None:
        part_row = part + program.to(tl.int64) * width
    if grad_q is not None or grad_q_weight is not None:
        backward_tiles(
            program, q_tiles, programs, above_q, q, grad_q, inverse_q, q_weight, cos, sin, part_row, grad_q_weight,
            above_q_batch, above_q_head, above_q_token, q_batch, q_head, q_token, grad_q_batch, grad_q_head, grad_q_token,
            cos_batch, cos_token, sin_batch, sin_token, rows, tokens, q_heads, half, width, offset,
            INTERLEAVED, PAIRS, LANES, Q_TOKENS, Q_HEADS, STAGES,
        )  # fmt: skip
    if grad_q_weight is not None:
        part_row += programs * width
    if grad_k is not None or grad_k_weight is not None:
        # The programs that had one tile of q less begin.
        backward_tiles(
            (program + programs - q_tiles % programs) % programs, k_tiles, programs, above_k, k, grad_k, inverse_k, k_weight, cos, sin,
            part_row, grad_k_weight,
            above_k_batch, above_k_head, above_k_token, k_batch, k_head, k_token, grad_k_batch, grad_k_head, grad_k_token,
            cos_batch, cos_token, sin_batch, sin_token, rows, tokens, k_heads, half, width, offset,
            INTERLEAVED, PAIRS, LANES, K_TOKENS, K_HEADS, STAGES,
        )  # fmt: skip


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
_qk_norm_rope = differentiable(
    TritonKernel("qk_norm_rope", _allocate, _launch),
    TritonKernel("qk_norm_rope_backward", _allocate_backward, _launch_backward),
    public=2,
)
