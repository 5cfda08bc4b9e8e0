# SPDX-License-Identifier: Apache-2.0
"""Timing and limits against calls whose duration is known."""

import time

import pytest
import torch

from liger_bench.bench.limits import Limits
from liger_bench.bench.timing import AHEAD, LEAD, flushes_ahead, time_call
from liger_core import Product, Work

CPU = torch.device("cpu")


def test_a_slow_call_is_repeated_five_times_and_its_quantiles_enclose_the_median() -> None:
    timing = time_call(lambda: time.sleep(0.01), CPU, 0.0)
    assert timing.repetitions == 5
    assert 10 <= timing.low_ms <= timing.median_ms <= timing.high_ms


@pytest.mark.parametrize(
    ("size", "operations", "seconds"), [(200, 10, 2.0), (100, 30, 3.0)], ids=["memory_bound", "compute_bound"]
)
def test_least_time_is_that_of_the_tighter_limit(size: int, operations: int, seconds: float) -> None:
    least = Limits(100.0, 10.0, pytest.fail, pytest.fail).least_seconds(
        Work(size, 2 * size, operations, 2 * operations)
    )
    assert least == {"forward": seconds, "evaluation": seconds, "full": 2 * seconds}


def with_products(measured: list[Product]) -> tuple[Limits, Work]:
    """Limits that count each measured matmul as one second, and work of three matmuls."""
    limits = Limits(100.0, 10.0, lambda product: float(len(measured.append(product) or [1])), pytest.fail)
    forward = Product(2, 3, 4, "right")
    products = (forward, Product(2, 4, 3, "", "hidden"), Product(4, 2, 3, "left", "weight"))
    return limits, Work(10, 20, forward_products=(forward,), full_products=products)


def test_products_count_with_the_time_that_they_take_alone() -> None:
    measured: list[Product] = []
    limits, work = with_products(measured)
    assert limits.least_seconds(work, ("hidden", "weight")) == {"forward": 1.0, "evaluation": 1.0, "full": 3.0}
    assert measured == list(work.full_products)


def test_a_product_for_a_frozen_argument_does_not_count() -> None:
    limits, work = with_products([])
    assert limits.least_seconds(work, ("hidden",))["full"] == 2.0


def test_calls_that_were_timed_waiting_for_the_host_do_not_hide_that_it_was_behind() -> None:
    host, device, flush = 440e-6, 105e-6, 60e-6
    taken: list[float] = []
    for _ in range(3):
        free = flush * flushes_ahead([host] * len(taken), taken, flush)
        taken = []
        for number in range(AHEAD):
            start = max(free, number * host) + flush
            free = max(start, (number + 1) * host) + device
            taken.append(free - start)
    assert taken == pytest.approx([device] * AHEAD)


@pytest.mark.parametrize(
    ("host", "device"), [(50e-6, 90e-6), (20e-3, 19e-3)], ids=["a_host_that_is_ahead", "waiting_for_a_long_call"]
)
def test_no_call_finds_a_device_that_rested_longer_than_it_must(host: float, device: float) -> None:
    assert flushes_ahead([host] * AHEAD, [device] * AHEAD, 60e-6) == LEAD
