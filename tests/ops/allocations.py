# SPDX-License-Identifier: Apache-2.0
"""The sizes of what a call allocates, seen by PyTorch's own allocators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Allocations:
    """Largest single allocation, and most bytes held at once on top of what was there before."""

    largest: int
    peak: int


def allocations(call: Callable[[], Any], device: torch.device) -> Allocations:
    """Run the call under the profiler and read its memory events."""
    if device.type == "cuda":
        # A cached block up to 1 MiB larger than what is asked for is given whole, and would count as such.
        torch.cuda.empty_cache()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    kind = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    held = peak = largest = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() != "[memory]" or event.device_type() != kind:
            continue
        size = event.nbytes()
        held += size
        peak, largest = max(peak, held), max(largest, size)
    return Allocations(largest, peak)
