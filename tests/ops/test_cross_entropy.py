# SPDX-License-Identifier: Apache-2.0
"""Facts about cross_entropy that its samples do not say."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import cross_entropy, explain
from liger_core.plugins import registry
from ops.agreement import disagreements, leaf
from ops.allocations import allocations

REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def some_targets(classes: int, *shape: int, device: torch.device, ignored: int = -100) -> Tensor:
    target = torch.randint(classes, shape, device=device)
    target.view(-1)[::4] = ignored
    return target


@REDUCTIONS
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1], ids=["hard", "smoothed"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_cross_entropy_equals_the_function_of_pytorch(
    reduction: Any, label_smoothing: float, weighted: bool, ignore_index: int, device: torch.device
) -> None:
    target = some_targets(30, 9, device=device, ignored=ignore_index)
    weight = torch.rand(30, device=device) + 0.5 if weighted else None
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}

    def formula(logits: Tensor, weight: Tensor | None) -> Tensor:
        return F.cross_entropy(logits, target, weight, **options)

    call = partial(cross_entropy, target=target, **options)
    assert disagreements(call, formula, logits=leaf(9, 30, device=device), weight=weight) == []


def test_an_infinite_logit_gives_what_pytorch_gives(device: torch.device) -> None:
    logits = torch.randn(4, 30, device=device)
    logits[0, 3], logits[1, 5], logits[2, :], logits[3, 9] = torch.inf, -torch.inf, -torch.inf, torch.inf
    target = torch.tensor([3, 5, 1, 2], device=device)
    ours, theirs = (function(logits, target, reduction="none") for function in (cross_entropy, F.cross_entropy))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_logits_may_be_the_lowest_numbers_there_are(device: torch.device) -> None:
    """The value that some models give masked logits, here in a whole row."""
    logits = torch.full((2, 40), torch.finfo(torch.float32).min, device=device)
    logits[0, 7] = 1.0
    loss = cross_entropy(logits, torch.tensor([7, 7], device=device), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 40.0], device=device).clamp(min=1).log())


def test_the_first_of_equal_logits_is_predicted(device: torch.device) -> None:
    logits = torch.zeros(2, 300, device=device)
    logits[1, [7, 260]] = 1.0
    _, metrics = cross_entropy(logits, torch.zeros(2, dtype=torch.int64, device=device), return_metrics=True)
    assert metrics.prediction.tolist() == [0, 7]


def test_an_ignored_row_is_not_looked_at(device: torch.device) -> None:
    logits = torch.randn(5, 30, device=device)
    logits[2:] = torch.tensor([[torch.nan], [torch.inf], [-torch.inf]])
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([4, 2, -100, -100, -100], device=device))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[2:].any()


def test_losses_of_low_precision_logits_are_float32(device: torch.device) -> None:
    logits, target = torch.randn(4, 30, device=device).bfloat16(), torch.randint(30, (4,), device=device)
    assert cross_entropy(logits, target).dtype == torch.float32
    assert cross_entropy(logits, target, reduction="none").dtype == torch.float32


@pytest.mark.parametrize("wrong", [-1, 30, 2**40])
def test_an_implementation_gives_nan_for_a_target_out_of_range(wrong: int, device: torch.device) -> None:
    """Behind the check of the CPU, which other devices cannot afford, an implementation must not hide the mistake."""
    logits, target = leaf(3, 30, device=device), torch.tensor([4, wrong, 2], device=device)
    name = explain(cross_entropy, logits, torch.zeros_like(target)).backend
    rows = registry().implementations[name]["cross_entropy"](logits, target, reduction="none")
    (grad,) = torch.autograd.grad(rows, logits, torch.ones_like(rows))
    assert rows.isnan().tolist() == [False, True, False]
    assert grad.isnan().all(-1).tolist() == [False, True, False]
    assert torch.isfinite(grad[[0, 2]]).all()


def test_low_precision_logits_are_not_copied_to_float32_at_once(measured_device: torch.device) -> None:
    logits = torch.randn(512, 16384, device=measured_device).bfloat16().requires_grad_()
    target = torch.randint(16384, (512,), device=measured_device)
    used = allocations(lambda: torch.autograd.grad(cross_entropy(logits, target), logits), measured_device)
    # The gradient in bfloat16 is needed, a second tensor of the size of float32 logits is not.
    assert logits.numel() * 2 <= used.largest < logits.numel() * 4
