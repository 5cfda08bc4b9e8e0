# SPDX-License-Identifier: Apache-2.0
"""Timing and limits against calls whose duration is known."""

from __future__ import annotations

import time

import pytest
import torch

from liger_bench.bench.limits import Limits
from liger_bench.bench.timing import time_call
from liger_core import Work

CPU = torch.device("cpu")


def test_median_of_a_wait_is_the_wait() -> None:
    timing = time_call(lambda: time.sleep(0.01), CPU, 0.1)
    assert 10 <= timing.median_ms < 60


def test_quantiles_enclose_the_median() -> None:
    timing = time_call(lambda: torch.ones(1000).sum(), CPU, 0.02)
    assert timing.low_ms <= timing.median_ms <= timing.high_ms


def test_a_slow_call_is_still_repeated_five_times() -> None:
    assert time_call(lambda: time.sleep(0.01), CPU, 0.0).repetitions == 5


@pytest.mark.parametrize(("size", "operations", "seconds"), [(200, 10, 2.0), (100, 30, 3.0)], ids=["memory_bound", "compute_bound"])
def test_least_time_is_that_of_the_tighter_limit(size: int, operations: int, seconds: float) -> None:
    least = Limits(bandwidth=100.0, rate=10.0).least_seconds(Work(size, 2 * size, operations, 2 * operations))
    assert least == {"forward": seconds, "full": 2 * seconds}
