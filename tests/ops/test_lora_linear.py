# SPDX-License-Identifier: Apache-2.0
"""Facts about lora_linear that its samples do not say."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conformance.cases import LOW, in_float64, with_gradients, word
from liger_core import lora_linear
from liger_core.accuracy import error
from liger_core.kernels import KERNELS
from ops.agreement import disagreements, leaf, saved

ROWS, INNER, OUTER, RANK = 200, 64, 96, 8


def peft(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, column_scale: Tensor | None = None) -> Tensor:
    """The forward of a LoRA layer of PEFT, and of a DoRA layer, whose norms make column_scale."""
    result = F.linear(x, weight)
    lora = F.linear(F.linear(x.to(a.dtype), a), b)
    if column_scale is None:
        return (result + lora * scale).to(result.dtype)
    return (result + (column_scale - 1) * result + column_scale * lora * scale).to(result.dtype)


def call(device: torch.device, dtype: torch.dtype, adapter: torch.dtype) -> dict[str, Any]:
    x = leaf(2, ROWS // 2, INNER, device=device, dtype=dtype)
    weight = leaf(OUTER, INNER, device=device, dtype=dtype, scale=INNER**-0.5)
    a = leaf(RANK, INNER, device=device, dtype=adapter, scale=INNER**-0.5)
    b = leaf(OUTER, RANK, device=device, dtype=adapter, scale=0.3)
    return {"x": x, "weight": weight.detach(), "a": a, "b": b, "scale": 2.0}


@pytest.mark.parametrize("adapter", [torch.float32, None], ids=["float32_adapter", "adapter_as_x"])
@pytest.mark.parametrize("dtype", LOW, ids=word)
def test_it_is_a_layer_of_peft(dtype: torch.dtype, adapter: torch.dtype | None, device: torch.device) -> None:
    assert disagreements(lora_linear, peft, **call(device, dtype, adapter or dtype)) == []


@pytest.mark.parametrize("columns", [False, True], ids=["lora", "dora"])
def test_gradients_of_a_float32_adapter_are_as_close_to_float64_as_those_of_peft(
    columns: bool, device: torch.device
) -> None:
    given = call(device, torch.bfloat16, torch.float32)
    if columns:
        given["column_scale"] = leaf(OUTER, device=device, dtype=torch.float32)
    upstream = torch.randn(2, ROWS // 2, OUTER, device=device).bfloat16()
    got = torch.autograd.grad(lora_linear(**given), (given["a"], given["b"]), upstream)
    exact = with_gradients(in_float64(given), ["a", "b"])
    expected = torch.autograd.grad(peft(**exact), (exact["a"], exact["b"]), upstream.double())
    theirs = torch.autograd.grad(peft(**given), (given["a"], given["b"]), upstream)
    assert all(value.dtype == torch.float32 for value in got)
    for ours, peers, truth in zip(got, theirs, expected, strict=True):
        assert error(ours, truth).frobenius <= 2 * error(peers, truth).frobenius + 2.0**-22


def test_an_adapter_may_leave_the_range_of_float16_where_the_sum_does_not(device: torch.device) -> None:
    x, weight = (torch.full((1, 2), value, dtype=torch.float16, device=device) for value in (200.0, -100.0))
    a, b = torch.full((1, 2), 100.0, device=device), torch.full((1, 1), 2.0, device=device)
    assert lora_linear(x, weight, a, b).item() == 40_000.0


class Widened(TorchDispatchMode):
    """Whether a tensor of the size of x is cast to float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.float32 and result.numel() >= self.size:
            self.found = True
        return result


def test_x_is_not_cast_to_the_dtype_of_the_adapter(device: torch.device) -> None:
    given = call(device, torch.bfloat16, torch.float32)
    with Widened(ROWS * INNER) as casts:
        peft(**given).sum().backward()
    assert casts.found
    with Widened(ROWS * INNER) as casts:
        lora_linear(**given).sum().backward()
    assert not casts.found


def test_only_x_and_the_small_projection_are_kept(device: torch.device) -> None:
    given = call(device, torch.bfloat16, torch.float32)
    fresh = saved(lambda: lora_linear(**given), *given.values())
    assert [tuple(t.shape) for t in fresh] == [(ROWS, 4 * RANK)]


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels of lora_linear that are launched from now on."""
    names: list[str] = []
    for kernel in KERNELS.values():
        if "::lora_" in kernel.name:
            monkeypatch.setattr(
                kernel,
                "launch",
                lambda *args, kernel=kernel, launch=kernel.launch: (names.append(kernel.name), launch(*args)),
            )
    return names


def test_checkpointing_does_not_repeat_the_last_layer(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = call(device, torch.float32, torch.float32), call(device, torch.float32, torch.float32)
    names = launches(monkeypatch)

    def block(x: Tensor) -> Tensor:
        inner = F.linear(lora_linear(**(first | {"x": x})), torch.ones(INNER, OUTER, device=device) / OUTER)
        return x + lora_linear(**(second | {"x": inner}))[..., :INNER]

    x = first["x"]
    y = checkpoint(block, x, use_reentrant=False)
    assert sum(name.endswith("lora_linear") for name in names) == 2
    inputs = (x, first["a"], second["a"], second["b"])
    gradients = torch.autograd.grad(y.sum(), inputs)
    assert sum(name.endswith("lora_linear") for name in names) == 3
    expected = torch.autograd.grad(block(x).sum(), inputs)
    assert all(torch.equal(value, wanted) for value, wanted in zip(gradients, expected, strict=True))


def test_the_graph_is_freed_with_the_backward_pass(device: torch.device) -> None:
    given = call(device, torch.float32, torch.float32)
    y = lora_linear(**given)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
