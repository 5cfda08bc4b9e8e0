# SPDX-License-Identifier: Apache-2.0
"""Measure heads on several ranks; all implementations of a head run interleaved in the same processes."""

import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_bench.machine import DTYPES
from liger_bench.memory import peak_bytes
from liger_bench.process import DONE, FAILED, Answer, Process, failure
from liger_bench.row import Measurement, row_from
from liger_bench.sharded.heads import LIGER, Loss, loss_of
from liger_bench.sharded.job import HeadJob, HeadRow, combine_ranks

# Calls before the measurement, which compile kernels and connect the ranks.
WARM_UP = 2
# A rank that waits for a failed one gives up sooner than by torch's default of half an hour.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class RankJobs:
    """Jobs on the same head, as one rank sees them; the ranks find each other by a file."""

    jobs: tuple[HeadJob, ...]
    rank: int
    repetitions: int
    meeting_point: str


def measure(
    jobs: Sequence[HeadJob],
    where: Mapping[str, str],
    repetitions: int,
    patience: float,
    phase: Callable[[HeadJob], object] = lambda job: None,
) -> Generator[Measurement[HeadRow], None, None]:
    """Yield the row of each job; jobs on one rank must come first, because efficiency is relative to them."""
    alone: dict[tuple[Any, ...], float] = {}
    with tempfile.TemporaryDirectory(prefix="liger-bench-") as folder:
        for (ranks, *head), same in groupby(
            jobs, key=lambda job: (job.ranks, job.op, job.rows, job.width, job.classes)
        ):
            these = tuple(same)
            phase(these[0])
            answers, written = _answers(these, repetitions, patience, Path(folder))
            failed = [results for state, results in answers if state == FAILED]
            for job in these:
                of_ranks = failed or [results[job.implementation] for _, results in answers]
                problem = next((rank for rank in of_ranks if "reason" in rank), None)
                if problem is not None:
                    yield Measurement(row_from(HeadRow, job, where, problem), written)
                    continue
                figures = combine_ranks(job, of_ranks, alone.get(tuple(head)))
                if ranks == 1 and job.implementation == LIGER:
                    alone[tuple(head)] = figures["seconds"]
                    figures["efficiency"] = 1.0
                yield Measurement(row_from(HeadRow, job, where, figures))


def _answers(jobs: tuple[HeadJob, ...], repetitions: int, patience: float, folder: Path) -> tuple[list[Answer], str]:
    name = uuid.uuid4().hex
    store = str(folder / f"{name}.store")
    ranks = [
        Process(RankJobs(jobs, rank, repetitions, store), folder / f"{name}-{rank}.log", patience, answer)
        for rank in range(jobs[0].ranks)
    ]
    try:
        answers = answers_of(ranks, patience)
        if all(state == DONE for state, _ in answers):
            for process in ranks:
                process.end()
        return answers, "\n".join(process.written() for process in ranks)
    finally:
        for process in ranks:
            process.kill()


def answer(rank_jobs: RankJobs, connection: Connection) -> Answer:
    """Return the figures of every implementation by name."""
    first = rank_jobs.jobs[0]
    try:
        with join(first.device, rank_jobs.rank, first.ranks, rank_jobs.meeting_point) as device:
            return DONE, _figures(rank_jobs, device)
    except Exception as error:
        return failure(error)


def _figures(rank_jobs: RankJobs, device: torch.device) -> dict[str, Any]:
    first = rank_jobs.jobs[0]
    mesh = dist.init_device_mesh(device.type, (first.ranks,))
    torch.manual_seed(0)
    dtype, size = DTYPES[first.dtype], -(-first.classes // first.ranks)
    hidden = torch.randn(first.rows, first.width, device=device).to(dtype).requires_grad_()
    target = torch.randint(first.classes, (first.rows,), device=device)
    # This rank's rows of the weight; rows beyond the classes are padding.
    start, weight = size * rank_jobs.rank, torch.zeros(size, first.width, dtype=dtype, device=device)
    for block in range(0, first.classes, 8192):
        rows = (torch.randn(min(8192, first.classes - block), first.width, device=device) * first.width**-0.5).to(dtype)
        low, high = max(start, block), min(start + size, block + rows.shape[0])
        if low < high:
            weight[low - start : high - start] = rows[low - block : high - block]
    weight.requires_grad_()
    steps = {
        job.implementation: LossStep(loss_of(job.op, job.implementation, job.classes, mesh), (hidden, weight, target))
        for job in rank_jobs.jobs
    }
    results: dict[str, Any] = {}
    for name, step in list(steps.items()):
        try:
            values = [float(step()) for _ in range(WARM_UP)]
            step.forget()
            results[name] = {"loss": values[0], "peak_bytes": peak_bytes(step, device), "seconds": []}
        except torch.OutOfMemoryError as error:
            # All ranks have the same sizes, so all of them run out of memory.
            results[name] = {"reason": str(error).splitlines()[0], "out_of_memory": True}
            del steps[name]
    for _ in range(rank_jobs.repetitions):
        for name, step in steps.items():
            results[name]["seconds"].append(_seconds(step, device))
    return results


@dataclass(frozen=True)
class LossStep:
    """A forward and a backward pass; some losses run the backward pass themselves."""

    loss: Loss
    arguments: tuple[Tensor, Tensor, Tensor]

    def __call__(self) -> Tensor:
        self.forget()
        value = self.loss(*self.arguments)
        if value.requires_grad:
            value.backward()
        return value.detach()

    def forget(self) -> None:
        """Drop the gradients, as a training loop does."""
        for tensor in self.arguments:
            tensor.grad = None


def _seconds(step: Callable[[], Tensor], device: torch.device) -> float:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


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
