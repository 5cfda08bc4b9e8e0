# SPDX-License-Identifier: Apache-2.0
"""The kernels of qk_norm_rope."""

import triton
import triton.language as tl

from liger_triton.launch import Launcher
from liger_triton.rope import rows_at


@triton.jit
def columns(half, width, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr):
    """Return a tile's columns, their partners in the rotation, and masks of the lanes.

    The masks say which lanes hold a column, which are rotated, and whose sine is negative. PAIRS: the second column of
    each pair is only a partner. Otherwise all columns are in the tile, and those of a pair are each other's partners.
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
    value, row, partner, mask, turned, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    LANES: tl.constexpr
):  # fmt: skip
    """Return the values of the partners of a tile's columns: neighbors from the tile, the other half's from memory."""
    if INTERLEAVED:
        even, odd = tl.split(tl.reshape(value, (TOKENS, HEADS, LANES // 2, 2)))
        return tl.where(turned[None, None, :], tl.reshape(tl.join(odd, even), (TOKENS, HEADS, LANES)), 0.0)
    else:
        return tl.load(row + partner[None, None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def table(row, column, mask, otherwise):
    """Load the columns of cos or sin for a tile's tokens."""
    return tl.load(row + column[None, :], mask=mask, other=otherwise).to(tl.float32)[:, None, :]


@triton.jit
def factor(weight, column, mask, offset):
    """Load the factor of a normalized row, weight + offset."""
    return (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)[None, None, :]


@triton.jit
def normalized(value, scale, weight, out, CAST_INPUT: tl.constexpr):
    value = value * scale
    if CAST_INPUT:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    return value * weight


