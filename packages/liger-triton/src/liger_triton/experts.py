# SPDX-License-Identifier: Apache-2.0
"""experts in Triton: the passes over rows before, between and after two grouped matmuls.

The backward pass reads only x, the outputs of the first matmul and the order of the rows. With a router weight w, a
row's output w · (W a) and its upstream gradient g, the gradient of a is w · (Wᵀ g), and that of w is g · (W a) =
(Wᵀ g) · a: no output of the second matmul is kept.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Outputs
from liger_core.ops._grouped import grouped
from liger_triton._experts import (
    activate_backward_launch,
    activate_launch,
    along_launch,
    combine_launch,
    spread_launch,
    sum_rows_launch,
)
from liger_triton._grouped import grouped_matmul, grouped_sum
from liger_triton.launch import ComposedKernel, cdiv, contiguous, dense_like, power_of_two, strided_rows, supported

# The codes of `activated`.
CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu_squared": 3}
# Columns of a row that one program copies or sums.
WIDE = 2048
# Rows and columns of a tile that one program activates, or sums over rows.
ROWS, COLUMNS = 8, 256
SUMMED, NARROW = 32, 64


class Routing(NamedTuple):
    """The experts that each token goes to, (tokens, k), and the weights of their outputs."""

    chosen: Tensor
    weight: Tensor


class Biases(NamedTuple):
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class Adapters(NamedTuple):
    """The low-rank adapters of the matrices."""

    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None


class Gate(NamedTuple):
    """The options of the activation."""

    activation: str
    limit: float | None
    alpha: float
    shift: float
    interleaved: bool


def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: Literal["silu", "gelu", "gelu_tanh", "relu_squared"] = "silu",
    limit: float | None = None, alpha: float = 1.0, shift: float = 0.0, interleaved: bool = False,
    gate_up_a: Tensor | None = None, gate_up_b: Tensor | None = None, down_a: Tensor | None = None,
    down_b: Tensor | None = None,
) -> Tensor:  # fmt: skip
    adapters = Adapters(gate_up_a, gate_up_b, down_a, down_b)
    supported(x, gate_up, down, weight, gate_up_bias, down_bias, *adapters)
    gate = Gate(activation, None if limit is None else float(limit), float(alpha), float(shift), interleaved)
    return _experts(x, gate_up, down, Routing(index, weight), Biases(gate_up_bias, down_bias), adapters, gate)


def _allocate(
    x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, biases: Biases, adapters: Adapters, gate: Gate
) -> Outputs:  # fmt: skip
    slots = routing.chosen.numel()
    order, slot_rows = (x.new_empty(slots, dtype=torch.int64) for _ in range(2))
    return (
        dense_like(x),
        x.new_empty(slots, gate_up.shape[1]),
        order,
        slot_rows,
        x.new_empty(down.shape[0], dtype=torch.int32),
    )


def _scratch(x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *rest: Any) -> int:
    """Return the bytes of the experts' inputs, activations and outputs, and of the keys and positions for sorting."""
    _, hidden, inner = down.shape
    return routing.chosen.numel() * ((hidden + inner) * x.itemsize + 40)


def _launch(
    y: Tensor, joined: Tensor, order: Tensor, slot_rows: Tensor, ends: Tensor, /, x: Tensor, gate_up: Tensor,
    down: Tensor, routing: Routing, biases: Biases, adapters: Adapters, gate: Gate,
) -> Outputs:  # fmt: skip
    order, slot_rows, ends = grouped(routing.chosen, down.shape[0])
    joined = _through(
        _spread(x, slot_rows, routing), gate_up.mT, _turned(adapters.gate_up_a), _turned(adapters.gate_up_b), ends
    )
    active = joined.new_empty(joined.shape[0], down.shape[2])
    _activate(joined, active, order, ends, routing, biases, gate)
    parts = _through(active, down.mT, _turned(adapters.down_a), _turned(adapters.down_b), ends)
    del active
    y = _combine(parts, slot_rows, ends, routing, routing.weight, biases.down_bias)
    return y, joined, order, slot_rows, ends


def _allocate_backward(
    grad_y: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, biases: Biases, adapters: Adapters,
    gate: Gate, joined: Tensor, order: Tensor, slot_rows: Tensor, ends: Tensor, needs: list[bool],
) -> Outputs:  # fmt: skip
    inputs = (x, gate_up, down, routing.weight, *biases, *adapters)
    matrices = (False, True, True, False, False, False, *[True] * len(adapters))
    wanted = zip(needs, inputs, matrices, strict=True)
    return (
        *(
            None if t is None or not need else torch.empty_like(t) if keeps_layout else dense_like(t)
            for need, t, keeps_layout in wanted
        ),
        None,
    )


def _scratch_backward(
    grad_y: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *rest: Any
) -> int:  # fmt: skip
    """Return the bytes of the rows and activations, before the gradients of x and gate_up are allocated."""
    *_, needs = rest
    results = sum(t.numel() * t.itemsize for t, need in zip((x, gate_up), needs, strict=False) if need)
    rows = routing.chosen.numel()
    return max(_scratch(x, gate_up, down, routing) - results, rows * (x.shape[1] * x.itemsize + 40))


