# SPDX-License-Identifier: Apache-2.0
"""Facts about relu_squared that its samples do not say."""

from __future__ import annotations

import torch

from liger_core import explain, relu_squared
from ops.agreement import leaf, saved


def test_a_nan_stays_one_and_infinities_are_those_of_relu(device: torch.device) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device=device)
    y = relu_squared(x)
    assert y[0].isnan()
    assert y[1:].tolist() == [float("inf"), 0.0, 0.0]


def test_no_gradient_reaches_what_is_not_positive_even_from_an_infinite_one(device: torch.device) -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], device=device, requires_grad=True)
    relu_squared(x).backward(torch.tensor([float("inf"), float("inf"), 3.0], device=device))
    assert x.grad.tolist() == [0.0, 0.0, 12.0]


def test_nothing_but_the_input_is_kept(device: torch.device) -> None:
    x = leaf(64, 1024, device=device)
    fresh = {t.data_ptr() for t in saved(lambda: relu_squared(x), x)}
    # The reference keeps relu(x), and so may a backend of another package.
    assert len(fresh) <= (0 if explain(relu_squared, x).backend in ("triton", "inductor") else 1)


def test_the_gradient_does_not_overflow_before_the_upstream_gradient_is_met(device: torch.device) -> None:
    x = torch.tensor([60000.0], dtype=torch.float16, device=device, requires_grad=True)
    relu_squared(x).backward(torch.tensor([0.25], dtype=torch.float16, device=device))
    assert x.grad.tolist() == [30000.0]


def test_a_small_up_brings_a_square_back_that_is_too_large_for_the_dtype(device: torch.device) -> None:
    x, up = (torch.tensor([value], dtype=torch.float16, device=device, requires_grad=True) for value in (300.0, 0.001))
    y = relu_squared(x, up)
    assert y.tolist() == [(90000 * up.double()).half().item()] == [90.0625]
    y.backward(torch.tensor([0.25], dtype=torch.float16, device=device))
    assert (x.grad.tolist(), up.grad.tolist()) == ([(150 * up.double()).half().item()], [22496.0])
