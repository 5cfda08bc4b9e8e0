# SPDX-License-Identifier: Apache-2.0
"""Facts about softmax that its samples do not say."""

from __future__ import annotations

import pytest
import torch

from liger_core import softmax


@pytest.mark.parametrize("width", [8, 33000])
def test_rows_without_a_finite_value_are_nan_and_leave_the_others_alone(width: int, device: torch.device) -> None:
    x = torch.zeros(3, width, device=device)
    x[1] = -torch.inf
    x[2, 5] = torch.nan
    y = softmax(x)
    assert y[1:].isnan().all()
    torch.testing.assert_close(y[0], torch.full((width,), 1 / width, device=device))


@pytest.mark.parametrize("width", [8, 33000])
def test_a_row_may_begin_with_impossible_values(width: int, device: torch.device) -> None:
    x = torch.full((2, width), -torch.inf, device=device)
    x[:, -1] = 3.0
    assert softmax(x)[:, -1].tolist() == [1.0, 1.0]
    assert softmax(x)[:, :-1].eq(0).all()


@pytest.mark.parametrize("width", [100, 33000])
def test_small_probabilities_keep_their_digits(width: int, device: torch.device) -> None:
    # e^-80 as 2^(-80 · log₂ e) is off by 2e-6 if that product is rounded to float32.
    x = torch.linspace(-80.0, 0.0, width, device=device)[None]
    torch.testing.assert_close(softmax(x).double(), torch.softmax(x.double(), -1), rtol=1e-6, atol=0.0)
