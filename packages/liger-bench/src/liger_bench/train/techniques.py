# SPDX-License-Identifier: Apache-2.0
"""Every value of every option of `liger train` that trades memory, speed or precision: option → value → Technique."""

from __future__ import annotations

import importlib.util
from typing import Any

from liger_bench.train import combinations
from liger_bench.train.setup import Setup, check_values
from liger_bench.train.technique import Technique
from liger_core.errors import DeviceError, OptionError, nearest

# Stand for a value of the user's: a number of layers, and ops with commas between.
NUMBER, LIST = "NUMBER", "OPS"
LOW_RANK = "rank=128,update_proj_gap=200"


def _optim(name: str, **more: Any) -> Any:
    return lambda setup: {"optim": name, **more}


ALL = (
    Technique(
        "liger",
        "none",
        "The model as Transformers has it.",
        "nothing",
        "nothing",
        "Transformers",
    ),
    Technique(
        "liger",
        "all-but-loss",
        "Norms, rotary embedding and gated units by Liger's ops; the logits of the whole batch are still made.",
        "some activations of each layer",
        "nothing; faster",
        "liger-hf",
    ),
    Technique(
        "liger",
        "all",
        "Every op of Liger, among them the output projection fused with the loss, which never holds the logits of a whole batch.",
        "tokens × vocabulary × (2 to 4) × 4 bytes at the peak",
        "nothing; faster",
        "liger-hf",
    ),
    Technique(
        "liger",
        LIST,
        "Only these ops of Liger, with commas between.",
        "as the ops do",
        "nothing",
        "liger-hf",
        problem=combinations.ops,
    ),
    Technique("precision", "fp32", "Everything in float32.", "nothing", "nothing", "torch"),
    Technique(
        "precision",
        "bf16",
        "Weights and optimizer in float32, matmuls in bfloat16.",
        "half of the activations",
        "8 bits of precision in matmuls; faster",
        "accelerate",
        arguments=lambda setup: {"bf16": True},
    ),
    Technique(
        "precision",
        "fp16",
        "Weights and optimizer in float32, matmuls in float16, with loss scaling.",
        "half of the activations",
        "5 bits of exponent in matmuls, steps that overflow are skipped; faster",
        "accelerate",
        devices=("cuda",),
        reason="accelerate trains in float16 only there",
        arguments=lambda setup: {"fp16": True},
    ),
    Technique(
        "precision",
        "bf16-pure",
        "Weights, gradients and optimizer in bfloat16.",
        "half of everything",
        "updates below 1/256 of a weight are lost",
        "torch",
        problem=combinations.pure,
    ),
    Technique("checkpoint", "none", "Every activation is kept for the backward pass.", "nothing", "nothing", "torch"),
    Technique(
        "checkpoint",
        "full",
        "Every layer keeps only its input; the rest is recomputed in the backward pass.",
        "nearly all activations of the layers",
        "a second forward pass, about a quarter of the time",
        "Transformers, torch",
    ),
    Technique(
        "checkpoint",
        "offload",
        "As full, and the inputs wait in host memory.",
        "also tokens × hidden size × bytes per layer",
        "a copy to the host and back per layer",
        "Transformers, torch",
        devices=("cuda",),
        reason="elsewhere activations are in host memory already",
    ),
    Technique(
        "checkpoint",
        "auto",
        "As full in the first steps, then as few layers, and as little of them, as the measured memory allows.",
        "what the batch needs, no more",
        "little of the time that full costs",
        "torch",
        devices=("cuda",),
        reason="host memory has no limit that could be kept",
    ),
    Technique(
        "checkpoint",
        NUMBER,
        "As full, for so many layers, the first ones; the others keep their activations.",
        "the activations of these layers",
        "a second forward pass of these layers",
        "Transformers, torch",
    ),
    Technique(
        "optimizer",
        "adamw",
        "AdamW with two moments in the precision of the weights.",
        "nothing",
        "nothing",
        "torch",
        arguments=_optim("adamw_torch_fused"),
    ),
    Technique(
        "optimizer",
        "adamw-8bit",
        "AdamW with moments in blocks of 8 bits; those of embeddings stay in 32.",
        "6 of 8 bytes a weight of the optimizer",
        "lower-precision optimizer state",
        "bitsandbytes",
        ("bitsandbytes",),
        "bitsandbytes",
        arguments=_optim("adamw_bnb_8bit"),
        problem=combinations.unsharded_or_zero,
    ),
    Technique(
        "optimizer",
        "paged-adamw",
        "AdamW whose moments are moved to the host when the GPU's memory runs out.",
        "all of the optimizer, when it must",
        "transfers when memory is short",
        "bitsandbytes",
        ("bitsandbytes",),
        "bitsandbytes",
        arguments=_optim("paged_adamw_32bit"),
        problem=combinations.unsharded,
    ),
    Technique(
        "optimizer",
        "paged-adamw-8bit",
        "AdamW with moments of 8 bits that are moved to the host when the GPU's memory runs out.",
        "6 of 8 bytes a weight of the optimizer, all when it must",
        "lower-precision optimizer state, transfers when memory is short",
        "bitsandbytes",
        ("bitsandbytes",),
        "bitsandbytes",
        arguments=_optim("paged_adamw_8bit"),
        problem=combinations.unsharded,
    ),
    Technique(
        "optimizer",
        "adamw-torchao-8bit",
        "AdamW with moments in blocks of 8 bits, compiled.",
        "6 of 8 bytes a weight of the optimizer",
        "lower-precision optimizer state; compiles in the first step",
        "torchao",
        ("torchao",),
        "torchao",
        arguments=_optim("adamw_torch_8bit"),
        problem=combinations.unsharded_or_fsdp2,
    ),
    Technique(
        "optimizer",
        "adamw-torchao-4bit",
        "AdamW with moments in blocks of 4 bits, compiled.",
        "7 of 8 bytes a weight of the optimizer",
        "even lower-precision optimizer state; compiles in the first step",
        "torchao",
        ("torchao",),
        "torchao",
        arguments=_optim("adamw_torch_4bit"),
        problem=combinations.unsharded_or_fsdp2,
    ),
    Technique(
        "optimizer",
        "adafactor",
        "Second moments by a row and a column of each weight, no first moments.",
        "nearly all of the optimizer",
        "converges more slowly on some models",
        "Transformers",
        arguments=_optim("adafactor"),
        problem=combinations.unsharded,
    ),
    Technique(
        "optimizer",
        "galore",
        "AdamW in a space of rank 128 of the gradient of every linear layer, updated every 200 steps.",
        "moments of the linear layers, up to hidden size / 128",
        "precision; a singular value decomposition every 200 steps",
        "galore-torch",
        ("galore-torch",),
        "galore",
        arguments=_optim("galore_adamw", optim_target_modules="all-linear", optim_args=LOW_RANK + ",scale=0.25"),
        problem=combinations.unsharded,
    ),
    Technique(
        "optimizer",
        "galore-8bit",
        "GaLore with moments in blocks of 8 bits.",
        "as galore, and three quarters of the rest",
        "as galore, and lower-precision optimizer state",
        "galore-torch, bitsandbytes",
        ("galore-torch", "bitsandbytes"),
        "galore",
        devices=("cuda",),
        reason="its update is a kernel of bitsandbytes for GPUs",
        arguments=_optim("galore_adamw_8bit", optim_target_modules="all-linear", optim_args=LOW_RANK + ",scale=0.25"),
        problem=combinations.unsharded,
    ),
    Technique(
        "optimizer",
        "galore-layerwise",
        "GaLore that updates each weight as soon as its gradient is there, which is then dropped.",
        "as galore, and nearly all gradients",
        "as galore; no clipping of gradients",
        "galore-torch",
        ("galore-torch",),
        "galore",
        arguments=_optim(
            "galore_adamw_layerwise", optim_target_modules="all-linear", optim_args=LOW_RANK + ",scale=0.25", max_grad_norm=0.0
        ),
        problem=combinations.layerwise,
    ),
    Technique(
        "optimizer",
        "apollo",
        "AdamW whose step is scaled by channels of a random projection of rank 128 of the gradient.",
        "moments of the linear layers, up to hidden size / 128",
        "precision",
        "apollo-torch",
        ("apollo-torch",),
        "apollo",
        arguments=_optim(
            "apollo_adamw", optim_target_modules="all-linear", optim_args=LOW_RANK + ",proj=random,scale=1.0,scale_type=channel"
        ),
        problem=combinations.unsharded,
    ),
    Technique(
        "optimizer",
        "apollo-mini",
        "APOLLO with a projection of rank 1 and one scale for each weight.",
        "nearly all moments of the linear layers",
        "precision",
        "apollo-torch",
        ("apollo-torch",),
        "apollo",
        arguments=_optim(
            "apollo_adamw",
            optim_target_modules="all-linear",
            optim_args="rank=1,update_proj_gap=200,proj=random,scale=128.0,scale_type=tensor",
        ),
        problem=combinations.unsharded,
    ),
    Technique("shard", "none", "Every rank holds everything; gradients are averaged.", "nothing", "nothing", "torch"),
    Technique(
        "shard",
        "zero1",
        "The optimizer is split over the ranks.",
        "(ranks − 1) / ranks of the optimizer",
        "the updated weights are gathered",
        "DeepSpeed",
        ("deepspeed",),
        "deepspeed",
    ),
    Technique(
        "shard",
        "zero2",
        "Optimizer and gradients are split over the ranks.",
        "(ranks − 1) / ranks of optimizer and gradients",
        "as zero1",
        "DeepSpeed",
        ("deepspeed",),
        "deepspeed",
    ),
    Technique(
        "shard",
        "zero3",
        "Optimizer, gradients and weights are split over the ranks, and weights gathered layer by layer.",
        "(ranks − 1) / ranks of optimizer, gradients and weights",
        "weights are gathered in both passes",
        "DeepSpeed",
        ("deepspeed",),
        "deepspeed",
    ),
    Technique(
        "shard",
        "fsdp2",
        "Weights, gradients and optimizer are split over the ranks by torch, as by zero3.",
        "(ranks − 1) / ranks of optimizer, gradients and weights",
        "weights are gathered in both passes",
        "torch, accelerate",
    ),
    Technique("offload", "none", "Everything stays on the device.", "nothing", "nothing", "torch"),
    Technique(
        "offload",
        "optimizer",
        "The optimizer lives and computes on the host.",
        "all of the optimizer",
        "gradients to the host and weights back, each step; a slower update",
        "DeepSpeed",
        problem=combinations.offloaded_optimizer,
    ),
    Technique(
        "offload",
        "parameters",
        "Weights, gradients and optimizer live on the host; a layer's weights come when they are needed.",
        "weights, gradients and optimizer, but for a layer",
        "weights to the device in both passes, gradients to the host; a slower update",
        "DeepSpeed, or torch for fsdp2",
        problem=combinations.offloaded_parameters,
    ),
    Technique(
        "offload",
        "nvme",
        "As parameters, but in files, in a folder of its own within --nvme-folder that goes when the training ends.",
        "also host memory",
        "as parameters, at the speed of the disk",
        "DeepSpeed",
        devices=("cuda",),
        reason="DeepSpeed computes there in the buffers that it reads the next weights into",
        problem=combinations.offloaded_to_disk,
    ),
    Technique("adapter", "none", "Every weight is trained.", "nothing", "nothing", "Transformers"),
    Technique(
        "adapter",
        "lora",
        "Adapters of rank 16 beside every linear layer are trained, the weights are frozen.",
        "gradients and optimizer, but for about a hundredth",
        "limited to what low-rank adapters can learn",
        "peft",
        ("peft",),
        "peft",
    ),
    Technique(
        "adapter",
        "qlora",
        "As lora, and the frozen linear layers are held in 4 bits (NF4).",
        "also three quarters of the weights",
        "precision of the frozen weights; they are expanded at each use",
        "peft, bitsandbytes",
        ("peft", "bitsandbytes"),
        "qlora",
        problem=combinations.quantized,
    ),
)


