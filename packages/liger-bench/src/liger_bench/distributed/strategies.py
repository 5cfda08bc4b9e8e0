# SPDX-License-Identifier: Apache-2.0
"""How ranks share a training run: each strategy wraps a model and returns the function that takes a step."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_bench.distributed.job import Job
from liger_bench.machine import DTYPES

# Tokens of this rank to their loss; the weights are updated.
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Strategy:
    """A way to share a run; the context manager trained(model, job) wraps a model until it exits.

    keeps_float32  the model must be in float32, and the strategy itself computes in the dtype of the job
    module         what must be importable
    """

    trained: Callable[[Any, Job], AbstractContextManager[Step]]
    keeps_float32: bool = False
    module: str | None = None

    def missing(self) -> str | None:
        """Return the reason why the strategy cannot run here, or None."""
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            return f"not installed; pip install {self.module}"
        return None


@contextmanager
def _ddp(model: Any, job: Job) -> Iterator[Step]:
    """Use DDP: every rank holds the whole model and optimizer, in the job's dtype."""
    from torch.nn.parallel import DistributedDataParallel

    yield _by_torch(DistributedDataParallel(model), job)


@contextmanager
def _fsdp2(model: Any, job: Job) -> Iterator[Step]:
    """Use FSDP2: weights, gradients and optimizer are sharded in float32; layers are gathered in the job's dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(job.device, (job.ranks,))
    low = job.dtype != "float32"
    policy = (
        MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype], reduce_dtype=torch.float32)
        if low
        else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    yield _by_torch(model, job)


def _by_torch(model: Any, job: Job) -> Step:
    optimizer = _optimizer(model, job)

    def step(tokens: Tensor) -> Tensor:
        # The other outputs are freed after this line, as in a training run.
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _zero(stage: int) -> Callable[[Any, Job], AbstractContextManager[Step]]:
    """Use DeepSpeed ZeRO; the optimizer's weights are float32.

    Stage 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the weights.
    """

    @contextmanager
    def trained(model: Any, job: Job) -> Iterator[Step]:
        # It reads this one when it is imported, and looks for MPI if one of the others is missing.
        os.environ.update(DS_ACCELERATOR=job.device, LOCAL_RANK=str(dist.get_rank()), RANK=str(dist.get_rank()))
        os.environ.update(WORLD_SIZE=str(job.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        deepspeed: Any = importlib.import_module("deepspeed")

        # Else it compiles a collective of its own for the CPU, for most of a minute.
        deepspeed.ops.__compatible_ops__.clear()
        config = {
            "train_micro_batch_size_per_gpu": job.batch,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": job.dtype == "bfloat16"},
            # Threshold 0: otherwise small weights, so all of a tiny model, stay whole on every rank.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model, job), config=config)

        def step(tokens: Tensor) -> Tensor:
            loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()

        try:
            yield step
        finally:
            engine.destroy()

    return trained


def _optimizer(model: Any, job: Job) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, fused=True)


STRATEGIES = {
    "fsdp2": Strategy(_fsdp2, keeps_float32=True),
    "ddp": Strategy(_ddp),
    "zero0": Strategy(_zero(0), module="deepspeed"),
    "zero1": Strategy(_zero(1), module="deepspeed"),
    "zero2": Strategy(_zero(2), module="deepspeed"),
    "zero3": Strategy(_zero(3), module="deepspeed"),
}
