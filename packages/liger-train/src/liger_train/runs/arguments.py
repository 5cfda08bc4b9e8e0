# SPDX-License-Identifier: Apache-2.0
"""The arguments of the Transformers Trainer for a setup."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments

from liger_hf.private_transformers import TRAINER_GPUS
from liger_train import fields, techniques, zero
from liger_train.combinations import ZERO
from liger_train.errors import SetupError
from liger_train.model import LOW, parallelism
from liger_train.runs import process_group
from liger_train.setup import Setup


def training_arguments(setup: Setup, folder: Path, **more: Any) -> TrainingArguments:
    """Join the other ranks, if any, and return the arguments of the Trainer, with `more` on top.

    Call this before building the model, since ZeRO stage 3 then shards each weight as it is created, and keep the
    result until the run ends. Activation checkpointing is not among the arguments: model.py sets it up.

    Raises OptionError for values of --set that TrainingArguments rejects.
    """
    joined = process_group.join(setup)
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": setup.steps,
        "per_device_train_batch_size": setup.batch,
        "per_device_eval_batch_size": setup.batch,
        "gradient_accumulation_steps": setup.accumulation,
        "learning_rate": setup.learning_rate,
        "lr_scheduler_type": "constant",
        "seed": setup.seed,
        "data_seed": setup.seed,
        "use_cpu": setup.device == "cpu",
        "dataloader_drop_last": True,
        "dataloader_pin_memory": setup.device == "cuda",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "parallelism_config": parallelism(setup),
        # Otherwise the second step replaces the buckets of gradients, while NCCL still holds those of the first.
        "ddp_find_unused_parameters": True,
    }
    values |= techniques.arguments(setup) | _sharding(setup) | joined | more | _set_fields(setup)
    try:
        arguments = TrainingArguments(**values)
    except ValueError as error:
        if not setup.set:
            raise
        raise SetupError(f"--set must have values that TrainingArguments accepts, got {setup.set}: {error}") from error
    if setup.shard == "fsdp2" and setup.mixed:
        # Gradients are reduced in float32, where accelerate's default uses the low precision. Outputs keep their dtype:
        # low precision for layers, whose outputs matmuls read; float32 for the loss.
        policy = MixedPrecisionPolicy(param_dtype=LOW[setup.precision], reduce_dtype=torch.float32, output_dtype=None)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if arguments.n_gpu > 1:
        # Otherwise the Trainer splits the batch over all GPUs that the process sees.
        setattr(arguments, TRAINER_GPUS, 1)
    return arguments


def _set_fields(setup: Setup) -> dict[str, Any]:
    """Return the fields of --set, and the fields that they require.

    A constant schedule would ignore warm-up, and without logging, integrations would get nothing.
    """
    values = fields.values(setup.set)
    required: dict[str, Any] = {}
    if "warmup_steps" in values:
        required["lr_scheduler_type"] = "constant_with_warmup"
    if "eval_steps" in values:
        required["eval_strategy"] = "steps"
    if "report_to" in values:
        required |= {"logging_strategy": "steps", "logging_steps": 1}
    # setup.steps is already the number of steps of these epochs.
    return required | {name: value for name, value in values.items() if name != fields.EPOCHS}


def _sharding(setup: Setup) -> dict[str, Any]:
    if setup.shard in ZERO:
        return {"deepspeed": zero.config(setup)}
    if setup.shard == "fsdp2":
        config = {"version": 2, "reshard_after_forward": True, "cpu_offload": setup.offload == "parameters"}
        # With it, accelerate would hold the whole model on every rank.
        return {"fsdp": True, "fsdp_config": config | {"cpu_ram_efficient_loading": False}}
    return {}
