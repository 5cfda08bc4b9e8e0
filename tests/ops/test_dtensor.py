# SPDX-License-Identifier: Apache-2.0
"""Ops take DTensors where PyTorch can, and say what to do elsewhere."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_core
from liger_core import DeviceError, use
from liger_core.op import Choice

distributed = pytest.importorskip("torch.distributed.tensor", reason="torch was built without torch.distributed")

X, WEIGHT = torch.randn(2, 4, 16), torch.randn(16)
QUERY, TABLE = torch.randn(2, 4, 5, 16), torch.randn(1, 5, 16)
LOGITS, TARGET = torch.randn(8, 32), torch.arange(8)
HIDDEN, HEAD = torch.randn(8, 16), torch.randn(32, 16)

SPREAD: dict[str, tuple[Tensor, ...]] = {"rms_norm": (X, WEIGHT), "rope": (QUERY, QUERY, TABLE, TABLE)}
HEADS: dict[str, tuple[Tensor, ...]] = {
    "linear_cross_entropy": (HIDDEN, HEAD, TARGET),
    "linear_divergence": (HIDDEN, HEAD, HIDDEN, HEAD),
}
PLAIN: dict[str, tuple[Tensor, ...]] = {"cross_entropy": (LOGITS, TARGET), "kl_div": (LOGITS, LOGITS)}
MIXED = SPREAD | HEADS | PLAIN


@pytest.fixture(scope="module")
def spread() -> Iterator[Callable[..., Any]]:
    """Makes a DTensor on a mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    whole = [distributed.Replicate()]
    yield lambda tensor, *placements: distributed.distribute_tensor(tensor, mesh, placements or whole)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("op", "args"), MIXED.items(), ids=MIXED.keys())
def test_a_dtensor_beside_a_plain_tensor_is_an_error_that_says_what_to_do(
    op: str, args: tuple[Tensor, ...], spread: Callable[..., Any]
) -> None:
    first, second = list(getattr(liger_core, op).signature.parameters)[:2]
    with use("auto"), pytest.raises(DeviceError) as raised:
        getattr(liger_core, op)(spread(args[0]), *args[1:])
    message = str(raised.value)
    assert message.startswith(
        f"{op}: tensors must all be DTensors or all be plain, got {first} as DTensor and {second}"
    )
    assert message.endswith("over the same mesh with distribute_tensor, or pass local tensors with .to_local()")


@pytest.mark.parametrize(("op", "args"), PLAIN.items(), ids=PLAIN.keys())
def test_dtensors_where_none_are_supported_are_an_error_that_says_what_to_do(
    op: str, args: tuple[Tensor, ...], spread: Callable[..., Any]
) -> None:
    with use("auto"), pytest.raises(DeviceError) as raised:
        getattr(liger_core, op)(*map(spread, args))
    message = str(raised.value)
    assert message.startswith(f"{op}: tensors must be plain, since the op does not support DTensor yet, got ")
    assert (
        "pass whole tensors with .full_tensor() (grad_placements=[Partial()] where ranks have rows of their own), or "
        "local ones" in message
    )


def test_kernels_decline_dtensors(spread: Callable[..., Any]) -> None:
    launch = pytest.importorskip("liger_triton.launch", reason="needs triton")
    with pytest.raises(liger_core.Unsupported, match="the Triton kernels take plain tensors, got a DTensor"):
        launch.supported(spread(X))


def test_explain_asks_about_what_a_rank_holds(spread: Callable[..., Any]) -> None:
    pytest.importorskip("liger_triton", reason="needs triton")
    assert "DTensor" not in str(liger_core.explain(liger_core.rms_norm, spread(X), spread(WEIGHT)))


def test_errors_of_other_causes_stay_what_they_are(spread: Callable[..., Any]) -> None:
    with pytest.raises(liger_core.ShapeError):
        liger_core.rms_norm(spread(X), spread(torch.ones(3)))


@pytest.mark.parametrize(("op", "args"), SPREAD.items(), ids=SPREAD.keys())
def test_implementations_get_what_a_rank_holds(
    op: str, args: tuple[Tensor, ...], spread: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, seen = getattr(liger_core, op), []
    getattr(liger_core, op)(*args)

    def implementation(*args: Any, **options: Any) -> Any:
        seen.extend(type(value) for value in (*args, *options.values()) if isinstance(value, Tensor))
        return chosen.reference(*args, **options)

    monkeypatch.setattr(chosen, "choice", Choice({}, {}, implementation, pytest.fail))
    chosen(*map(spread, args))
    assert seen == [Tensor] * len(args)


def test_a_replicated_weight_of_sharded_rows_has_a_partial_gradient(spread: Callable[..., Any]) -> None:
    x, weight = spread(X, distributed.Shard(1)).requires_grad_(), spread(WEIGHT).requires_grad_()
    liger_core.rms_norm(x, weight).sum().backward()
    assert x.grad.placements == (distributed.Shard(1),)
    assert weight.grad.placements == (distributed.Partial(),)


def test_rows_and_columns_of_a_gated_activation_stay_sharded(spread: Callable[..., Any]) -> None:
    x, gate = (spread(X, distributed.Shard(dimension)) for dimension in (1, 2))
    results = liger_core.add_rms_norm(x, spread(X), spread(WEIGHT))
    assert [result.placements for result in results] == [x.placements] * 2
    assert liger_core.swiglu(gate, gate).placements == gate.placements
    # Columns of a norm, and of a gate and up in one tensor, are gathered.
    assert liger_core.rms_norm(gate).placements == liger_core.swiglu(gate).placements == (distributed.Replicate(),)


def test_heads_stay_sharded_and_tables_whole(spread: Callable[..., Any]) -> None:
    query = spread(QUERY, distributed.Shard(1))
    turned = liger_core.rope(query, query, spread(TABLE), spread(TABLE), inplace=True)
    assert [value.placements for value in turned] == [(distributed.Shard(1),)] * 2
    # Memory of a DTensor is not written over.
    torch.testing.assert_close(query.full_tensor(), QUERY)


def test_tensors_of_different_meshes_are_an_error(spread: Callable[..., Any]) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1))
    other = distributed.distribute_tensor(WEIGHT, mesh, [distributed.Replicate()] * 2)
    with pytest.raises(DeviceError, match="rms_norm: weight must be on the mesh of x"):
        liger_core.rms_norm(spread(X), other)


def test_a_compiled_call_takes_dtensors(spread: Callable[..., Any]) -> None:
    x, weight = spread(X, distributed.Shard(1)).requires_grad_(), spread(WEIGHT).requires_grad_()
    with use("reference"):
        expected = liger_core.rms_norm(x, weight)
        call = torch.compile(lambda x, weight: liger_core.rms_norm(x, weight), backend="aot_eager", fullgraph=True)
        compiled = call(x, weight)
    assert compiled.placements == expected.placements
    torch.testing.assert_close(compiled.full_tensor(), expected.full_tensor())
    gradients = [torch.autograd.grad(result.sum(), (x, weight)) for result in (compiled, expected)]
    for got, wanted in zip(*gradients, strict=True):
        assert got.placements == wanted.placements
        torch.testing.assert_close(got.full_tensor(), wanted.full_tensor())
