# SPDX-License-Identifier: Apache-2.0
"""What the judge of random calls leaves out, and what it does not."""

import pytest
import torch

from fuzz.judging import _has_near_ties, _verdict
from fuzz.rounding import Reach
from liger_core import linear_cross_entropy


def head(hidden: list[float], weight: list[list[float]], **options: float | None) -> dict[str, object]:
    defaults = {"bias": None, "logit_scale": 1.0, "softcap": None}
    return {"hidden": torch.tensor([hidden]), "weight": torch.tensor(weight), **defaults, **options}


@pytest.mark.parametrize("cap", [None, 30.0], ids=["without", "with"])
def test_round_off_decides_between_large_logits_that_tie_and_saturates_a_softcap(cap: float | None) -> None:
    assert _has_near_ties(linear_cross_entropy, head([1e18, 1e18], [[0.1, 0.2], [0.2, 0.1], [0.1, -0.1]], softcap=cap))


@pytest.mark.parametrize(
    "arguments",
    [
        head([1.0, 1.0], [[0.1, 0.2], [0.2, 0.1]]),
        head([1e18, 1e18], [[0.1, 0.2], [0.2, 0.5]]),
        head([1.0, 1.0], [[0.1, -0.1], [0.2, 0.1]], softcap=30.0),
    ],
    ids=["moderate ties", "far apart", "a softcap of moderate logits"],
)
def test_round_off_decides_nothing_else(arguments: dict[str, object]) -> None:
    assert not _has_near_ties(linear_cross_entropy, arguments)


def test_sums_whose_terms_cancel_near_overflow_are_noted() -> None:
    far, near = torch.tensor([1.0, -1.0], dtype=torch.float16), torch.tensor([4e4, -4e4], dtype=torch.float16)
    with Reach() as reach:
        far.sum()
    assert not reach.near_overflow
    with Reach() as reach:
        near.sum()
    assert reach.near_overflow


def test_numbers_that_float32_holds_with_few_digits_are_not_judged_and_larger_ones_are() -> None:
    wrong, exact = torch.tensor([1.1e-41, 2e-41]), torch.tensor([1e-41, 2e-41], dtype=torch.float64)
    assert _verdict(wrong, exact.float(), exact, torch.float32, near_overflow=False) is None
    for scale in (1e6, 1e41):
        assert (
            _verdict(scale * wrong, (scale * exact).float(), scale * exact, torch.float32, near_overflow=False)
            is not None
        )
