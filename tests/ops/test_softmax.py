# SPDX-License-Identifier: Apache-2.0
"""Facts about softmax and sparsemax that their samples do not say."""

import pytest
import torch

from liger_core import softmax, sparsemax


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


def test_a_column_at_the_threshold_is_not_in_the_support(device: torch.device) -> None:
    x = torch.tensor([1.5, 0.5, -3.0], device=device, requires_grad=True)
    y = sparsemax(x)
    y.backward(torch.tensor([1.0, 5.0, 5.0], device=device))
    assert (y.tolist(), x.grad.tolist()) == ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0])


def test_rows_of_sparsemax_without_a_finite_value_are_nan(device: torch.device) -> None:
    assert sparsemax(torch.full((2, 5), -torch.inf, device=device)).isnan().all()


def test_values_of_the_support_may_be_neighbors(device: torch.device) -> None:
    x = torch.full((3, 64), -9.0, device=device)
    x[:, 8:16] = torch.linspace(0.0, 0.1, 8, device=device)
    torch.testing.assert_close(sparsemax(x), sparsemax.reference(x))
