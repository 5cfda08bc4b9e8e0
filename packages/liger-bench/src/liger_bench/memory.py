# SPDX-License-Identifier: Apache-2.0
"""Peak memory, measured at the allocator, so that temporaries inside custom ops count, too."""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from liger_core.errors import OptionError

MOST_BYTES = 1 << 60


def peak_bytes(function: Callable[[], object], device: torch.device, *, collect: bool = True) -> int:
    """The most memory that function() holds at any time, beyond what was held when it began.

    On a GPU this is the caching allocator's own record. On the CPU it is the running sum of the allocations and
    releases that the profiler records at the allocator: unlike a dispatch mode, it sees allocations inside a custom op,
    and it does not change the path that a call takes. A release of memory that was held before is not recorded there,
    so function should not release any. Scratch memory that a library takes from the system by itself is not seen on
    either. Without collect, garbage in cycles is not looked for before, which takes a tenth of a second.
    """
    if collect:
        gc.collect()
    if device.type == "cpu":
        with CpuAllocations() as recording:
            function()
        return peak_of(recording.events())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def bytes_of(option: str, size: str) -> int:
    """The bytes of a size such as "24GiB", "512 MB" or "1e9 B".

    Raises OptionError for anything else, and for a number without a unit, which could mean bytes or GiB.
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]{1,2})?)\s*(?:([kmgt])(i?)b?|b)\s*", size, re.IGNORECASE)
    if match is None:
        unit = f", which needs a unit: {size.strip()}GiB?" if size.strip().replace(".", "", 1).isdecimal() else ""
        raise OptionError(f"{option} must be a size like 24GiB or 512MB, got {size!r}{unit}")
    count = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index((match[2] or " ").lower()))
    if not 0 < count < MOST_BYTES:
        raise OptionError(
            f"{option} must be a size like 24GiB or 512MB, more than nothing and less than 1 EiB, got {size!r}"
        )
    return count


def held_bytes(values: Iterable[Any]) -> int:
    """The memory behind tensors, and behind those in dictionaries, lists, wrappers and objects; what several of them
    share counts once."""
    return sum({storage.data_ptr(): storage.nbytes() for value in values for storage in storages(value)}.values())


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor, or behind all tensors in a dictionary, list, wrapper or object."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            # A DTensor names its mesh, too, which refers to itself.
            parts = (getattr(value, name) for name in value.__tensor_flatten__()[0])
            yield from storages([inner for inner in parts if isinstance(inner, Tensor)])
        else:
            yield value.untyped_storage()
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from storages(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        # As the projectors in the state of GaLore.
        yield from storages(vars(value))


class CpuAllocations:
    """A context in which PyTorch's profiler, of which one may run at a time, records the allocations and releases of
    the CPU allocator."""

    def __enter__(self) -> Self:
        # Without this the profiler writes about its own start and end to the terminal.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(None, None, None)

    def events(self) -> list[tuple[float, int, int]]:
        """(microseconds, address, bytes) in order of time; bytes are negative where the address is released."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        # A trace counts its microseconds from a base of its own.
        base = trace["baseTimeNanoseconds"] / 1e3
        events = [
            (e["ts"], e["args"])
            for e in trace["traceEvents"]
            if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0
        ]
        return sorted(((base + ts, int(args["Addr"]), int(args["Bytes"])) for ts, args in events), key=_time)


def peak_of(events: Iterable[tuple[float, int, int]]) -> int:
    """The peak of the memory that was allocated meanwhile."""
    live: dict[int, int] = {}
    total = peak = 0
    for _, address, size in events:
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
            peak = max(peak, total)
    return peak


def _time(event: tuple[float, int, int]) -> float:
    return event[0]
