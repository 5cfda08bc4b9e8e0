# SPDX-License-Identifier: Apache-2.0
"""How a rank joins the others before the Trainer starts, where the Trainer itself does not do it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from accelerate import Accelerator

from liger_hf.private_transformers import leave_weights_of_tensor_parallelism, shard_on_cpu
from liger_train import zero
from liger_train.combinations import ZERO
from liger_train.setup import Setup

# A rank that waits for a failed one gives up after this time, not after half an hour.
TIMEOUT = timedelta(minutes=10)


def join(setup: Setup) -> dict[str, Any]:
    """The TrainingArguments with which this process trains by the sharding of the setup together with the other
    processes of torchrun."""
    if setup.shard == "none" and setup.tp * setup.cp == 1:
        return {"ddp_backend": "gloo"} if setup.device == "cpu" and setup.ranks > 1 else {}
    if setup.ranks == 1:
        _alone()
    if setup.shard in ZERO:
        zero.prepare(setup)
    if setup.shard == "fsdp2" and setup.tp > 1:
        # accelerate 1.15 first makes DTensors of unsharded weights, by a class that Transformers has no more; FSDP2
        # does not need them.
        leave_weights_of_tensor_parallelism(Accelerator)
    if setup.device == "cpu":
        return _joined_on_cpu(setup)
    # The norms of offloaded gradients are summed on the CPU.
    return {"ddp_backend": "cuda:nccl,cpu:gloo"} if setup.shard == "fsdp2" and setup.offload != "none" else {}


def _alone() -> None:
    """Set torchrun's variables for a single process.

    Without them, DeepSpeed looks for MPI and accelerate does not shard.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))


def _joined_on_cpu(setup: Setup) -> dict[str, Any]:
    """Set up accelerate's state: accelerate 1.15 shards only on GPUs, although torch and DeepSpeed support the CPU."""
    import torch.distributed as dist
    from accelerate.utils import DistributedType

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    if setup.shard in ZERO:
        zero.start()
    if setup.cp > 1:
        # Imported here, since only this needs it.
        from liger_train.train import context_parallel

        context_parallel.install()
    shard_on_cpu(DistributedType.DEEPSPEED if setup.shard in ZERO else DistributedType.MULTI_GPU)
    return {"accelerator_config": {"use_configured_state": True}}
