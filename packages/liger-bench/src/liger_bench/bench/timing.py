# SPDX-License-Identifier: Apache-2.0
"""The duration of a call: the median over repetitions and the spread."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Larger than the L2 cache of any GPU so far; writing it evicts the data of the previous call.
FLUSH_BYTES = 256 << 20
# Repetitions between two waits for the device. If the queue of launches filled up, the timed host would wait.
AHEAD = 10
# Flushes after such a wait, at least half a millisecond: the host gets ahead of the device, as in a training step.
LEAD = 8
# Host work around a call: two events and the flush, with a margin for slow calls.
AROUND_SECONDS = 5e-5
# A host that takes tens of microseconds per kernel stays ahead of a longer call by itself.
LONG_SECONDS = 5e-3
# The device's queue holds about a thousand launches, and the calls themselves must fit behind the lead.
MOST_LEAD = 256

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The median and the 0.2 and 0.8 quantiles in milliseconds; on a GPU also the host time to enqueue the call."""

    median_ms: float
    low_ms: float
    high_ms: float
    enqueue_ms: float | None
    repetitions: int


class Samples:
    """The seconds that each call took on the device, and that the host took to enqueue it."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.enqueued: list[float] = []

    def timing(self) -> Timing:
        low, median, high = (quantile(self.taken, q) * 1e3 for q in (0.2, 0.5, 0.8))
        return Timing(median, low, high, quantile(self.enqueued, 0.5) * 1e3 if self.enqueued else None, len(self.taken))


class Stopwatch:
    """A stopwatch that samples calls on one device; `before` runs before every call and is not timed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: Tensor | None = None
        if device.type != "cpu":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
            self._flush_seconds = self._device_seconds(self._flush.zero_, 10)

    def seconds(self, call: Call, before: Call | None = None) -> float:
        """Return the seconds that one repetition takes, including its overhead, to plan how many repetitions fit."""
        start = time.perf_counter()
        self.sample(Samples(), call, 1, before)
        return time.perf_counter() - start

    def sample(self, into: Samples, call: Call, repetitions: int, before: Call | None = None) -> None:
        if self._flush is None:
            for _ in range(repetitions):
                if before is not None:
                    before()
                into.taken.append(_host_seconds(call))
            return
        for done in range(0, repetitions, AHEAD):
            self._sample_together(into, call, min(AHEAD, repetitions - done), before)

    def _sample_together(self, into: Samples, call: Call, repetitions: int, before: Call | None) -> None:
        """Sample calls without waiting for the device between them."""
        assert self._flush is not None
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)
        ]
        enqueued: list[float] = []
        torch.cuda.synchronize(self.device)
        for _ in range(flushes_ahead(into.enqueued[-AHEAD:], into.taken[-AHEAD:], self._flush_seconds)):
            self._flush.zero_()
        for start, end in pairs:
            if before is not None:
                before()
            # The host enqueues the call while the device writes this; otherwise a short call would include a wait.
            self._flush.zero_()
            start.record()
            enqueued.append(_host_seconds(call))
            end.record()
        torch.cuda.synchronize(self.device)
        into.enqueued += enqueued
        into.taken += [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _device_seconds(self, call: Call, times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        start.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3 / times


def flushes_ahead(enqueued: list[float], taken: list[float], flush: float) -> int:
    """Return the number of flushes that keep the host ahead of the device during the next calls.

    `enqueued` and `taken` are the seconds of the last calls on the host and on the device, `flush` those of one flush.
    The number is as small as possible: after a long stretch of memory writes, compute-bound calls run at higher clocks
    than in a training run (by up to 9 % for matmuls of 20 ms on one H200, although the host never fell behind).
    """
    # The shortest, because a call that started late on the device is timed with its wait for the host.
    device = min(taken, default=0.0)
    if not enqueued or device > LONG_SECONDS:
        return LEAD
    behind = AHEAD * (quantile(enqueued, 0.8) + AROUND_SECONDS - device - flush)
    return max(LEAD, min(MOST_LEAD, math.ceil(behind / flush)))


def time_call(function: Call, device: torch.device, seconds: float, least: int = 5, warm: float = 0.0) -> Timing:
    """Time a function for about `seconds` and at least `least` repetitions.

    The warm-up is two calls, and on a GPU also `warm` seconds.
    """
    watch, samples = Stopwatch(device), Samples()
    started = time.perf_counter()
    for _ in range(1 if device.type == "cpu" else 2):
        function()
    while device.type != "cpu" and time.perf_counter() - started < warm:
        function()
        torch.cuda.synchronize(device)
    watch.sample(samples, function, repetitions(seconds, watch.seconds(function) if seconds else 1.0, least, 200))
    return samples.timing()


def repetitions(seconds: float, each: float, least: int, most: int) -> int:
    """Return how many repetitions of `each` seconds fit into `seconds`, at least `least` and at most `most`."""
    return max(least, min(most, int(seconds / max(each, 1e-9))))


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile of the values, interpolated linearly."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))


def _host_seconds(function: Call) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
