# SPDX-License-Identifier: Apache-2.0
"""Peak memory, measured at the allocator, so that temporaries inside custom ops count too."""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from liger_core.errors import OptionError

MOST_BYTES = 1 << 60


def peak_bytes(function: Callable[[], object], device: torch.device, *, collect: bool = True) -> int:
    """The most memory that function() holds at any time, beyond what was held when it began.

    On a GPU this is the caching allocator's own record. On the CPU it is the running sum of the allocations and releases that
    the profiler records at the allocator: unlike a dispatch mode, it sees what a custom op allocates inside, and it does not
    change the path that a call takes. A release of memory that was held before is not recorded there, so function should not
    release any. Scratch memory that a library takes from the system by itself is not seen on either. Without collect, garbage in
    cycles is not looked for before, which takes a tenth of a second.
    """
    if collect:
        gc.collect()
    if device.type == "cpu":
        return _peak_of_events(_allocations(function))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def bytes_of(option: str, size: str) -> int:
    """The bytes that a size like "24GiB", "512 MB" or "1e9 B" says.

    Raises OptionError for anything else, and for a number without a unit, which could mean bytes or GiB.
    """
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]{1,2})?)\s*(?:([kmgt])(i?)b?|b)\s*", size, re.IGNORECASE)
    if found is None:
        unit = f", which needs a unit: {size.strip()}GiB?" if size.strip().replace(".", "", 1).isdecimal() else ""
        raise OptionError(f"{option} must be a size like 24GiB or 512MB, got {size!r}{unit}")
    count = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index((found[2] or " ").lower()))
    if not 0 < count < MOST_BYTES:
        raise OptionError(f"{option} must be a size like 24GiB or 512MB, more than nothing and less than 1 EiB, got {size!r}")
    return count


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory behind tensors; one that several of them share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _allocations(function: Callable[[], object]) -> list[tuple[int, int]]:
    """(address, bytes) in order of time; bytes are negative where the address is released."""
    # Without this the profiler writes about its own start and end to the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            function()
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    found = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    return [(int(args["Addr"]), int(args["Bytes"])) for _, args in sorted(found, key=_time)]


def _time(event: tuple[float, dict[str, Any]]) -> float:
    return event[0]


def _peak_of_events(events: list[tuple[int, int]]) -> int:
    live: dict[int, int] = {}
    total = peak = 0
    for address, size in events:
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
            peak = max(peak, total)
    return peak
