# SPDX-License-Identifier: Apache-2.0
"""Liger under LoRA in the Trainer of Transformers, by its callback: `python examples/with_lora.py`."""

import tempfile

from peft import LoraConfig, get_peft_model
from tiny_llama import arguments, batches, load
from transformers import Trainer, TrainingArguments

import liger_hf

options = arguments()
rows = [{name: value[i] for name, value in batch.items()} for batch in batches(1) for i in range(4)]
settings = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=options.steps,
    logging_steps=1,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
# PEFT first: the callback applies Liger when the Trainer has been made.
model = get_peft_model(load(options.model), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer = Trainer(model, settings, train_dataset=rows, callbacks=[liger_hf.LigerCallback()])
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']:.4f}")
