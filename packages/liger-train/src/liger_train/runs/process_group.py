# SPDX-License-Identifier: Apache-2.0
"""Join the other ranks before the Trainer starts, where the Trainer itself does not."""

import importlib
import os
import socket
from datetime import timedelta
from typing import Any

from accelerate import Accelerator

from liger_hf.private_transformers import PREPARE_TP, shard_on_cpu
from liger_train import zero
from liger_train.combinations import ZERO
from liger_train.setup import Setup

# How long a rank waits for a failed one; the default is half an hour.
TIMEOUT = timedelta(minutes=10)


def join(setup: Setup) -> dict[str, Any]:
    """Prepare this process for the setup's sharding over the ranks; return the TrainingArguments that this needs."""
    if setup.shard == "none" and setup.tp * setup.cp == 1:
        return {"ddp_backend": "gloo"} if setup.device == "cpu" and setup.ranks > 1 else {}
    if setup.ranks == 1:
        _act_as_torchrun()
    if setup.shard in ZERO:
        zero.prepare(setup)
    if setup.shard == "fsdp2" and setup.tp > 1:
        # accelerate 1.15 makes DTensors of unsharded weights with a class that Transformers removed; FSDP2 does not
        # need them.
        setattr(Accelerator, PREPARE_TP, lambda self, *prepared: prepared)
    if setup.device == "cpu":
        return _join_on_cpu(setup)
    # The norms of offloaded gradients are summed on the CPU.
    return {"ddp_backend": "cuda:nccl,cpu:gloo"} if setup.shard == "fsdp2" and setup.offload != "none" else {}


def _act_as_torchrun() -> None:
    """Set torchrun's variables for a single process.

    Without them, DeepSpeed looks for MPI and accelerate does not shard.
    """
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))


def _join_on_cpu(setup: Setup) -> dict[str, Any]:
    """Set up accelerate's state: accelerate 1.15 shards only on GPUs, though torch and DeepSpeed support the CPU."""
    import torch.distributed as dist
    from accelerate.utils import DistributedType

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    if setup.shard in ZERO:
        # Make DeepSpeed use the existing process group, as accelerate does on GPUs.
        importlib.import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False)
    if setup.cp > 1:
        from liger_train.runs import context_parallel

        context_parallel.install()
    shard_on_cpu(DistributedType.DEEPSPEED if setup.shard in ZERO else DistributedType.MULTI_GPU)
    return {"accelerator_config": {"use_configured_state": True}}
