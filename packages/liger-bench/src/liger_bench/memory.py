# SPDX-License-Identifier: Apache-2.0
"""Peak memory, measured at the allocator, which also sees temporaries inside custom ops."""

import gc
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from liger_core.errors import OptionError

MOST_BYTES = 1 << 60


def peak_bytes(function: Callable[[], object], device: torch.device, *, collect: bool = True) -> int:
    """Return the most memory that function() holds at any time, beyond what was held when it began.

    On a GPU this is the caching allocator's own record. On the CPU it is the running sum of the allocations and
    releases that the profiler records: unlike a dispatch mode, it sees allocations inside a custom op and does not
    change the path of a call. It does not record releases of older memory, so function should not release any. Memory
    that a library allocates past PyTorch is not counted on either device.

    collect  whether to collect garbage first, which takes a tenth of a second
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


def bytes_of(option: str, size: str, error: type[OptionError] = OptionError) -> int:
    """The bytes of a size such as "24GiB", "512 MB" or "1e9 B".

    Raises the error for anything else, and for a number without a unit, which could mean bytes or GiB.
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]{1,2})?)\s*(?:([kmgt])(i?)b?|b)\s*", size, re.IGNORECASE)
    if match is None:
        unit = f", which needs a unit: {size.strip()}GiB?" if size.strip().replace(".", "", 1).isdecimal() else ""
        raise error(f"{option} must be a size like 24GiB or 512MB, got {size!r}{unit}")
    count = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index((match[2] or " ").lower()))
    if not 0 < count < MOST_BYTES:
        raise error(f"{option} must be a size like 24GiB or 512MB, more than nothing and less than 1 EiB, got {size!r}")
    return count


def held_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the storages behind these values; a storage that several of them share counts once."""
    return sum({storage.data_ptr(): storage.nbytes() for value in values for storage in storages(value)}.values())


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor, or of all tensors in a dictionary, list, tensor subclass or object."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            # A DTensor also names its mesh, which refers to itself.
            parts = (getattr(value, name) for name in value.__tensor_flatten__()[0])
            yield from storages([inner for inner in parts if isinstance(inner, Tensor)])
        else:
            yield value.untyped_storage()
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from storages(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        # Such as the projectors in GaLore's optimizer state.
        yield from storages(vars(value))


class CpuAllocations:
    """A context in which PyTorch's profiler records the CPU allocator; only one profiler may run at a time."""

    def __enter__(self) -> Self:
        # Otherwise the profiler prints its own start and end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        earlier = [torch.empty(1)]
        with warnings.catch_warnings():
            # PyTorch 2.11 warns that the next recording clears this one.
            warnings.filterwarnings("ignore", ".*Profiler clears events")
            self._profile.__enter__()
        _release_unheard(earlier)
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(None, None, None)

    def events(self) -> list[tuple[float, int, int]]:
        """Return (microseconds, address, bytes) in order of time; the bytes of a release are negative."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        # The times in a trace are relative to its base.
        base = trace["baseTimeNanoseconds"] / 1e3
        events = [
            (e["ts"], e["args"])
            for e in trace["traceEvents"]
            if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0
        ]
        return sorted(((base + ts, int(args["Addr"]), int(args["Bytes"])) for ts, args in events), key=itemgetter(0))


def _release_unheard(earlier: list[Tensor]) -> None:
    """Release tensors while nothing reaches standard error: the profiler warns that it did not see their allocation.

    It warns of one such release in a thousand, beginning with the first. Every training step has some.
    """
    error, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    earlier.clear()
    os.dup2(error, 2)
    os.close(error)
    os.close(nothing)


def peak_of(events: Iterable[tuple[float, int, int]]) -> int:
    """Return the peak of the memory that the events allocate."""
    live: dict[int, int] = {}
    total = peak = 0
    for _, address, size in events:
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
            peak = max(peak, total)
    return peak
