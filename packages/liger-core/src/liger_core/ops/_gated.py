# SPDX-License-Identifier: Apache-2.0
"""The formula, arguments, samples and workloads that the gated activations share."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Dtypes, Misuse, Sample, Work, Workload
from liger_core.ops._inputs import misuses_of, normals, tensor_workloads

Activation = Literal["silu", "gelu", "gelu_tanh", "relu_squared"]


def check(op: str, gate: Tensor, up: Tensor | None) -> None:
    checks.floating(op, gate=gate, up=up)
    checks.at_least_one_dimension(op, "gate", gate)
    if up is None:
        if gate.shape[-1] % 2:
            checks.misshapen(op, "a packed gate must have an even last dimension", gate)
        return
    if gate.shape != up.shape:
        checks.unlike(op, "up", up, "gate", gate)


DTYPES = Dtypes((("gate", "up"),))


def layout(gate: Tensor, up: Tensor | None = None, **options: Any) -> Layout:
    # The halves of a packed row must lie on one rank.
    return Layout({"gate": "… (width)"} if up is None else {"gate": "…", "up": "…"}, ("gate",))


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up of a packed tensor (gate first), or the two tensors themselves."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def joined_gate(
    gate: Tensor,
    up: Tensor | None,
    activation: Activation = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """Return act(min(gate, limit)) · (clamp(up, -limit, limit) + shift); without up, the first factor."""
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit) if up is not None else None
    if activation == "silu":
        active = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    elif activation == "relu_squared":
        positive = F.relu(gate)
        # The gradient of square() computes 2x, which overflows where grad · 2x does not.
        active = positive * positive
    else:
        active = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    if up is None:
        return active
    return active * (up + shift if shift else up)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    yield Sample("one_block", (n(2, 3, 64), n(2, 3, 64)), why="elements are a power of two: no mask")
    yield Sample("odd_width", (n(5, 101), n(5, 101)), why="mask on the last block")
    yield Sample("several_tiles", (n(3, 2500), n(3, 2500)), why="a row takes several column tiles")
    yield Sample("packed", (n(2, 5, 96),), why="gate and up are halves of one tensor, and so is the gradient")
    yield Sample("packed_odd", (n(7, 2 * 77),), why="the halves are not aligned")
    yield Sample(
        "strided_rows",
        (n(5, 160)[:, :80], n(5, 160)[:, 80:]),
        why="both are slices: rows are read through their stride",
    )
    yield Sample("transposed", (n(40, 6).t(), n(6, 40)), why="gate is not contiguous in its last dimension")
    yield Sample("frozen_up", (n(4, 40), n(4, 40)), frozen=("up",), why="only the gate's gradient")
    yield Sample("frozen_gate", (n(4, 40), n(4, 40)), frozen=("gate",), why="only up's gradient")
    yield Sample("large_values", (n(3, 64, scale=30), n(3, 64)), why="the activation saturates on both sides")
    yield Sample("one_row", (n(1, 33), n(1, 33)), why="a single row")
    yield Sample("vector", (n(33), n(33)), why="no leading dimension")
    yield Sample("empty", (n(0, 16), n(0, 16)), why="nothing is launched")
    yield Sample("no_columns", (n(2, 3, 0), n(2, 3, 0)), why="rows without columns")


def misuses(op: str, device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of(op)
    x = torch.zeros(2, 9, device=device)
    yield misuse("shapes", (x[:, :8], x), ShapeError, "up must have the shape of gate (2, 8), got (2, 9)")
    yield misuse("no_tensor", (None,), DtypeError, "gate must be a tensor, got NoneType")
    yield misuse("odd_packed", (x,), ShapeError, "a packed gate must have an even last dimension, got (2, 9)")
    message = "up must have dtype torch.float32 like gate, got torch.bfloat16; cast one of them"
    yield misuse("dtypes", (x, x.bfloat16()), DtypeError, message)
    yield misuse("integers", (x.long(), None), DtypeError, "gate must have a floating dtype, got torch.int64")
    elsewhere = torch.zeros(2, 9, device="meta")
    yield misuse("device", (x, elsewhere), DeviceError, f"up must be on {x.device} like gate, got meta")


def workloads() -> Iterator[Workload]:
    # The first shape is host-bound on a GPU.
    return tensor_workloads("NI", ((2048, 4096), (16384, 4096), (16384, 14336)), columns=14336, matrices=2)


def work(gate: Tensor, up: Tensor | None = None, **options: Any) -> Work:
    size = halves(gate, up)[0].nbytes
    return Work(3 * size, 8 * size)