@triton.jit
def share(program, programs, tiles, batches, heads, TOKENS: tl.constexpr, HEADS: tl.constexpr, EVEN: tl.constexpr):
    """Return a program's share of the work.

    It is (batch row, first token, distance between tiles in tokens, heads, mask of the valid heads).
    """
    # Programs of neighboring tiles of heads run side by side.
    tile = program % tiles
    walker = program // tiles
    walkers = programs // (tiles * batches)
    head = tile * HEADS + tl.arange(0, HEADS)
    there = tl.full((HEADS,), 1, dtype=tl.int1) if EVEN else head < heads
    return (walker // walkers).to(tl.int64), walker % walkers * TOKENS, walkers * TOKENS, head, there[None, :, None]


@triton.jit
def forward_tiles(
    program, programs, tiles, x, out, inverse, weight, cos, sin, x_batch, x_head, x_token, out_batch, out_head,
    out_token, cos_batch, cos_token, sin_batch, sin_token, batches, tokens, heads, eps, offset,
    HALF: tl.constexpr, WIDTH: tl.constexpr, CAST_INPUT: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr,
    LANES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the same heads of all of this program's tokens, TOKENS adjacent ones at a time.

    y1 = m1·cos1 - m2·sin1,  y2 = m2·cos2 + m1·sin2,
    where m = x · inverse · (weight + offset) and inverse = 1 / sqrt(mean(x²) + eps).
    """
    batch, start, step, head, there = share(program, programs, tiles, batches, heads, TOKENS, HEADS, EVEN)
    column, partner, inside, turned, negative = columns(HALF, WIDTH, INTERLEAVED, PAIRS, LANES)
    mask = there & inside[None, None, :]
    partner_mask = there & turned[None, None, :]
    table_mask = turned[None, :]
    weight1 = factor(weight, column, inside, offset)
    weight2 = factor(weight, partner, turned, offset)
    # The rows of the batch row's first tokens; those of every tile are equally far from them.
    index = tl.arange(0, TOKENS).to(tl.int64)
    x = rows_at(x, batch, index, head, x_batch, x_head, x_token)
    out = rows_at(out, batch, index, head, out_batch, out_head, out_token)
    inverse += ((batch * tokens + index) * heads)[:, None, None] + head[None, :, None]
    cos += (batch * cos_batch + index * cos_token)[:, None]
    sin += (batch * sin_batch + index * sin_token)[:, None]
    for number in tl.range(start, tokens, step, num_stages=STAGES):
        # No mask for tokens: the last tile ends with the last token, and repeats some tokens of the tile before it.
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
            tl.store(
                out_row + partner[None, None, :], (b * cos2 + a * sin2).to(out.dtype.element_ty), mask=partner_mask
            )


@triton.jit
def forward_kernel(
    q, k, out_q, out_k, inverse_q, inverse_k, q_weight, k_weight, cos, sin,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    out_q_batch, out_q_head, out_q_token, out_k_batch, out_k_head, out_k_token,
    cos_batch, cos_token, sin_batch, sin_token,
    batches, tokens, q_heads, k_heads, q_tiles, k_tiles, programs, eps, offset,
    HALF: tl.constexpr, WIDTH: tl.constexpr, CAST_INPUT: tl.constexpr, Q_TOKENS: tl.constexpr, Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr, K_HEADS: tl.constexpr, Q_EVEN: tl.constexpr, K_EVEN: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every program walks its tokens with a tile of heads of q, then of k; per-token values are computed once."""
    program = tl.program_id(0)
    if q_tiles > 0:
        forward_tiles(
            program, programs, q_tiles, q, out_q, inverse_q, q_weight, cos, sin, q_batch, q_head, q_token, out_q_batch,
            out_q_head, out_q_token, cos_batch, cos_token, sin_batch, sin_token, batches, tokens, q_heads, eps, offset,
            HALF, WIDTH, CAST_INPUT, INTERLEAVED, PAIRS, LANES, Q_TOKENS, Q_HEADS, Q_EVEN, STAGES,
        )  # fmt: skip
    if k_tiles > 0:
        forward_tiles(
            program, programs, k_tiles, k, out_k, inverse_k, k_weight, cos, sin, k_batch, k_head, k_token, out_k_batch,
            out_k_head, out_k_token, cos_batch, cos_token, sin_batch, sin_token, batches, tokens, k_heads, eps, offset,
            HALF, WIDTH, CAST_INPUT, INTERLEAVED, PAIRS, LANES, K_TOKENS, K_HEADS, K_EVEN, STAGES,
        )  # fmt: skip


@triton.jit
def tile_position(tile, rows, tokens, heads, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Return the position of a tile.

    It is (batch and token of each row, heads, mask of valid rows, mask of valid rows and heads, offsets of the scales).
    """
    tiles = tl.cdiv(heads, HEADS)
    # In 32 bits, because a 64-bit division takes more instructions than the rest of a small tile.
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
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Walk the tiles start, start + programs, …, and store the requested column sums for grad_weight in part_row.

    With n = x · inverse and the gradient d of n · (weight + offset), which is the upstream one rotated back,
    d1 = g1·cos1 + g2·sin2,  d2 = g2·cos2 - g1·sin1,  and h = d · (weight + offset):
    grad_weight = Σ d · n,  grad_x = inverse · (h - n · mean(h · n)).
    """
    column, partner, inside, turned, negative = columns(half, width, INTERLEAVED, PAIRS, LANES)
    weight1 = factor(weight, column, inside, offset)
    if PAIRS:
        weight2 = factor(weight, partner, turned, offset)
    # Tiles are summed once, at the end, so that all threads that know a column's sum know the same bits.
    sum1 = tl.zeros((TOKENS, HEADS, LANES), dtype=tl.float32)
    sum2 = tl.zeros((TOKENS, HEADS, LANES), dtype=tl.float32)
    for tile in tl.range(start, count, programs, num_stages=STAGES):
        batch, token, head, token_mask, there, scales = tile_position(tile, rows, tokens, heads, TOKENS, HEADS)
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
    above_q, above_k, q, k, grad_q, grad_k, inverse_q, inverse_k, q_weight, k_weight, cos, sin,
    grad_q_weight, grad_k_weight, partials,
    above_q_batch, above_q_head, above_q_token, above_k_batch, above_k_head, above_k_token,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    grad_q_batch, grad_q_head, grad_q_token, grad_k_batch, grad_k_head, grad_k_token,
    cos_batch, cos_token, sin_batch, sin_token,
    rows, tokens, q_heads, k_heads, half, width, q_tiles, k_tiles, programs, offset,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr, Q_TOKENS: tl.constexpr, Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr, K_HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every program walks its share of the tiles of q, then of k.

    Its sums go to its row of partials (sums, programs, width).
    """
    program = tl.program_id(0)
    part_row = partials
    if partials is not None:
        part_row = partials + program.to(tl.int64) * width
    if grad_q is not None or grad_q_weight is not None:
        backward_tiles(
            program, q_tiles, programs, above_q, q, grad_q, inverse_q, q_weight, cos, sin, part_row, grad_q_weight,
            above_q_batch, above_q_head, above_q_token, q_batch, q_head, q_token, grad_q_batch, grad_q_head,
            grad_q_token, cos_batch, cos_token, sin_batch, sin_token, rows, tokens, q_heads, half, width, offset,
            INTERLEAVED, PAIRS, LANES, Q_TOKENS, Q_HEADS, STAGES,
        )  # fmt: skip
    if grad_q_weight is not None:
        part_row += programs * width
    if grad_k is not None or grad_k_weight is not None:
        # The programs with one tile of q less come first.
        backward_tiles(
            (program + programs - q_tiles % programs) % programs, k_tiles, programs, above_k, k, grad_k, inverse_k,
            k_weight, cos, sin, part_row, grad_k_weight, above_k_batch, above_k_head, above_k_token, k_batch, k_head,
            k_token, grad_k_batch, grad_k_head, grad_k_token, cos_batch, cos_token, sin_batch, sin_token, rows, tokens,
            k_heads, half, width, offset, INTERLEAVED, PAIRS, LANES, K_TOKENS, K_HEADS, STAGES,
        )  # fmt: skip


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
