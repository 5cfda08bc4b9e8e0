# SPDX-License-Identifier: Apache-2.0
"""The ranks of one measurement: each joins a process group, and the parent process collects their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from liger_bench.process import FAILED, Answer, Process

# A rank that waits for a failed one gives up sooner than by torch's default of half an hour.
TIMEOUT = timedelta(minutes=10)


@contextmanager
def join(device_type: str, rank: int, ranks: int, meeting_point: str) -> Iterator[torch.device]:
    """Join the process group within this context, by a shared file, and return the device of the rank."""
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{meeting_point}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    yield device
    dist.destroy_process_group()


def answers_of(ranks: Sequence[Process], patience: float) -> list[Answer]:
    """Return the next answer of every rank, or only the first failure, for which the other ranks wait forever."""
    open_ones: dict[Any, Process] = {process.connection: process for process in ranks}
    answers: dict[Process, Answer] = {}
    while open_ones:
        ready = wait(list(open_ones), timeout=patience)
        if not ready:
            reason = f"{len(open_ones)} of {len(ranks)} ranks gave no answer in {patience:.0f} s"
            return [(FAILED, {"reason": reason, "failed": True})]
        for connection in ready:
            process = open_ones.pop(connection)
            answers[process] = process.wait()
            if answers[process][0] == FAILED:
                return [answers[process]]
    return [answers[process] for process in ranks]
