# SPDX-License-Identifier: Apache-2.0
"""The work of one rank: one run per job, and the losses, times and memory of each."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from liger_bench.distributed.job import LIGER, REORDERED, WARM_UP, Job
from liger_bench.process import DONE, Answer, failure
from liger_bench.ranks import joined


@dataclass(frozen=True)
class Share:
    """The jobs of one strategy as one rank sees them; the ranks find each other through a file."""

    jobs: tuple[Job, ...]
    rank: int
    meeting_point: str


def answer(share: Share, connection: Connection) -> Answer:
    """Send the figures of each job when it is done. The last answer is empty unless something failed."""
    try:
        first = share.jobs[0]
        with joined(first.device, share.rank, first.ranks, share.meeting_point) as device:
            for job in share.jobs:
                connection.send((DONE, _figures(job, share.rank, device)))
        return DONE, {}
    except Exception as error:
        return failure(error)


def _figures(job: Job, rank: int, device: torch.device) -> dict[str, Any]:
    # Here, so that the process which only waits need not load it.
    from liger_bench.demo.model import parameters, random_model
    from liger_bench.distributed.strategies import STRATEGIES
    from liger_bench.machine import DTYPES
    from liger_bench.model.implementations import IMPLEMENTATIONS

    gc.collect()
    left = _allocated(device)
    strategy, reordered = STRATEGIES[job.strategy], job.implementation == REORDERED
    dtype = torch.float32 if strategy.keeps_float32 else DTYPES[job.dtype]
    attention = "eager" if reordered else "sdpa"
    model = random_model(job.model, device, dtype, job.sequence, checkpointing=True, attention=attention)
    count = parameters(model)
    backend = IMPLEMENTATIONS[LIGER if job.implementation == LIGER else "hf"].patch(model)
    shape = (job.batch, job.sequence)
    # The same sequences at every step, others on each rank, so that the loss falls.
    tokens = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(rank)).to(device)
    if reordered:
        # The same sums in another order: the sequences of the batch, and attention written out.
        tokens = tokens.flip(0)
    losses, seconds = [], []
    with strategy.trained(model, job) as step:
        for index in range(job.steps):
            if index == WARM_UP and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            _wait(device)
            start = time.perf_counter()
            loss = step(tokens)
            _wait(device)
            seconds.append(time.perf_counter() - start)
            losses.append(loss)
    peak = torch.cuda.max_memory_allocated(device) - left if device.type == "cuda" else None
    del model, step
    _release(device)
    return {
        "losses": [float(loss) for loss in losses],
        "seconds": seconds,
        "peak_bytes": peak,
        "backend": backend,
        "parameters": count,
    }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
