# SPDX-License-Identifier: Apache-2.0
"""How long a call takes: the median over repetitions, and the spread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# More than the L2 cache of any GPU so far; writing it evicts what the call before left there.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, 0.2 and 0.8 quantile; on a GPU also what the host takes to enqueue the call."""

    median_ms: float
    low_ms: float
    high_ms: float
    enqueue_ms: float | None
    repetitions: int


def time_call(function: Callable[[], object], device: torch.device, seconds: float) -> Timing:
    """Repeat function for about `seconds`, at least 5 times, after a warm-up."""
    if device.type == "cpu":
        return _on_host(function, seconds)
    return _on_gpu(function, device, seconds)


def _on_host(function: Callable[[], object], seconds: float) -> Timing:
    function()
    repetitions = _repetitions(seconds, _host_seconds(function), 5, 200)
    return _timing([_host_seconds(function) for _ in range(repetitions)], None)


def _on_gpu(function: Callable[[], object], device: torch.device, seconds: float) -> Timing:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(3):
        function()
    torch.cuda.synchronize(device)

    def one() -> None:
        flush.zero_()
        function()
        torch.cuda.synchronize(device)

    repetitions = _repetitions(seconds, _host_seconds(one), 10, 200)
    # The device is not waited for between repetitions, so that the host runs ahead of it behind the flush.
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    enqueue: list[float] = []
    for _ in range(min(repetitions, 50)):
        torch.cuda.synchronize(device)
        enqueue.append(_host_seconds(function))
    torch.cuda.synchronize(device)
    return _timing([start.elapsed_time(end) / 1e3 for start, end in pairs], _quantile(enqueue, 0.5) * 1e3)


def _host_seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _repetitions(seconds: float, each: float, least: int, most: int) -> int:
    return max(least, min(most, int(seconds / max(each, 1e-9))))


def _timing(taken: list[float], enqueue_ms: float | None) -> Timing:
    low, median, high = (_quantile(taken, q) * 1e3 for q in (0.2, 0.5, 0.8))
    return Timing(median, low, high, enqueue_ms, len(taken))


def _quantile(values: list[float], q: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))
