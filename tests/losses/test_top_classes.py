# SPDX-License-Identifier: Apache-2.0
"""Facts about top_classes: the classes of torch.topk on all the logits, without holding them."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import OptionError, ShapeError, linear_log_prob
from liger_core.losses import top_classes
from ops.agreement import leaf
from ops.allocations import allocations

ONE_BLOCK, SEVERAL = {}, {"budget": 12 * 11 * 4}


def head(
    device: torch.device, rows: tuple[int, ...] = (3, 4), classes: int = 50, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    return leaf(*rows, 16, device=device, dtype=dtype), leaf(classes, 16, device=device, dtype=dtype)


@pytest.mark.parametrize("options", [ONE_BLOCK, SEVERAL], ids=["one_block", "several_blocks"])
@pytest.mark.parametrize("k", [1, 5, 50])
def test_they_are_those_of_all_the_logits(k: int, options: dict[str, Any], device: torch.device) -> None:
    hidden, weight = head(device)
    found = top_classes(hidden, weight, k, **options)
    assert torch.equal(found, (hidden @ weight.t()).topk(k, dim=-1).indices)
    assert not found.requires_grad


def test_rows_come_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["liger_core.losses.top_classes"], "ROWS", 5)
    hidden, weight = head(device)
    assert torch.equal(top_classes(hidden, weight, 3), (hidden @ weight.t()).topk(3, dim=-1).indices)


@pytest.mark.parametrize("scale", [2.0, -0.5])
def test_bias_and_sign_of_the_scale_change_the_order(scale: float, device: torch.device) -> None:
    hidden, weight = head(device)
    bias = 3.0 * torch.randn(50, device=device)
    found = top_classes(hidden, weight, 4, bias=bias, logit_scale=scale, **SEVERAL)
    assert torch.equal(found, (scale * (hidden @ weight.t() + bias)).topk(4, dim=-1).indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_finds_classes_of_the_largest_logits(dtype: torch.dtype, device: torch.device) -> None:
    hidden, weight = head(device, dtype=dtype)
    logits = (hidden @ weight.t()).float()
    found = top_classes(hidden, weight, 4, **SEVERAL)
    torch.testing.assert_close(logits.gather(-1, found), logits.topk(4, dim=-1).values, rtol=1e-2, atol=1e-2)


def test_ignored_rows_have_no_classes_and_no_log_probabilities(device: torch.device) -> None:
    hidden, weight = head(device)
    target = torch.randint(50, (3, 4), device=device)
    target[0, 1:], target[2] = -100, -100
    found = top_classes(hidden, weight, 3, target=target)
    assert bool((found[target == -100] == -100).all())
    assert torch.equal(found[target != -100], (hidden @ weight.t()).topk(3, dim=-1).indices[target != -100])
    assert not linear_log_prob(hidden, weight, found)[target == -100].any()


@pytest.mark.parametrize("rows", [(0,), (), (2, 0)], ids=str)
def test_any_leading_shape(rows: tuple[int, ...], device: torch.device) -> None:
    assert top_classes(*head(device, rows), 3).shape == (*rows, 3)


def test_nothing_of_all_the_logits_is_held(device: torch.device) -> None:
    rows, classes = 1024, 8192
    hidden, weight = head(device, (rows,), classes)
    found = allocations(lambda: top_classes(hidden, weight, 8, budget=1 << 20), device)
    assert found.peak < rows * classes * 4 / 8


def test_it_compiles_as_one_graph(device: torch.device) -> None:
    hidden, weight = (tensor.detach() for tensor in head(device))
    compiled = torch.compile(lambda x: top_classes(x, weight, 3, **SEVERAL), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(hidden), top_classes(hidden, weight, 3))


@pytest.mark.parametrize("k", [0, 51, 2.0, True])
def test_a_k_that_there_is_not_is_an_error(k: Any, device: torch.device) -> None:
    with pytest.raises(OptionError, match=r"^losses\.top_classes: k must be between 1 and the 50 classes, got "):
        top_classes(*head(device), k)


def test_a_weight_of_another_width_is_an_error(device: torch.device) -> None:
    hidden, weight = head(device)
    with pytest.raises(ShapeError, match=r"^losses\.top_classes: weight must have shape \(classes, 16\)"):
        top_classes(hidden, weight[:, :7], 3)
