# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one model on one batch, as one process measures them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from liger_bench.demo.model import parameters, random_model
from liger_bench.machine import DTYPES
from liger_bench.memory import held_bytes, peak_bytes
from liger_bench.model.implementations import IMPLEMENTATIONS
from liger_bench.model.job import Job

# Fewer steps give no median, however long they take.
LEAST_STEPS = 3
PROFILED_STEPS = 3
QUANTILES = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
BUSY = "all kernels of a step"


class Training:
    """A model with activation checkpointing and one batch of random tokens, the same for every implementation."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device(job.device, 0) if job.device == "cuda" else torch.device(job.device)
        if job.memory_limit_bytes is not None:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_limit_bytes / total), self.device)
        self.model = random_model(job.model, self.device, DTYPES[job.dtype], job.sequence, checkpointing=True)
        implementation = IMPLEMENTATIONS[job.implementation]
        self.backend = implementation.patch(self.model)
        if implementation.compiled:
            self.model.compile()
        generator = torch.Generator().manual_seed(0)
        shape = (job.batch, job.sequence)
        self.tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator).to(self.device)
        self.first: dict[str, Any] = {}

    def prepare(self) -> None:
        """Run the first step, which compiles, and report its loss and gradients."""
        seconds, loss = self._timed()
        self.first = {"seconds": seconds, "loss": float(loss), "grad_norm": self._gradient_norm()}
        del loss
        self._forget()
        # What this process does not need while it waits for its turn may be needed by another one.
        self._release()

    def measure(self) -> dict[str, Any]:
        """Return the figures of a row; one step before the first timed one settles the allocator."""
        self.step()
        self._forget()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        taken = list(self._steps())
        fast, median, slow = torch.tensor(taken, dtype=torch.float64).quantile(QUANTILES).tolist()
        tokens = self.tokens.numel()
        return {
            "backend": self.backend,
            "tokens_per_second": tokens / median,
            "low_tokens_per_second": tokens / slow,
            "high_tokens_per_second": tokens / fast,
            "step_seconds": median,
            "steps": len(taken),
            "peak_bytes": self._peak(),
            "loss": self.first["loss"],
            "grad_norm": self.first["grad_norm"],
            "compile_seconds": max(0.0, self.first["seconds"] - median),
            "parameters": parameters(self.model),
        }

    def kernels(self, count: int) -> list[dict[str, Any]]:
        """Return the `count` kernels with the most device time in a step, on the CPU the longest PyTorch operations."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        # Without this the profiler writes about its own start and end to the terminal.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(activities=activities) as recorded:
            for _ in range(PROFILED_STEPS):
                self.step()
                self._forget()
            self._wait()
        wanted = DeviceType.CUDA if self.device.type == "cuda" else DeviceType.CPU
        events = [e for e in recorded.key_averages() if e.device_type == wanted and not e.is_user_annotation]
        taken = {
            e.key: (e.self_cpu_time_total if wanted == DeviceType.CPU else e.self_device_time_total, e.count)
            for e in events
        }
        total = sum(microseconds for microseconds, _ in taken.values())
        longest = sorted(taken.items(), key=lambda item: -item[1][0])[:count]
        return [
            {
                "name": name,
                "calls": calls / PROFILED_STEPS,
                "ms": microseconds / 1e3 / PROFILED_STEPS,
                "share": microseconds / total,
            }
            for name, (microseconds, calls) in longest
        ] + [{"name": BUSY, "calls": None, "ms": total / 1e3 / PROFILED_STEPS, "share": 1.0}]

    def step(self) -> Tensor:
        # The other outputs are freed on return, as in a training run.
        loss: Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        return loss.detach()

    def _steps(self) -> Iterator[float]:
        start, count = time.perf_counter(), 0
        while count < min(LEAST_STEPS, self.job.steps) or (
            count < self.job.steps and time.perf_counter() - start < self.job.seconds
        ):
            yield self._timed()[0]
            self._forget()
            count += 1

    def _timed(self) -> tuple[float, Tensor]:
        self._wait()
        start = time.perf_counter()
        loss = self.step()
        self._wait()
        return time.perf_counter() - start, loss

    def _peak(self) -> int:
        """Return the peak memory in bytes: weights, gradients, activations and the batch."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return held_bytes([*self.model.parameters(), *self.model.buffers(), self.tokens]) + peak_bytes(
            self.step, self.device
        )

    def _gradient_norm(self) -> float:
        norms = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float32).double()
            for p in self.model.parameters()
            if p.grad is not None
        ]
        return float(torch.stack(norms).norm())

    def _forget(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
