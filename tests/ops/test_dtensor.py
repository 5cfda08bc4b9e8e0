# SPDX-License-Identifier: Apache-2.0
"""Ops take DTensors where PyTorch can, and say what to do elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_core
from liger_core import DeviceError, use

distributed = pytest.importorskip("torch.distributed.tensor", reason="torch was built without torch.distributed")

X, WEIGHT = torch.randn(2, 4, 16), torch.randn(16)
QUERY, TABLE = torch.randn(2, 4, 5, 16), torch.randn(1, 5, 16)
LOGITS, TARGET = torch.randn(8, 32), torch.arange(8)
HIDDEN, HEAD = torch.randn(8, 16), torch.randn(32, 16)

SPREAD: dict[str, tuple[Tensor, ...]] = {
    "rms_norm": (X, WEIGHT),
    "layer_norm": (X, WEIGHT, WEIGHT),
    "add_rms_norm": (X, X, WEIGHT),
    "swiglu": (X, X),
    "geglu": (X, X),
    "rope": (QUERY, QUERY, TABLE, TABLE),
}
PLAIN: dict[str, tuple[Tensor, ...]] = {
    "cross_entropy": (LOGITS, TARGET),
    "linear_divergence": (HIDDEN, HEAD, HIDDEN, HEAD),
    "kl_div": (LOGITS, LOGITS),
    "jsd": (LOGITS, LOGITS),
    "total_variation": (LOGITS, LOGITS),
}
# The vocabulary may be sharded: tests/ops/test_sharded_heads.py.
HEADS: dict[str, tuple[Tensor, ...]] = {"linear_cross_entropy": (HIDDEN, HEAD, TARGET), "linear_log_prob": (HIDDEN, HEAD, TARGET)}


@pytest.fixture(scope="module")
def spread() -> Iterator[Callable[[Tensor], Any]]:
    """Makes a DTensor on a mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    yield lambda tensor: distributed.distribute_tensor(tensor, mesh, [distributed.Replicate()])
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("op", "args"), SPREAD.items(), ids=SPREAD.keys())
def test_elementwise_ops_and_norms_take_dtensors(op: str, args: tuple[Tensor, ...], spread: Callable[[Tensor], Any]) -> None:
    # Kernels decline them, so the reference runs.
    with use("auto"):
        result, expected = getattr(liger_core, op)(*map(spread, args)), getattr(liger_core, op)(*args)
    for got, wanted in zip(*(value if isinstance(value, tuple) else (value,) for value in (result, expected)), strict=True):
        assert isinstance(got, distributed.DTensor)
        torch.testing.assert_close(got.full_tensor(), wanted)


@pytest.mark.parametrize(("op", "args"), (SPREAD | PLAIN | HEADS).items(), ids=(SPREAD | PLAIN | HEADS).keys())
def test_a_dtensor_beside_a_plain_tensor_is_an_error_that_says_what_to_do(
    op: str, args: tuple[Tensor, ...], spread: Callable[[Tensor], Any]
) -> None:
    first, second = list(getattr(liger_core, op).signature.parameters)[:2]
    with use("auto"), pytest.raises(DeviceError) as raised:
        getattr(liger_core, op)(spread(args[0]), *args[1:])
    message = str(raised.value)
    assert message.startswith(f"{op}: tensors must all be DTensors or all be plain, got {first} as DTensor and {second}")
    assert message.endswith("over the same mesh with distribute_tensor, or pass local tensors with .to_local()")


@pytest.mark.parametrize(("op", "args"), PLAIN.items(), ids=PLAIN.keys())
def test_dtensors_where_none_are_supported_are_an_error_that_says_what_to_do(
    op: str, args: tuple[Tensor, ...], spread: Callable[[Tensor], Any]
) -> None:
    with use("auto"), pytest.raises(DeviceError) as raised:
        getattr(liger_core, op)(*map(spread, args))
    message = str(raised.value)
    assert message.startswith(f"{op}: tensors must be plain, since the op does not support DTensor yet, got ")
    assert (
        "pass whole tensors with .full_tensor() (grad_placements=[Partial()] where ranks have rows of their own), or local ones" in message
    )


def test_kernels_decline_dtensors(spread: Callable[[Tensor], Any]) -> None:
    launch = pytest.importorskip("liger_triton.launch", reason="needs triton")
    with pytest.raises(liger_core.Unsupported, match="the Triton kernels take plain tensors, got a DTensor"):
        launch.supported(spread(X))


def test_errors_of_other_causes_stay_what_they_are(spread: Callable[[Tensor], Any]) -> None:
    with pytest.raises(liger_core.ShapeError):
        liger_core.rms_norm(spread(X), spread(torch.ones(3)))
