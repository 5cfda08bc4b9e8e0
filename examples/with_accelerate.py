# SPDX-License-Identifier: Apache-2.0
"""Liger in a loop of Accelerate: `python examples/with_accelerate.py`, or `accelerate launch examples/with_accelerate.py`."""

import torch
from accelerate import Accelerator
from tiny_llama import arguments, batches, load

import liger_hf

options = arguments()
accelerator = Accelerator()
model = load(options.model).train()

# Before accelerate wraps the model.
accelerator.print(liger_hf.apply(model))

model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for step, batch in enumerate(batches(options.steps, accelerator.process_index)):
    loss = model(**{name: value.to(accelerator.device) for name, value in batch.items()}).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step + 1}: loss {loss.item():.4f}")
accelerator.end_training()