def _by_option() -> dict[str, dict[str, Technique]]:
    table: dict[str, dict[str, Technique]] = {}
    for technique in ALL:
        table.setdefault(technique.option, {})[technique.value] = technique
    return table


TECHNIQUES = _by_option()


def chosen(setup: Setup) -> list[Technique]:
    """The technique of every option, in the order of the table.

    Raises OptionError for a value that there is not.
    """
    return [_chosen(option, values, str(getattr(setup, option))) for option, values in TECHNIQUES.items()]


def check(setup: Setup) -> None:
    """Whether every value of a setup can be, and every technique is known, installed, possible on its device and together with the others.

    Raises OptionError or DeviceError with what to do; nothing large is loaded before.
    """
    check_values(setup)
    for technique in chosen(setup):
        given = f"--{technique.option} {getattr(setup, technique.option)}"
        if setup.device not in technique.devices:
            places = " or ".join(technique.devices)
            raise DeviceError(f"train: {given} needs --device {places}, got {setup.device}: {technique.reason}")
        missing = [name for name in technique.packages if importlib.util.find_spec(name.replace("-", "_")) is None]
        if missing:
            raise OptionError(f"train: {given} needs {' and '.join(missing)}, not installed here; pip install {' '.join(missing)}")
        problem = technique.problem(setup)
        if problem:
            raise OptionError(f"train: {given} {problem}")


def arguments(setup: Setup) -> dict[str, Any]:
    """What the techniques add to transformers.TrainingArguments."""
    merged: dict[str, Any] = {}
    for technique in chosen(setup):
        merged |= technique.arguments(setup)
    return merged


def _chosen(option: str, values: dict[str, Technique], value: str) -> Technique:
    if value in values and value not in (NUMBER, LIST):
        return values[value]
    if NUMBER in values and value.isdecimal():
        return values[NUMBER]
    if LIST in values and ("," in value or combinations.is_op(value)):
        return values[LIST]
    known = [name for name in values if name not in (NUMBER, LIST)]
    also = " or a number of layers" if NUMBER in values else " or ops with commas between" if LIST in values else ""
    raise OptionError(f"train: --{option} must be one of {', '.join(known)}{also}, got {value!r}.{nearest(value, known)}")
