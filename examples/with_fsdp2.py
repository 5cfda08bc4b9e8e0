# SPDX-License-Identifier: Apache-2.0
"""Liger with FSDP2, one process per GPU, or processes of the CPU: `torchrun --nproc-per-node 2 examples/with_fsdp2.py`."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny_llama import arguments, batches, load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import liger_hf

options = arguments()
on_gpus = torch.cuda.device_count() >= 2
dist.init_process_group("nccl" if on_gpus else "gloo")
rank, device = dist.get_rank(), torch.device("cuda", dist.get_node_local_rank()) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)

# Without weights, so that no rank ever holds the whole model.
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)) if options.model else load(None)
# Before the model is sharded. The loss reads the head inside the forward of the root, where its weight is whole.
report = liger_hf.apply(model.train())

mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

model.to_empty(device=device)
# Random weights, and buffers that no file has, such as the frequencies of rotary embeddings.
model.initialize_weights()
if options.model:
    # A folder here. Each rank reads its own shards.
    weights = get_model_state_dict(model)
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    dcp.load(weights, storage_reader=HuggingFaceStorageReader(options.model))

if rank == 0:
    print(report)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, batch in enumerate(batches(options.steps, rank)):
    loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")
dist.barrier()
dist.destroy_process_group()
if not on_gpus:
    # PyTorch's caches keep the threads of gloo, and a busy one aborts a process whose interpreter ends before it.
    sys.stdout.flush()
    os._exit(0)
