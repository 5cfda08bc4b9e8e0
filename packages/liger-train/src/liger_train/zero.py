# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration for a training run, and its requirements on the machine."""

import importlib
import logging
import os
import sys
from functools import cache
from typing import Any

from liger_train.setup import Setup

# The maximum number of elements of offloaded weights on the device; DeepSpeed's default, 1e9, is all of a small model.
LIVE = 100_000_000


def prepare(setup: Setup) -> None:
    """Prepare DeepSpeed; call this before anything else imports or starts it."""
    # DeepSpeed reads this variable when it is imported.
    os.environ["DS_ACCELERATOR"] = setup.device
    logger = importlib.import_module("deepspeed.utils").logger
    # Its hooks warn that they find no tensor in lazy logits. The LM head is gathered when the loss is computed.
    logger.addFilter(lambda record: "LazyLogits" not in record.getMessage())
    for handler in logger.handlers:
        # By default it logs to standard output, which is reserved for the results.
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    if setup.device == "cpu":
        # Otherwise DeepSpeed compiles its own CPU collectives, which takes most of a minute.
        importlib.import_module("deepspeed").ops.__compatible_ops__.clear()


def config(setup: Setup) -> dict[str, Any]:
    """Return DeepSpeed's configuration; Transformers fills in "auto"."""
    stage = int(setup.shard.removeprefix("zero"))
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
    }
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        # Otherwise Transformers could not load the model of a checkpoint.
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if setup.offload != "none":
        zero["offload_optimizer"] = _offload_device(setup)
    if setup.offload in ("parameters", "nvme"):
        zero |= {
            "offload_param": _offload_device(setup),
            "stage3_max_live_parameters": live_elements(setup),
            "stage3_max_reuse_distance": live_elements(setup),
        }
    if setup.offload == "nvme":
        # Each of the five buffers must hold any weight. By default the first billion weights would stay on the host.
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": _largest_weight(setup), "max_in_cpu": 0}
        # Prefetching can request a weight that is already in a buffer, which is an error.
        zero["stage3_prefetch_bucket_size"] = 0
    contents: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "steps_per_print": setup.steps + 1,
    }
    if setup.offload != "none" and adam_problem():
        contents["zero_force_ds_cpu_optimizer"] = False
    return contents


def live_elements(setup: Setup) -> int:
    """Return how many elements of offloaded weights may stay on the device for their next use.

    With weights on disk this is 0, because each would occupy a read buffer.
    """
    return 0 if setup.offload == "nvme" else LIVE


def _offload_device(setup: Setup) -> dict[str, Any]:
    if setup.offload == "nvme":
        return {"device": "nvme", "nvme_path": setup.nvme_folder, "pin_memory": True}
    return {"device": "cpu", "pin_memory": setup.device == "cuda"}


@cache
def adam_problem() -> str:
    """Return why DeepSpeed's CPU AdamW cannot be compiled here, so that torch's is used, or an empty string."""
    try:
        importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load(verbose=False)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else 'no reason given'}"
    return ""


def disk_problem() -> str:
    """Return why DeepSpeed cannot offload to disk here, as the end of an error message, or an empty string."""
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    if builder.is_compatible(verbose=False):
        return ""
    return "needs libaio, with which DeepSpeed writes to disk, and a compiler; apt-get install libaio-dev g++"


def _largest_weight(setup: Setup) -> int:
    from liger_train.configs import config_of

    text = config_of(setup).get_text_config()
    return int(text.hidden_size) * max(int(text.vocab_size), int(getattr(text, "intermediate_size", 0) or 0))
