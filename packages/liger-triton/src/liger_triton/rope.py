# SPDX-License-Identifier: Apache-2.0
"""rope in Triton: queries and keys in one launch, read and written through their strides."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.autograd import check_backward, differentiable
from liger_core.kernels import Outputs
from liger_core.private_torch import dispatch_stack_length
from liger_triton.launch import Launcher, TritonKernel, cdiv, power_of_two, processors, supported

# The fewest and the most pairs of columns (tokens × heads × rotary/2) of a program; more than the fewest only if every
# multiprocessor has a program.
FEWEST, MOST = 512, 2048


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    supported(q, k, cos, sin)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise Unsupported("gradients for cos and sin")
    result: tuple[Tensor, Tensor]
    if not inplace:
        result = _rope(q, k, cos, sin, interleaved)
        return result
    if torch.compiler.is_compiling() or dispatch_stack_length():
        # Tracing converts in-place writes to copies anyway.
        turned = _rope(q, k, cos, sin, interleaved)
        return q.copy_(turned[0]), k.copy_(turned[1])
    _forward.check_plain((q, k, cos, sin), "rope")
    if torch.is_grad_enabled() and (q._is_view() or k._is_view()) and (q.requires_grad or k.requires_grad):
        # Autograd lets a function overwrite a view only if that is its first input and its only output.
        return _InPlace.apply(q, None, cos, sin, interleaved), _InPlace.apply(k, None, cos, sin, interleaved)
    result = _InPlace.apply(q, k, cos, sin, interleaved)
    return result


class _InPlace(torch.autograd.Function):
    """Declare the mutation to autograd: version counters change, so it detects an overwritten saved q or k."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
        tensors = (q,) if k is None else (q, k)
        ctx.mark_dirty(*tensors)
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.set_materialize_grads(False)
        # Does nothing for CPU tensors, which the interpreter takes.
        with torch.cuda.device_of(q):
            _turn(q, k, q, k, cos, sin, interleaved, False)
        return q if k is None else tensors

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None = None) -> Any:
        check_backward("rope", grad_q, grad_k)
        cos, sin = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:2])
        return (*_backward(grad_q, grad_k, cos, sin, ctx.interleaved, needs), None, None, None)


def _allocate(q: Tensor, k: Tensor, *rest: object) -> Outputs:
    return torch.empty_like(q), torch.empty_like(k)


