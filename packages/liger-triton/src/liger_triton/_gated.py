# SPDX-License-Identifier: Apache-2.0
"""The kernels of the gated activations: the same gating with different activations."""

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_core.kernels import Outputs
from liger_core.private_torch import storage_id
from liger_triton.launch import TILE_WARPS, Launcher, differentiable_kernels, gradients_like, rows_of, tiles_of

SILU, GELU_TANH, GELU_ERF, RELU_SQUARED = 0, 1, 2, 3
# The limit of gate and up, α, the shift of up, and the scales of the gate and of the result, as one list.
PLAIN = [math.inf, 1.0, 0.0, 1.0, 1.0]


def gated(name: str) -> Callable[..., Any]:
    """Return the differentiable `name(gate, up or None, activation, numbers, overwrite)`, with numbers as in PLAIN."""
    return differentiable_kernels(name, _allocate, _launch, _launch_backward, recycle=_recycle_backward)


def _allocate(gate: Tensor, up: Tensor | None, activation: int, numbers: list[float], overwrite: bool) -> Outputs:
    return (gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)),)


def _launch(
    y: Tensor, /, gate: Tensor, up: Tensor | None, activation: int, numbers: list[float], overwrite: bool
) -> None:
    first, second = _halves(gate, up)
    rows, width, tiles, block = tiles_of(first, second, y)
    if rows * width:
        forward_launch(
            (rows * tiles,), first, second, y, first.stride(0), second.stride(0), width, tiles, *numbers,
            ACTIVATION=activation, LIMITED=numbers[0] != math.inf, BLOCK=block, num_warps=TILE_WARPS,
        )  # fmt: skip


def _recycle_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor | None, activation: int, numbers: list[float], overwrite: bool,
    needs: list[bool],
) -> Outputs:  # fmt: skip
    """Return gate and up if they share no memory: each element is read before its gradient overwrites it."""
    if (
        not overwrite
        or (up is not None and _share_memory(gate, up))
        or not gate.is_contiguous()
        or not (up is None or up.is_contiguous())
    ):
        return gradients_like(needs, gate, up)
    return tuple(t.detach() if need and t is not None else None for need, t in zip(needs, (gate, up), strict=True))


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors of one size overlap; addresses are not used, as fake tensors have none."""
    same = storage_id(a.untyped_storage()) == storage_id(b.untyped_storage())
    return same and abs(int(a.storage_offset()) - int(b.storage_offset())) < a.numel()


def _launch_backward(
    grad_gate: Tensor | None, grad_up: Tensor | None, /, grad_y: Tensor, gate: Tensor, up: Tensor | None,
    activation: int, numbers: list[float], overwrite: bool, needs: list[bool],
) -> None:  # fmt: skip
    first, second = _halves(gate, up)
    grad_y = rows_of(grad_y)
    grad_first: Tensor | None
    grad_second: Tensor | None
    if up is None and grad_gate is not None:
        grad_first, grad_second = _halves(grad_gate, None)
    else:
        grad_first, grad_second = (None if g is None else rows_of(g) for g in (grad_gate, grad_up))
    gradients = [g for g in (grad_first, grad_second) if g is not None]
    rows, width, tiles, block = tiles_of(first, second, grad_y, *gradients)
    if rows * width == 0 or not gradients:
        return
    backward_launch(
        (rows * tiles,), grad_y, first, second, grad_first, grad_second, grad_y.stride(0), first.stride(0),
        second.stride(0), gradients[0].stride(0), width, tiles, *numbers,
        ACTIVATION=activation, LIMITED=numbers[0] != math.inf, NEEDS_GATE=grad_first is not None,
        NEEDS_UP=grad_second is not None, BLOCK=block, num_warps=TILE_WARPS,
    )  # fmt: skip


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return rows_of(gate), rows_of(up)
    packed = rows_of(gate)
    width = packed.shape[1] // 2
    return packed[:, :width], packed[:, width:]


@triton.jit
def activated(gate, limit, alpha, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """Return the activation of min(gate, limit), its derivative, and a mask where it is constant, in float32.

    Where it is constant the gradient is 0, even if the other factor is not finite.
    """
    flat = tl.zeros(gate.shape, dtype=tl.int1)
    if LIMITED:
        # A comparison, not a minimum, so that NaN stays NaN.
        flat = gate > limit
        gate = tl.where(flat, limit, gate)
    if ACTIVATION == 0:
        sigmoid = tl.sigmoid(alpha * gate)
        value = gate * sigmoid
        slope = sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid))
    elif ACTIVATION == 1:
        # (1 + tanh(u)) / 2 is sigmoid(2u), which neither overflows nor cancels; 1.5957691 = 2·√(2/π).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        sigmoid = tl.sigmoid(inner)
        value = gate * sigmoid
        slope = sigmoid + gate * sigmoid * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    elif ACTIVATION == 3:
        value = tl.where(gate < 0.0, 0.0, gate * gate)
        slope = 2.0 * gate
        flat |= gate <= 0.0
    else:
        # 0.70710678 = 1/√2, 0.3989423 = 1/√(2π).
        below = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * below
        slope = below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    return value, slope, flat


@triton.jit
def limited(up, limit, shift, LIMITED: tl.constexpr):
    """Return the factor clamp(up, -limit, limit) + shift, and a mask where it is constant."""
    flat = tl.zeros(up.shape, dtype=tl.int1)
    if LIMITED:
        flat = (up > limit) | (up < -limit)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return up + shift, flat


@triton.jit
def forward_kernel(
    gate, up, y, gate_stride, up_stride, width, tiles, limit, alpha, shift, gate_scale, scale,
    ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program gates one tile of columns of one row."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = (program % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    first = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32) * gate_scale
    second = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value, _, _ = activated(first, limit, alpha, ACTIVATION, LIMITED)
    factor, _ = limited(second, limit, shift, LIMITED)
    tl.store(y + row * width + column, (value * factor * scale).to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, gate, up, grad_gate, grad_up, grad_stride, gate_stride, up_stride, out_stride, width, tiles,
    limit, alpha, shift, gate_scale, scale,
    ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, NEEDS_GATE: tl.constexpr, NEEDS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes both gradients of one tile; the activation is recomputed."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = (program % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    grad = tl.load(grad_y + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32) * scale
    first = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32) * gate_scale
    value, slope, flat = activated(first, limit, alpha, ACTIVATION, LIMITED)
    if NEEDS_GATE or LIMITED:
        second = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
        factor, factor_flat = limited(second, limit, shift, LIMITED)
    if NEEDS_GATE:
        result = tl.where(flat, 0.0, grad * factor * slope * gate_scale)
        tl.store(grad_gate + row * out_stride + column, result.to(grad_gate.dtype.element_ty), mask=mask)
    if NEEDS_UP:
        result = grad * value
        if LIMITED:
            result = tl.where(factor_flat, 0.0, result)
        tl.store(grad_up + row * out_stride + column, result.to(grad_up.dtype.element_ty), mask=mask)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
