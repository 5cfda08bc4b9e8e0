# SPDX-License-Identifier: Apache-2.0
"""Facts about the values of linear_cross_entropy that its samples do not say; its memory has a file of its own."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import explain, linear_cross_entropy, linear_log_prob
from liger_core.plugins import registry
from ops.agreement import disagreements, leaf
from ops.test_cross_entropy import REDUCTIONS, some_targets

pytestmark = pytest.mark.slow


def head(
    device: torch.device, rows: int = 9, width: int = 20, classes: int = 30, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    hidden = leaf(rows, width, device=device, dtype=dtype)
    return {"hidden": hidden, "weight": leaf(classes, width, device=device, dtype=dtype, scale=0.3)}


@pytest.mark.parametrize("chunk", [None, 4, "report"], ids=["one_chunk", "chunked", "report"])
@REDUCTIONS
@pytest.mark.parametrize("more", [False, True], ids=["plain", "weighted_smoothed_bias"])
def test_linear_cross_entropy_equals_the_two_functions_of_pytorch(
    chunk: Any, reduction: Any, more: bool, device: torch.device
) -> None:
    options: dict[str, Any] = {"reduction": reduction}
    if more:
        options |= {"ignore_index": 5, "label_smoothing": 0.1}
    target = some_targets(30, 9, device=device, ignored=options.get("ignore_index", -100))
    class_weight = torch.rand(30, device=device) + 0.5 if more else None
    bias = leaf(30, device=device) if more else None

    def formula(hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias), target, class_weight, **options)

    call = partial(linear_cross_entropy, target=target, chunk=chunk, **options)
    assert disagreements(call, formula, **head(device), bias=bias, class_weight=class_weight) == []


def test_an_ignored_row_is_not_looked_at(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("elsewhere ignored rows take part in the products, with zeros: only the host knows their number")
    hidden, weight = head(device).values()
    target = torch.randint(30, (9,), device=device)
    with torch.no_grad():
        hidden[3], target[3] = torch.nan, -100
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert torch.isfinite(loss)
        assert not gradients[0][3].any()
        assert torch.isfinite(gradients[1]).all()


@pytest.mark.parametrize(
    ("op", "options"),
    [(linear_cross_entropy, {}), (linear_cross_entropy, {"reduction": "none"}), (linear_log_prob, {})],
    ids=["mean", "none", "log_prob"],
)
def test_an_implementation_gives_nan_for_a_target_out_of_range(
    op: Any, options: dict[str, str], device: torch.device
) -> None:
    given, target = head(device), torch.tensor([4, 30, 2] * 3, device=device)
    name = explain(op, **given, target=torch.zeros_like(target)).backend
    loss = registry().implementations[name][op.name](**given, target=target, **options)
    assert loss.isnan().tolist() == ([False, True, False] * 3 if loss.dim() else True)


def test_gradients_do_not_underflow_in_float16(device: torch.device) -> None:
    """With a million tokens a probability divided by their number is below the least float16; the sum over classes is
    not."""
    target = torch.randint(30, (9,), device=device)
    given = head(device, dtype=torch.float16)
    hidden, weight = (t.double() for t in given.values())
    sums = F.cross_entropy(hidden @ weight.t(), target, reduction="sum")
    exact = torch.autograd.grad(sums / 1e6 * 2.0**14, list(given.values()))
    loss = linear_cross_entropy(**given, target=target, normalizer=torch.tensor(1e6, device=device))
    got = torch.autograd.grad(loss * 2.0**14, list(given.values()))
    for g, e in zip(got, exact, strict=True):
        # Rounding the logits to float16 costs 2⁻¹¹ a product; a flushed gradient would be off by 1.
        assert (g.double() - e.double()).norm() < 0.01 * e.double().norm()


@pytest.mark.parametrize("chunks", [2, 64])
def test_weight_gradients_of_many_chunks_are_as_accurate_as_of_one(chunks: int, device: torch.device) -> None:
    given = head(device, rows=128, width=16, classes=40, dtype=torch.bfloat16)
    target = torch.randint(40, (128,), device=device)
    wide = {n: t.detach().double().requires_grad_() for n, t in given.items()}
    summed = linear_cross_entropy.reference(**wide, target=target, reduction="sum")
    (exact,) = torch.autograd.grad(summed, wide["weight"])

    def error(**options: Any) -> float:
        loss = linear_cross_entropy(**given, target=target, reduction="sum", **options)
        (grad,) = torch.autograd.grad(loss, given["weight"])
        return float((grad.double() - exact).norm() / exact.norm())

    once, often = error(chunk=128), error(chunk=128 // chunks)
    assert often <= 1.1 * once
    if chunks == 64:
        # What the float32 sum avoids: with bfloat16 between chunks the error is several times as large.
        assert error(chunk=2, accumulate_dtype=torch.bfloat16) > 2 * once


def test_two_graphs_may_add_to_one_main_grad_in_any_order(device: torch.device) -> None:
    hidden, weight = head(device).values()
    target = torch.arange(9, device=device)
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), weight)
    main_grad = torch.zeros(weight.shape, device=device)
    losses = [linear_cross_entropy(hidden, weight, target, main_grad=main_grad) for _ in range(2)]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    torch.testing.assert_close(main_grad, 3 * expected)


def test_ignored_rows_are_packed_out_of_large_products(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only products that take longer than the wait for their number are packed; here none is too small."""
    monkeypatch.setattr("liger_core.ops.head.head.PACK_FLOPS", 0)
    monkeypatch.setattr("liger_core.ops.head.head.PACK_TILE", 4)
    hidden, weight = head(device, rows=40).values()
    target = torch.arange(40, device=device) % 30
    target[torch.arange(40, device=device) % 3 > 0] = -100
    seen: list[int] = []
    product = torch.mm

    def watched(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        seen.append(a.shape[0])
        return product(a, b, **options)

    monkeypatch.setattr(torch, "mm", watched)
    packed = linear_cross_entropy(hidden, weight, target, budget=8 * 30 * 4)
    assert sum(seen[::3]) == (14 if device.type == "cpu" else 16)
    gradients = torch.autograd.grad(packed, (hidden, weight))
    seen.clear()
    whole = linear_cross_entropy(hidden, weight, target, pack=False)
    assert seen[0] == 40
    torch.testing.assert_close(packed, whole)
    for got, expected in zip(gradients, torch.autograd.grad(whole, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, expected)


def test_main_grad_is_refused_where_the_call_is_traced(device: torch.device) -> None:
    given, main_grad = head(device), torch.zeros(30, 20, device=device)
    target = torch.arange(9, device=device)

    def call() -> Tensor:
        return linear_cross_entropy(**given, target=target, main_grad=main_grad)

    with pytest.raises(Exception, match="main_grad must be given in an eager call, got one that is traced"):
        torch.compile(call, fullgraph=True, backend="eager")()
