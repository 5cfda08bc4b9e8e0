# SPDX-License-Identifier: Apache-2.0
"""gated_rms_norm in Triton: one pass forward; one backward, which recomputes the gate and sums the weight gradient."""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import Unsupported
from liger_core.kernels import Outputs
from liger_triton._norm import read, sum_columns
from liger_triton.launch import (
    Launcher,
    cdiv,
    contiguous,
    dense_like,
    differentiable_kernels,
    fuses,
    processors,
    row_shape,
    shared_memory,
    strided_rows,
    supported,
)

WIDEST = 16384


class Form(NamedTuple):
    """The options: eps, weight offset, whether the gate is a sigmoid and comes first, columns of a group (0: all)."""

    eps: float
    offset: float
    sigmoid: bool
    first: bool
    group: int


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0,
    activation: Literal["silu", "sigmoid"] = "silu", gate_first: bool = False, group_size: int | None = None,
) -> Tensor:  # fmt: skip
    supported(x, gate, weight)
    if (group_size or x.shape[-1]) > WIDEST:
        raise Unsupported(f"groups of {group_size or x.shape[-1]} columns, more than {WIDEST}")
    form = Form(float(eps), float(weight_offset), activation == "sigmoid", gate_first, group_size or 0)
    return _gated_rms_norm(x, gate, weight, form)


