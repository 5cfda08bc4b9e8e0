# SPDX-License-Identifier: Apache-2.0
"""Convert a setup to the arguments of the Transformers Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_core.errors import OptionError
from liger_hf.private_transformers import use_one_gpu
from liger_train import fields, techniques, zero
from liger_train.combinations import ZERO
from liger_train.parallelism import parallelism
from liger_train.setup import Setup
from liger_train.train import processes

if TYPE_CHECKING:
    from transformers import TrainingArguments

LOW_IN_FSDP2 = {"bf16": "bfloat16", "fp16": "float16"}


def training_arguments(setup: Setup, folder: Path, **more: Any) -> TrainingArguments:
    """The arguments of the Trainer, with `more` on top. Joins the other ranks, if there are any.

    Create them before the model: ZeRO stage 3 then shards each weight as it is created. The object must stay alive
    until the run ends. Activation checkpointing is already set up in the model (model.py).
    """
    joined = processes.join(setup)
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
    }
    values |= techniques.arguments(setup) | _sharding(setup) | joined | more | _chosen(setup)
    from transformers import TrainingArguments

    try:
        arguments = TrainingArguments(**values)
    except ValueError as error:
        if not setup.set:
            raise
        raise OptionError(
            f"train: --set must have values that TrainingArguments accepts, got {setup.set}: {error}"
        ) from error
    if setup.shard == "fsdp2" and setup.precision in LOW_IN_FSDP2:
        arguments.fsdp_plugin_args["mixed_precision_policy"] = _mixed(LOW_IN_FSDP2[setup.precision])
    if arguments.n_gpu > 1:
        # Otherwise the Trainer splits the batch over all GPUs that the process sees.
        use_one_gpu(arguments)
    return arguments


def _chosen(setup: Setup) -> dict[str, Any]:
    """Return the fields that --set sets, and those that they require.

    A constant learning rate would ignore warm-up, and without logging nothing is reported.
    """
    chosen = fields.values(setup.set)
    required: dict[str, Any] = {}
    if "warmup_steps" in chosen:
        required["lr_scheduler_type"] = "constant_with_warmup"
    if "eval_steps" in chosen:
        required["eval_strategy"] = "steps"
    if "report_to" in chosen:
        required |= {"logging_strategy": "steps", "logging_steps": 1}
    # The number of steps of these epochs is known by now.
    return required | {name: value for name, value in chosen.items() if name != fields.EPOCHS}


def _mixed(dtype: str) -> Any:
    """Return a policy that reduces gradients in float32; accelerate's default reduces them in the low precision.

    Outputs keep their dtype: the low precision for layers, whose outputs the next matmul reads; float32 for the loss.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32, output_dtype=None)


def _sharding(setup: Setup) -> dict[str, Any]:
    if setup.shard in ZERO:
        return {"deepspeed": zero.config(setup)}
    if setup.shard == "fsdp2":
        config = {"version": 2, "reshard_after_forward": True, "cpu_offload": setup.offload == "parameters"}
        # accelerate would load weights that tensor parallelism has sharded as if they were whole.
        return {"fsdp": True, "fsdp_config": config | ({"cpu_ram_efficient_loading": False} if setup.tp > 1 else {})}
    return {}
