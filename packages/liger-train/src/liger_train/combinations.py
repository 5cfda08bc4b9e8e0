# SPDX-License-Identifier: Apache-2.0
"""Check which techniques can be combined.

Each function returns the rest of an error that begins with "--option value", or an empty string.
"""

import os
import shutil
from dataclasses import fields
from pathlib import Path

from liger_core.errors import nearest
from liger_train.setup import ALL_LINEAR, FLOAT8_MULTIPLE, ZERO, Setup

FLOAT8_CAPABILITY = (8, 9)


def op_names() -> tuple[str, ...]:
    from liger_hf.discovery import replaceable_ops

    return replaceable_ops()


def ops(setup: Setup) -> str:
    unknown = [name for name in setup.liger.split(",") if name not in (known := op_names())]
    if unknown:
        return f"must name ops among {', '.join(known)}, got {unknown[0]!r}.{nearest(unknown[0], known)}"
    return ""


def peer(setup: Setup) -> str:
    return "" if setup.mlp == "whole" else f"cannot be combined with --mlp {setup.mlp}, which is Liger's"


def pure(setup: Setup) -> str:
    if setup.shard in ZERO:
        return _not_with(setup, "shard", "since DeepSpeed keeps float32 weights in its optimizer; use --precision bf16")
    return ""


def compiled(setup: Setup) -> str:
    if setup.shard in ZERO:
        return _not_with(setup, "shard", "whose hooks within layers the compiler cannot follow; use --shard fsdp2")
    if setup.cp > 1:
        return _not_with(setup, "cp", "which exchanges keys and values within layers; use --compile none")
    if setup.device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        return "needs a C++ compiler on the CPU, not installed here; apt-get install g++"
    return ""


def graphs(setup: Setup) -> str:
    if setup.ranks > setup.tp:
        return (
            f"needs one GPU, or as many as --tp, got {setup.ranks} ranks, which exchange gradients in a step; use "
            "--compile default"
        )
    if setup.shard != "none":
        return _not_with(setup, "shard", "which moves weights while a step runs; use --compile default")
    if setup.checkpoint == "offload":
        return _not_with(setup, "checkpoint", "whose copies to the host a graph cannot include; use --checkpoint auto")
    if setup.packing:
        return "cannot be combined with --packing, whose masks depend on each step's positions; use --compile default"
    if setup.optimizer == "galore-layerwise":
        return _not_with(setup, "optimizer", "which updates weights within the backward pass; use galore")
    return ""


def tiled(setup: Setup) -> str:
    if setup.shard == "zero3":
        return "cannot be combined with --shard zero3, which would gather weights for each tile; use --shard fsdp2"
    if setup.tp > 1:
        return _not_with(setup, "tp", "which would sum over the ranks for each tile; use --mlp whole")
    return ""


def unsharded(setup: Setup) -> str:
    if setup.shard == "none":
        return ""
    return f"{_shards(setup)} weights into pieces that it cannot update; use --optimizer adamw"


def unsharded_or_zero(setup: Setup) -> str:
    if setup.offload != "none":
        return _not_with(setup, "offload", "where DeepSpeed's AdamW updates on the CPU; use --optimizer adamw")
    return unsharded(setup) if setup.shard == "fsdp2" else ""


def unsharded_or_fsdp2(setup: Setup) -> str:
    if setup.offload != "none":
        return _not_with(setup, "offload", "where weights are updated on the CPU; use --optimizer adamw")
    return unsharded(setup) if setup.shard in ZERO else ""


def layerwise(setup: Setup) -> str:
    if setup.accumulation > 1 or setup.ranks > 1:
        return (
            f"updates each weight immediately, so it supports neither --accumulation {setup.accumulation} nor "
            f"{setup.ranks} ranks; use galore"
        )
    if setup.precision == "fp16":
        return "does not support the loss scaling of --precision fp16; use --precision bf16"
    return unsharded(setup)


def offloaded_optimizer(setup: Setup) -> str:
    if setup.shard in ZERO:
        return ""
    if setup.shard == "fsdp2":
        return "must be --offload parameters for --shard fsdp2, which offloads all state together"
    return "needs --shard zero1, zero2 or zero3, also on one GPU, got none"


def offloaded_parameters(setup: Setup) -> str:
    if setup.shard == "fsdp2" and setup.device == "cpu":
        return "needs --device cuda for --shard fsdp2, which pins host memory for a GPU; use --shard zero3"
    if setup.shard in ("zero3", "fsdp2"):
        return ""
    return f"needs --shard zero3 or fsdp2, also on one GPU, got {setup.shard}"


def offloaded_to_disk(setup: Setup) -> str:
    if setup.shard != "zero3":
        return f"needs --shard zero3, also on one GPU, got {setup.shard}"
    if setup.nvme_folder is None:
        return "needs --nvme-folder, a folder on a fast disk"
    if not Path(setup.nvme_folder).is_dir():
        return f"needs an existing folder, got --nvme-folder {setup.nvme_folder}"
    from liger_train.zero import disk_problem

    return disk_problem()


def quantized(setup: Setup) -> str:
    if setup.shard != "none":
        return f"{_shards(setup)} weights, and 4-bit weights cannot be split; use --adapter lora, or --shard none"
    return adapted(setup)