def _launch_backward(
    grad_x: Tensor | None, grad_gate_up: Tensor | None, grad_down: Tensor | None, grad_weight: Tensor | None,
    grad_gate_up_bias: Tensor | None, grad_down_bias: Tensor | None, grad_gate_up_a: Tensor | None,
    grad_gate_up_b: Tensor | None, grad_down_a: Tensor | None, grad_down_b: Tensor | None, scratch: Tensor | None, /,
    grad_y: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, biases: Biases, adapters: Adapters,
    gate: Gate, joined: Tensor, order: Tensor, slot_rows: Tensor, ends: Tensor, needs: list[bool],
) -> Outputs:  # fmt: skip
    for_x, for_gate_up, for_down, for_weight, for_gate_up_bias, for_down_bias, *for_adapters = needs
    for_first, for_second = (for_gate_up, *for_adapters[:2]), (for_down, *for_adapters[2:])
    through = for_x or any(for_first) or for_gate_up_bias
    grads = _spread(grad_y, slot_rows, routing)
    # Wᵀ g and w · a may overflow float16 where w · Wᵀ g, (Wᵀ g) · a and the gradient of W do not.
    narrow = grads.dtype == torch.float16
    wide = torch.float32 if narrow else grads.dtype
    if through or for_weight:
        pulled = _through(grads, down, adapters.down_b, adapters.down_a, ends, wide)
    else:
        pulled = grads.new_empty(grads.shape[0], down.shape[2])
    # The weighted activation, of which the gradient of down is made, overwrites `pulled` once that is read.
    active = torch.empty_like(pulled, dtype=grads.dtype) if narrow and any(for_second) else pulled
    grad_joined = (torch.empty_like(joined) if scratch is None else scratch) if through else None
    if for_weight:
        grad_weight = dense_like(routing.weight)
    along = (
        _along_bias(grad_y, slot_rows, ends, routing, biases.down_bias)
        if for_weight and biases.down_bias is not None
        else None
    )
    _activate_backward(
        joined, pulled, active, grad_joined, grad_weight, along, order, ends, routing, biases, gate, any(for_second)
    )
    if for_down_bias:
        grad_down_bias = _sum_rows(grads, ends, order, routing.weight)
    if any(for_second):
        if narrow:
            grads.mul_(routing.weight.reshape(-1)[order][:, None])
        grad_down, grad_down_a, grad_down_b = _of_matrices(grads, active, (down, *adapters[2:]), ends, for_second)
    del grads, pulled, active
    if grad_joined is not None:
        if for_gate_up_bias:
            grad_gate_up_bias = _sum_rows(grad_joined, ends)
        if any(for_first):
            matrices = gate_up, *adapters[:2]
            grad_gate_up, grad_gate_up_a, grad_gate_up_b = _of_matrices(
                grad_joined, _spread(x, slot_rows, routing), matrices, ends, for_first
            )
        if for_x:
            grad_x = _combine(
                _through(grad_joined, gate_up, adapters.gate_up_b, adapters.gate_up_a, ends), slot_rows, ends, routing
            )
    return (
        *(grad_x, grad_gate_up, grad_down, grad_weight, grad_gate_up_bias, grad_down_bias),
        *(grad_gate_up_a, grad_gate_up_b, grad_down_a, grad_down_b, None),
    )


