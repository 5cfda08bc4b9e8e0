# SPDX-License-Identifier: Apache-2.0
"""Steps of one case by one implementation, as one process measures them."""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from liger_bench.bench.limits import measure_limits
from liger_bench.checkpointing import checkpoint_layers
from liger_bench.machine import DTYPES
from liger_bench.memory import held_bytes, peak_bytes
from liger_bench.model.implementations import IMPLEMENTATIONS
from liger_bench.step.arithmetic import arithmetic
from liger_bench.step.cases import CASES
from liger_bench.step.job import Job

RANK, ALPHA = 16, 32
LEARNING_RATE = 1e-5
# The first step compiles; with CUDA graphs, the second records one.
WARM_UP = 3
LIMITS_SECONDS = 0.3


def missing(job: Job) -> str | None:
    """Return the reason why the job cannot run here, or None."""
    if CASES[job.case].adapters and importlib.util.find_spec("peft") is None:
        return "peft is not installed; pip install peft"
    return IMPLEMENTATIONS[job.implementation].missing(job.device)


def measured(job: Job, steps: int, seconds: float) -> dict[str, Any]:
    """Return the seconds of every timed step, and the other figures of this process."""
    step = Step(job)
    first = float(step())
    for _ in range(WARM_UP - 1):
        step()
    step.wait()
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(step.device)
    taken: list[float] = []
    while len(taken) < 3 or (len(taken) < steps and sum(taken) < seconds):
        step.wait()
        start = time.perf_counter()
        step()
        step.wait()
        taken.append(time.perf_counter() - start)
    peak = step.peak()
    work = arithmetic(step.model, step.case, step.tokens.numel(), step.tokens.shape[1])
    step.model = step.optimizer = None
    if step.device.type == "cuda":
        torch.cuda.empty_cache()
    limits = measure_limits(step.device, DTYPES[job.dtype], LIMITS_SECONDS)
    return {
        "taken": taken,
        "loss": first,
        "peak_bytes": peak,
        "replaced": step.replaced,
        "product_flops_per_second": limits.rate,
        "copy_bytes_per_second": limits.bandwidth,
        "limit_seconds": work.seconds(limits.rate, limits.bandwidth, step.case.recompute),
        "limit_without_recompute_seconds": work.seconds(limits.rate, limits.bandwidth, recompute=False),
    }


class Step:
    """A model with random weights and one batch of random tokens, the same for every implementation."""

    def __init__(self, job: Job) -> None:
        self.job, self.case, self.device = job, CASES[job.case], torch.device(job.device)
        torch.manual_seed(0)
        config = self.case.config(job.tiny)
        with self.device:
            base: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[job.dtype], attn_implementation="sdpa")
        self.model: Any = self._adapted(base) if self.case.adapters else base
        if self.case.recompute:
            checkpoint_layers(self.model)
        self.model.train()
        self.replaced = self._patch(base)
        if self.case.compile is not None:
            self.model.compile(mode=self.case.compile)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True) if self.case.optimizer else None
        shape = self.case.shape(job.tiny)
        self.tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(
            self.device
        )

    def __call__(self) -> Tensor:
        """Run a step and return its loss; if CUDA graphs replay the step, the next one overwrites the loss."""
        if self.case.compile is not None:
            torch.compiler.cudagraph_mark_step_begin()
        # The other outputs are freed on return, as in a training run.
        loss: Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def peak(self) -> int:
        """Return the peak memory in bytes: weights, gradients, activations, optimizer state and the batch."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        held = [*self.model.parameters(), *self.model.buffers(), self.tokens]
        state = self.optimizer.state.values() if self.optimizer is not None else ()
        held += [value for of in state for value in of.values() if torch.is_tensor(value)]
        return held_bytes(held) + peak_bytes(self, self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _adapted(self, base: Any) -> Any:
        peft: Any = importlib.import_module("peft")
        model = peft.get_peft_model(
            base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        # As in a run that has taken steps: at zero, the gradients of A are zero, too.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.01)
        return model

    def _patch(self, base: Any) -> str:
        """Patch the model and return what runs its ops; only Liger patches the model with adapters."""
        if self.job.implementation != "liger":
            return IMPLEMENTATIONS[self.job.implementation].patch(base)
        import liger_hf

        report = liger_hf.apply(self.model)
        return ", ".join(f"{op} {count}" for op, count in report.replaced.items())