def adapted(setup: Setup) -> str:
    """Check on the meta device that every adapter target is a linear layer or a weight of experts."""
    if setup.adapter_targets == ALL_LINEAR:
        return ""
    import torch

    from liger_train.adapters import adaptable, last_parts, names_of_targets, targeted
    from liger_train.configs import auto_class, config_of

    config = config_of(setup)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=setup.trust_remote_code)
    linear, experts = adaptable(model)
    matching = targeted(setup, [*linear, *experts])
    unknown = next((target for target in names_of_targets(setup) if target not in matching), None)
    if unknown is None:
        return ""
    known, of_experts = (sorted(last_parts(names)) for names in (linear, experts))
    also = f" and the experts' {', '.join(of_experts)}" if experts else ""
    close = nearest(unknown, [*known, *of_experts])
    return f"needs --adapter-targets among the linear layers {', '.join(known)}{also}, got {unknown!r}.{close}"


def float8(setup: Setup) -> str:
    if setup.shard in ZERO:
        return f"supports data parallelism and --shard fsdp2, got --shard {setup.shard}; use --shard fsdp2"
    if setup.tp * setup.cp > 1:
        return f"supports data parallelism and --shard fsdp2, got --tp {setup.tp} --cp {setup.cp}; use --precision bf16"
    if setup.adapter != "none":
        return f"trains every weight, got --adapter {setup.adapter}, which freezes weights; use --precision bf16"
    if setup.sequence % FLOAT8_MULTIPLE:
        return (
            f"needs a --sequence that is a multiple of {FLOAT8_MULTIPLE}, as float8 matmuls need, got {setup.sequence}"
        )
    import torch

    if not torch.cuda.is_available():
        # The check of the device reports this.
        return ""
    capability = torch.cuda.get_device_capability()
    if capability < FLOAT8_CAPABILITY:
        has, wanted = (".".join(map(str, version)) for version in (capability, FLOAT8_CAPABILITY))
        name = torch.cuda.get_device_name()
        return (
            f"needs a GPU with compute capability {wanted} or higher, such as Ada, Hopper or Blackwell, got {name} "
            f"with {has}; use --precision bf16"
        )
    return ""


def tensor_parallel(setup: Setup) -> str:
    if setup.shard in ZERO:
        return _not_with(setup, "shard", "since DeepSpeed does not know of it; use --shard fsdp2")
    if setup.ranks > setup.tp and setup.shard != "fsdp2":
        return f"needs --shard fsdp2 for parallelism over the {setup.ranks // setup.tp} other ranks, got {setup.shard}"
    if setup.ranks == setup.tp and setup.shard != "none":
        return f"leaves no ranks for --shard {setup.shard} to shard over; use --shard none"
    if setup.offload != "none":
        return f"cannot be combined with --offload {setup.offload}; use --offload none"
    if setup.ranks > setup.tp and _transformers_shards_both():
        return f"and --shard {setup.shard} need Transformers before 5.18, which leaves FSDP2 to accelerate"
    if setup.optimizer != "adamw":
        return f"needs --optimizer adamw, got {setup.optimizer}, which does not know of sharded weights"
    if setup.adapter != "none":
        return _not_with(setup, "adapter", "whose weights Transformers does not shard; use --adapter none")
    from liger_train.configs import config_of

    text = config_of(setup).get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % setup.tp:
        return f"must divide the {heads} key heads of {setup.model}, since a head is never split"
    if not getattr(text, "base_model_tp_plan", None):
        return f"needs a model with a tensor-parallel plan in Transformers, got {setup.model}, a {text.model_type}"
    return ""


def context_parallel(setup: Setup) -> str:
    if setup.shard != "fsdp2":
        return f"needs --shard fsdp2, over whose ranks accelerate shards sequences, too, got {setup.shard}"
    if setup.sequence % (2 * setup.cp):
        return f"needs a --sequence that is a multiple of {2 * setup.cp}, two parts for each rank, got {setup.sequence}"
    if setup.device == "cuda" and setup.precision == "fp32":
        return "needs --precision bf16, since the ring attention of PyTorch does not support float32, got fp32"
    from liger_train.configs import config_of

    text = config_of(setup).get_text_config()
    sliding = ["sliding_attention"] if getattr(text, "sliding_window", None) else []
    kinds = set(getattr(text, "layer_types", None) or sliding)
    if kinds - {"full_attention"}:
        return f"needs a model with full attention in every layer, got {setup.model} with {', '.join(sorted(kinds))}"
    return ""


def hybrid(setup: Setup) -> str:
    if setup.shard != "fsdp2":
        return f"needs --shard fsdp2, which shards each copy of the model, got {setup.shard}"
    if setup.sharing_ranks == 1:
        return f"leaves one rank for each copy, which needs no sharding, got {setup.ranks} ranks; use --shard none"
    if setup.cp > 1 and setup.replicas == setup.replicate:
        return (
            f"leaves --cp {setup.cp} ranks for each copy, and accelerate needs more, got {setup.ranks} ranks; use "
            "--replicate 1"
        )
    return ""


def _transformers_shards_both() -> bool:
    """Return whether this Transformers combines FSDP2 with tensor parallelism itself, shown by dp_replicate_size."""
    from transformers.distributed import DistributedConfig

    return "dp_replicate_size" in {field.name for field in fields(DistributedConfig)}


def _not_with(setup: Setup, option: str, why: str) -> str:
    return f"cannot be combined with --{option} {getattr(setup, option)}, {why}"


def _shards(setup: Setup) -> str:
    return _not_with(setup, "shard", "which splits")