def _turned(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.mT


def _through(
    rows: Tensor,
    matrices: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    ends: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return rows @ matrices of each group, plus rows @ first @ second with an adapter."""
    out = grouped_matmul(rows, matrices, ends, dtype)
    if first is not None and second is not None:
        # One pass over the large result, which does not round the small product.
        out = grouped_matmul(grouped_matmul(rows, first, ends), second, ends, onto=out)
    return out


def _of_matrices(
    grads: Tensor,
    rows: Tensor,
    matrices: tuple[Tensor, Tensor | None, Tensor | None],
    ends: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of matrices and of their adapter from rows and the upstream gradients of the products."""
    base, a, b = matrices
    return (
        _summed_like(base, grads, rows, ends) if needs[0] else None,
        _summed_like(a, grouped_matmul(grads, b, ends), rows, ends)
        if needs[1] and a is not None and b is not None
        else None,
        _summed_like(b, grads, grouped_matmul(rows, a.mT, ends), ends)
        if needs[2] and a is not None and b is not None
        else None,
    )


def _summed_like(matrices: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return leftᵀ @ right for each group, in the layout of the matrices, so autograd need not copy it."""
    if matrices.stride(1) < matrices.stride(2):
        return grouped_sum(right, left, ends).mT
    return grouped_sum(left, right, ends)


def _spread(x: Tensor, slot_rows: Tensor, routing: Routing) -> Tensor:
    """Copy the row of each token to the rows of all its slots."""
    k, width = routing.chosen.shape[1], x.shape[1]
    x, stride = strided_rows(x)
    rows = x.new_empty(slot_rows.shape[0], width)
    if rows.numel():
        block = min(WIDE, power_of_two(width))
        tiles = cdiv(width, block)
        spread_launch((x.shape[0] * tiles,), x, slot_rows, rows, stride, width, tiles, K=k, BLOCK=block, num_warps=4)
    return rows


def _combine(
    rows: Tensor,
    slot_rows: Tensor,
    ends: Tensor,
    routing: Routing,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Sum the rows of each token's slots that have an expert, in float32 and weighted if there are weights."""
    (tokens, k), width = routing.chosen.shape, rows.shape[1]
    y = rows.new_empty(tokens, width)
    if y.numel() and k:
        block = min(WIDE, power_of_two(width))
        tiles = cdiv(width, block)
        combine_launch(
            (tokens * tiles,), rows, slot_rows, ends, contiguous(weight), contiguous(bias), contiguous(routing.chosen),
            y, width, tiles, ends.shape[0],
            WEIGHTED=weight is not None, HAS_BIAS=bias is not None, K=k, BLOCK=block, num_warps=4,
        )  # fmt: skip
    else:
        y.zero_()
    return y


def _activate(
    joined: Tensor, active: Tensor, order: Tensor, ends: Tensor, routing: Routing, biases: Biases, gate: Gate
) -> None:
    rows, width = active.shape
    if rows * width:
        tiles = cdiv(width, COLUMNS)
        activate_launch(
            (cdiv(rows, ROWS) * tiles,), joined, contiguous(biases.gate_up_bias), order, contiguous(routing.chosen),
            ends, active,
            rows, width, tiles, ends.shape[0], *_numbers(gate), **_constants(joined, width, biases, gate),
        )  # fmt: skip


def _activate_backward(
    joined: Tensor, pulled: Tensor, active: Tensor, grad_joined: Tensor | None, grad_weight: Tensor | None,
    along: Tensor | None, order: Tensor, ends: Tensor, routing: Routing, biases: Biases, gate: Gate, for_down: bool,
) -> None:  # fmt: skip
    rows, width = active.shape
    if rows * width:
        activate_backward_launch(
            (cdiv(rows, ROWS),), joined, contiguous(biases.gate_up_bias), order, contiguous(routing.chosen), ends,
            contiguous(routing.weight), along, pulled, active, grad_joined, grad_weight, rows, width, ends.shape[0],
            *_numbers(gate),
            NEEDS_JOINED=grad_joined is not None, NEEDS_WEIGHT=grad_weight is not None, HAS_ALONG=along is not None,
            NEEDS_ACTIVE=for_down, WEIGHTED=active.dtype != torch.float16, **_constants(joined, width, biases, gate),
        )  # fmt: skip
    elif grad_weight is not None:
        grad_weight.zero_()


def _along_bias(grad_y: Tensor, slot_rows: Tensor, ends: Tensor, routing: Routing, bias: Tensor) -> Tensor:
    """Return, for each slot, the product of its token's upstream gradient and its expert's bias."""
    grad_y, stride = strided_rows(grad_y)
    along = grad_y.new_empty(slot_rows.shape[0], dtype=torch.float32)
    if along.numel():
        width = grad_y.shape[1]
        along_launch(
            (along.shape[0],), grad_y, contiguous(bias), contiguous(routing.chosen), slot_rows, ends, along, stride,
            width, ends.shape[0],
            K=routing.chosen.shape[1], BLOCK=min(WIDE, power_of_two(width)), num_warps=4,
        )  # fmt: skip
    return along


def _sum_rows(rows: Tensor, ends: Tensor, order: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Return the sum of each group's rows, weighted by their slots' weights if there are any."""
    width, groups = rows.shape[1], ends.shape[0]
    sums = rows.new_empty(groups, width)
    tiles = cdiv(width, NARROW)
    sum_rows_launch(
        (groups * tiles,), rows, order, contiguous(weight), ends, sums, width, tiles,
        WEIGHTED=weight is not None, ROWS=SUMMED, COLUMNS=NARROW,
    )  # fmt: skip
    return sums


def _numbers(gate: Gate) -> tuple[float, float, float]:
    return gate.limit or 0.0, gate.alpha, gate.shift


def _constants(joined: Tensor, width: int, biases: Biases, gate: Gate) -> dict[str, Any]:
    return {
        "ACTIVATION": CODES[gate.activation], "LIMITED": gate.limit is not None, "GATED": joined.shape[1] != width,
        "INTERLEAVED": gate.interleaved, "HAS_BIAS": biases.gate_up_bias is not None, "ROWS": ROWS, "COLUMNS": COLUMNS,
        "num_warps": 4,
    }  # fmt: skip


_experts = differentiable(
    ComposedKernel("experts", _allocate, _launch, scratch=_scratch),
    ComposedKernel("experts_backward", _allocate_backward, _launch_backward, "joined", _scratch_backward),
    saves=(
        "x", "gate_up", "down", *Routing._fields, *Biases._fields, *Adapters._fields, "joined", "order", "slot_rows",
        "ends",
    ),
)  # fmt: skip
