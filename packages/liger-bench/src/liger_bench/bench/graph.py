# SPDX-License-Identifier: Apache-2.0
"""A call as a CUDA graph, whose replay shows the device time without the host."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from liger_bench.bench.case import Repeatable
from liger_core.errors import Unsupported
from liger_core.private_torch import end_allocate_to_pool


def capture(make: Callable[[], Repeatable], device: torch.device, *, wary: bool) -> Callable[[], None]:
    """Return the replay of the call that make() builds; the call must support several runs per preparation.

    wary  whether to check first that the call does not wait for the device, because a failed capture leaves traces in
          PyTorch; the check is not valid for calls that behave differently under capture

    Raises Unsupported with the reason if the call cannot be captured.
    """
    if device.type != "cuda":
        raise Unsupported(f"there are no CUDA graphs on {device.type}")
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    before, aside = torch.cuda.current_stream(device), _stream(device)
    aside.wait_stream(before)
    with torch.cuda.stream(aside):
        # A backward pass runs on the stream of its forward pass.
        call, restore = make()
        call()
        if wary:
            restore()
            with _waiting_is_an_error():
                call()
        restore()
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.stream(aside), _no_garbage_collection():
            graph.capture_begin(pool)
            try:
                call()
            finally:
                graph.capture_end()
    except Exception as error:
        _clean_up(device, before, pool)
        raise Unsupported(f"the capture failed: {type(error).__name__}: {error}".splitlines()[0]) from error

    def replay(keep_alive: object = call) -> None:
        # What the call holds, such as the autograd graph of a forward pass, must live as long as the replay.
        graph.replay()

    return replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures; the allocator caches memory per stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection within this context, because finalizers may make calls that a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise Unsupported(f"it waits for the device, which a graph cannot: {error}".splitlines()[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _clean_up(device: torch.device, stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """Restore the stream, the allocator and the random state after a failed capture."""
    torch.cuda.set_stream(stream)
    with suppress(Exception):
        torch.cuda.synchronize(device)
    with suppress(Exception):
        end_allocate_to_pool(device.index or 0, pool)
    with suppress(Exception):
        fresh = torch.Generator(device)
        torch.cuda.default_generators[device.index or 0].graphsafe_set_state(fresh.graphsafe_get_state())
