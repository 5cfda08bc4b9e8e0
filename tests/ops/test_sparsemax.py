# SPDX-License-Identifier: Apache-2.0
"""Facts about sparsemax that its samples do not say."""

from __future__ import annotations

import torch

from liger_core import sparsemax


def test_a_column_at_the_threshold_is_not_in_the_support(device: torch.device) -> None:
    x = torch.tensor([1.5, 0.5, -3.0], device=device, requires_grad=True)
    y = sparsemax(x)
    y.backward(torch.tensor([1.0, 5.0, 5.0], device=device))
    assert (y.tolist(), x.grad.tolist()) == ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0])


def test_rows_without_a_finite_value_are_nan(device: torch.device) -> None:
    assert sparsemax(torch.full((2, 5), -torch.inf, device=device)).isnan().all()


def test_values_of_the_support_may_be_neighbors(device: torch.device) -> None:
    x = torch.full((3, 64), -9.0, device=device)
    x[:, 8:16] = torch.linspace(0.0, 0.1, 8, device=device)
    torch.testing.assert_close(sparsemax(x), sparsemax.reference(x))