def _allocate(x: Tensor, gate: Tensor, weight: Tensor | None, form: Form) -> Outputs:
    return dense_like(x), x.new_empty(x.numel() // max(1, form.group or x.shape[-1]), dtype=torch.float32)


def _launch(y: Tensor, inverse: Tensor, /, x: Tensor, gate: Tensor, weight: Tensor | None, form: Form) -> None:
    if x.numel() == 0:
        return
    width = form.group or x.shape[-1]
    groups, rows = x.shape[-1] // width, x.numel() // x.shape[-1]
    x, x_stride = strided_rows(x)
    gate, gate_stride = strided_rows(gate)
    block, several, warps = forward_shape(width)
    forward_launch(
        (cdiv(rows, several), groups), x, gate, contiguous(weight), y, inverse, x_stride, gate_stride, rows, width,
        form.eps, form.offset,
        SIGMOID=form.sigmoid, FIRST=form.first, ROWS=several, BLOCK=block, num_warps=warps,
        enable_fp_fusion=fuses(block),
    )  # fmt: skip


def _launch_backward(
    grad_x: Tensor | None, grad_gate: Tensor | None, grad_weight: Tensor | None, /, grad_y: Tensor, x: Tensor,
    gate: Tensor, weight: Tensor | None, form: Form, inverse: Tensor, needs: list[bool],
) -> None:  # fmt: skip
    if x.numel() == 0:
        if grad_weight is not None:
            grad_weight.zero_()
        return
    whole = x.shape[-1]
    width = form.group or whole
    groups, rows = whole // width, x.numel() // whole
    x, x_stride = strided_rows(x)
    gate, gate_stride = strided_rows(gate)
    grad_y, grad_stride = strided_rows(grad_y)
    size = 2 * x.element_size() + gate.element_size()
    block, several, warps, stages, programs, held = backward_shape(width, size, shared_memory(x.device))
    programs = min(cdiv(rows, several), max(1, programs * processors(x.device) // groups))
    partials = None if grad_weight is None else x.new_empty((1, programs, whole), dtype=torch.float32)
    backward_launch(
        (programs, groups), grad_y, x, gate, contiguous(weight), inverse, grad_x, grad_gate, partials,
        grad_stride, x_stride, gate_stride, rows, width, form.offset,
        SIGMOID=form.sigmoid, FIRST=form.first, ROWS=several, BLOCK=block, STAGES=stages, HELD=held, num_warps=warps,
        enable_fp_fusion=fuses(block),
    )  # fmt: skip
    if partials is not None:
        sum_columns(partials, grad_weight, None)


# Share of copy bandwidth on one H200 (bfloat16): .92 at 8192 columns, .98 at 4096; backward .95.
def forward_shape(width: int) -> tuple[int, int, int]:
    """Return the block of columns, the rows of a program, and its warps."""
    return row_shape(width, 2048, lambda block: 8 if block <= 8192 else 16)


def backward_shape(width: int, size: int, shared: int) -> tuple[int, int, int, int, int, bool]:
    """Return (block, rows, warps, stages, programs per multiprocessor, whether the weight stays in registers).

    size is the bytes of a column of the three tensors; the stages load the next rows into shared memory.
    """
    block, rows, warps = forward_shape(width)
    programs = 4 if block <= 2048 else 2 if block <= 4096 else 1
    if block == 4096 and 6 * size * block < shared - 2048:
        rows = 2
    stages = 3 if 3 * size * rows * block < shared - 2048 else 1
    return block, rows, warps, stages, programs, block <= 2048


_gated_rms_norm = differentiable_kernels("gated_rms_norm", _allocate, _launch, _launch_backward)


@triton.jit
def gated(gate, SIGMOID: tl.constexpr):
    """Return the activation of the gate and its derivative."""
    sigmoid = tl.sigmoid(gate)
    if SIGMOID:
        value = sigmoid
        slope = sigmoid * (1.0 - sigmoid)
    else:
        value = gate * sigmoid
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return value, slope


@triton.jit
def forward_kernel(
    x, gate, weight, y, inverse, x_stride, gate_stride, rows, width, eps, offset,
    SIGMOID: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, g) computes group g of ROWS rows."""
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    column = group * width + lane
    mask = (row < rows)[:, None] & (lane < width)[None, :]
    value = read(x + row[:, None] * x_stride + column[None, :], mask)
    factor, _ = gated(read(gate + row[:, None] * gate_stride + column[None, :], mask), SIGMOID)
    if FIRST:
        value = value * factor
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(inverse + row * groups + group, scale, mask=row < rows)
    value = value * scale[:, None]
    if weight is not None:
        value = value * (read(weight + column, lane < width) + offset)[None, :]
    if not FIRST:
        value = value * factor
    tl.store(y + row[:, None] * (groups * width) + column[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_y, x, gate, weight, inverse, grad_x, grad_gate, partials, grad_stride, x_stride, gate_stride, rows, width,
    offset, SIGMOID: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Program (p, g) walks group g of every programs-th ROWS rows; its weight gradient goes to row p of partials.

    With n the normalized row and u its gradient, the gradient before the norm is inverse · (u - n · mean(u · n)).
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    lane = tl.arange(0, BLOCK)
    column = group * width + lane
    if weight is not None and HELD:
        scaled = (read(weight + column, lane < width) + offset)[None, :]
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (lane < width)[None, :]
        above = read(grad_y + row[:, None] * grad_stride + column[None, :], mask)
        value = read(x + row[:, None] * x_stride + column[None, :], mask)
        factor, slope = gated(read(gate + row[:, None] * gate_stride + column[None, :], mask), SIGMOID)
        scale = tl.load(inverse + row * groups + group, mask=row < rows, other=0.0)[:, None]
        normed = value * scale
        if FIRST:
            normed = normed * factor
        into = above if FIRST else above * factor
        if partials is not None:
            sums += tl.sum(into * normed, 0)
        if weight is not None:
            if not HELD:
                scaled = (read(weight + column, lane < width) + offset)[None, :]
            into = into * scaled
            above = above * scaled
        result = (into - normed * (tl.sum(into * normed, 1) / width)[:, None]) * scale
        out = row[:, None] * (groups * width) + column[None, :]
        if grad_gate is not None:
            toward = (result * value if FIRST else above * normed) * slope
            tl.store(grad_gate + out, toward.to(grad_gate.dtype.element_ty), mask=mask)
        if grad_x is not None:
            if FIRST:
                result = result * factor
            tl.store(grad_x + out, result.to(grad_x.dtype.element_ty), mask=mask)
    if partials is not None:
        tl.store(partials + program.to(tl.int64) * (groups * width) + column, sums, mask=lane < width)


forward_launch = Launcher(forward_kernel)
backward_launch = Launcher(backward_kernel)
