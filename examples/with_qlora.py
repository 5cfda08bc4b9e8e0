# SPDX-License-Identifier: Apache-2.0
"""Liger under QLoRA: weights in 4 bits by bitsandbytes, adapters by PEFT. `python examples/with_qlora.py`."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from tiny_llama import arguments, batches, load
from transformers import BitsAndBytesConfig

import liger_hf

options = arguments()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
folder = options.model
if folder is None:
    # Weights are quantized while they are loaded.
    folder = tempfile.mkdtemp()
    load(None).save_pretrained(folder)
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = load(folder, quantization_config=quantized, device_map={"": device})
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).train()
print(liger_hf.apply(model))

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
for step, batch in enumerate(batches(options.steps)):
    loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.4f}")
