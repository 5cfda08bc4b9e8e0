# SPDX-License-Identifier: Apache-2.0
"""Liger with DeepSpeed ZeRO: `torchrun --nproc-per-node 2 examples/with_deepspeed.py --stage 3`."""

import os
import sys

import torch
from tiny_llama import arguments, batches, load

if not torch.cuda.is_available():
    # DeepSpeed reads it when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

import liger_hf

if not torch.cuda.is_available():
    # Else it first compiles collectives of its own for the CPU, which takes minutes.
    deepspeed.ops.__compatible_ops__.clear()

options = arguments(stage={"type": int, "choices": (0, 1, 2, 3), "default": 3})
deepspeed.init_distributed()
rank = int(os.environ.get("RANK", "0"))

model = load(options.model).train()
report = liger_hf.apply(model)

config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": options.stage,
        # All weights are partitioned; by default small ones, so every weight of the small Llama, would stay whole.
        "stage3_param_persistence_threshold": 0,
    },
    "bf16": {"enabled": torch.cuda.is_available()},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config)
if rank == 0:
    print(report)
for step, batch in enumerate(batches(options.steps, rank)):
    loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")
engine.destroy()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
if not torch.cuda.is_available():
    # DeepSpeed's caches keep the threads of gloo, and a busy one aborts a process whose interpreter ends before it.
    sys.stdout.flush()
    os._exit(0)