def _launch(out_q: Tensor, out_k: Tensor, /, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    _turn(q, k, out_q, out_k, cos, sin, interleaved, False)


def _allocate_backward(grad_out_q: Tensor | None, grad_out_k: Tensor | None, *rest: Any) -> Outputs:
    needs = rest[-1]
    pairs = zip(needs, (grad_out_q, grad_out_k), strict=True)
    return tuple(torch.empty_like(g) if need and g is not None else None for need, g in pairs)


def _launch_backward(
    grad_q: Tensor | None, grad_k: Tensor | None, /, grad_out_q: Tensor | None, grad_out_k: Tensor | None, cos: Tensor,
    sin: Tensor, interleaved: bool, needs: list[bool],
) -> None:  # fmt: skip
    _turn(
        grad_out_q if grad_q is not None else None,
        grad_out_k if grad_k is not None else None,
        grad_q,
        grad_k,
        cos,
        sin,
        interleaved,
        True,
    )


def _turn(
    q: Tensor | None,
    k: Tensor | None,
    out_q: Tensor | None,
    out_k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    backward: bool,
) -> None:
    """Launch the kernel for q, k or both."""
    pairs = [(x, out) for x, out in ((q, out_q), (k, out_k)) if x is not None and out is not None and x.numel()]
    if not pairs:
        return
    (x1, out1), (x2, out2) = pairs[0], pairs[-1]
    x1, x2 = (x if x.stride(-1) == 1 else x.contiguous() for x in (x1, x2))
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    batch, _, tokens, width = x1.shape
    rotary = cos.shape[-1]
    half = power_of_two(rotary // 2)
    most = max(x.shape[1] for x, _ in pairs)
    each = power_of_two(cdiv(batch * tokens * power_of_two(most) * half, processors(x1.device)))
    # Wide rows get one warp whose threads turn several heads each: .83 of copy bandwidth at 256 columns, with four .69.
    wide = half >= 128
    each = min(MOST // 2 if wide else MOST, max(FEWEST, each))
    heads = min(power_of_two(most), max(1, each // half))
    per_program = max(1, min(each // (half * heads), power_of_two(tokens)))
    groups = cdiv(batch * tokens, per_program)
    # If the heads of q and k fit in one tile each, one program turns both and reads cos and sin once.
    grid = (groups, cdiv(most, heads))
    rope_launch(
        grid, x1, x2, out1, out2, cos, sin,
        *x1.stride()[:3], *x2.stride()[:3], *out1.stride(), *out2.stride(),
        *table_strides(cos, batch), *table_strides(sin, batch),
        batch * tokens, tokens, x1.shape[1], x2.shape[1], rotary // 2, width,
        INTERLEAVED=interleaved, BACKWARD=backward, BOTH=len(pairs) == 2, REST=width > rotary and x1 is not out1,
        TOKENS=per_program, HEADS=heads, HALF=half, BLOCK=power_of_two(max(1, width - rotary)),
        num_warps=1 if wide else 4,
    )  # fmt: skip


def table_strides(table: Tensor, batch: int) -> tuple[int, int]:
    """Return the strides over batch and tokens; 0 for a shared batch."""
    if table.dim() == 2 or table.shape[0] == 1:
        return 0, table.stride(-2)
    return table.stride(0), table.stride(1)


@triton.jit
def rows_at(x, batch, token, head, x_batch, x_head, x_token):
    """Return the offsets of the rows of a tile (tokens, heads)."""
    return x + (batch * x_batch + token * x_token)[:, None, None] + (head.to(tl.int64) * x_head)[None, :, None]


@triton.jit
def store_turned(
    row, out_row, out_column, a, b, first, second, cos1, cos2, sin1, sin2, mask, row_mask, half, width,
    REST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the turned pairs (a, b) of a tile (tokens, heads, HALF), and the columns that are not turned."""
    tl.store(out_row + first * out_column, (a * cos1 + b * sin1).to(out_row.dtype.element_ty), mask=mask)
    tl.store(out_row + second * out_column, (b * cos2 + a * sin2).to(out_row.dtype.element_ty), mask=mask)
    if REST:
        column = (2 * half + tl.arange(0, BLOCK))[None, None, :]
        rest_mask = row_mask & (column < width)
        tl.store(out_row + column * out_column, tl.load(row + column, mask=rest_mask), mask=rest_mask)


@triton.jit
def rope_kernel(
    q, k, out_q, out_k, cos, sin,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    out_q_batch, out_q_head, out_q_token, out_q_column, out_k_batch, out_k_head, out_k_token, out_k_column,
    cos_batch, cos_token, sin_batch, sin_token,
    rows, tokens, q_heads, k_heads, half, width,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, BOTH: tl.constexpr, REST: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program turns HEADS heads of q and of k at TOKENS tokens.

    forward   y1 = x1·cos1 - x2·sin1,  y2 = x2·cos2 + x1·sin2
    backward  d1 = g1·cos1 + g2·sin2,  d2 = g2·cos2 - g1·sin1
    """
    index = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token_mask = index < rows
    batch = index // tokens
    token = index % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    if INTERLEAVED:
        first = 2 * lane
        second = 2 * lane + 1
    else:
        first = lane
        second = lane + half
    mask = token_mask[:, None] & (lane < half)[None, :]
    cos_row = cos + (batch * cos_batch + token * cos_token)[:, None]
    sin_row = sin + (batch * sin_batch + token * sin_token)[:, None]
    cos1 = tl.load(cos_row + first[None, :], mask=mask, other=0.0).to(tl.float32)[:, None, :]
    cos2 = tl.load(cos_row + second[None, :], mask=mask, other=0.0).to(tl.float32)[:, None, :]
    sin1 = tl.load(sin_row + first[None, :], mask=mask, other=0.0).to(tl.float32)[:, None, :]
    sin2 = tl.load(sin_row + second[None, :], mask=mask, other=0.0).to(tl.float32)[:, None, :]
    if BACKWARD:
        upper = sin2
        lower = -sin1
    else:
        upper = -sin1
        lower = sin2
    first = first[None, None, :]
    second = second[None, None, :]
    inside = (lane < half)[None, None, :]
    row = rows_at(q, batch, token, head, q_batch, q_head, q_token)
    row_mask = token_mask[:, None, None] & (head < q_heads)[None, :, None]
    a = tl.load(row + first, mask=row_mask & inside, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=row_mask & inside, other=0.0).to(tl.float32)
    if BOTH:
        # Loaded before the first store, past which the compiler must not move a load.
        k_row = rows_at(k, batch, token, head, k_batch, k_head, k_token)
        k_mask = token_mask[:, None, None] & (head < k_heads)[None, :, None]
        k_a = tl.load(k_row + first, mask=k_mask & inside, other=0.0).to(tl.float32)
        k_b = tl.load(k_row + second, mask=k_mask & inside, other=0.0).to(tl.float32)
    store_turned(
        row, rows_at(out_q, batch, token, head, out_q_batch, out_q_head, out_q_token), out_q_column, a, b, first,
        second, cos1, cos2, upper, lower, row_mask & inside, row_mask, half, width, REST, BLOCK,
    )  # fmt: skip
    if BOTH:
        store_turned(
            k_row, rows_at(out_k, batch, token, head, out_k_batch, out_k_head, out_k_token), out_k_column, k_a, k_b,
            first, second, cos1, cos2, upper, lower, k_mask & inside, k_mask, half, width, REST, BLOCK,
        )  # fmt: skip


rope_launch = Launcher(rope_kernel)
_backward = TritonKernel("rope_backward", _allocate_backward, _launch_backward)
_forward = TritonKernel("rope", _allocate, _launch)
_rope = differentiable(_forward, _backward, saves=("cos", "sin"), public=2)
