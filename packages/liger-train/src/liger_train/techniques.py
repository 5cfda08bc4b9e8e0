# SPDX-License-Identifier: Apache-2.0
"""Every value of every option of `liger train` that trades memory, speed or precision: option → value → Technique."""

import importlib.util
from dataclasses import replace
from itertools import product
from typing import Any

from liger_core.errors import nearest
from liger_train import combinations, fields
from liger_train.errors import SetupDeviceError, SetupError
from liger_train.implementations import PEER
from liger_train.optimizers import OPTIMIZERS
from liger_train.setup import MLP_ROWS, Setup, check_values
from liger_train.technique import Technique

# Placeholders for values that the user chooses: a number, and a list of ops.
NUMBER, LIST = "NUMBER", "OPS"

# (value, its scales, its bits of precision in matmuls).
FLOAT8 = (("fp8", "a scale per tensor", "3 or 4"), ("fp8-rowwise", "a scale per row", "4"))

# (value, what is sharded, how, its cost).
STAGES = (
    ("zero1", "optimizer state", "", "the updated weights"),
    ("zero2", "optimizer state and gradients", "", "the updated weights"),
    ("zero3", "optimizer state, gradients and weights", "; gathers weights layer by layer", "weights in both passes"),
)

TABLE: dict[str, Technique] = {
    "liger none": Technique("The model of Transformers, unchanged.", by="Transformers"),
    "liger all-but-loss": Technique(
        "Norms, rotary embedding and gated MLPs use Liger's ops; the logits of the whole batch are still materialized.",
        "some activations of each layer",
        "nothing; faster",
        by="liger-hf",
    ),
    "liger all": Technique(
        "Every op of Liger, including the fused linear cross entropy, which never materializes the full logits.",
        "tokens × vocabulary × (2 to 4) × 4 bytes at the peak",
        "nothing; faster",
        by="liger-hf",
    ),
    f"liger {LIST}": Technique(
        "Only these ops of Liger.", "depends on the ops", by="liger-hf", problem=combinations.ops
    ),
    f"liger {PEER}": Technique(
        "The other library patches the model with its defaults, for comparison.",
        "as much as the fused loss, for most model types",
        "nothing; faster",
        packages=(PEER,),
        reason="its Triton kernels have no interpreter for training",
        problem=combinations.peer,
    ),
    "precision fp32": Technique("Everything in float32."),
    "precision bf16": Technique(
        "Weights and optimizer in float32, matmuls in bfloat16.",
        "half of the activation memory",
        "8 bits of precision in matmuls; faster",
        by="accelerate",
        arguments=lambda setup: {"bf16": True},
    ),
    "precision fp16": Technique(
        "Weights and optimizer in float32, matmuls in float16, with loss scaling.",
        "half of the activation memory",
        "5 bits of exponent in matmuls, steps that overflow are skipped; faster",
        by="accelerate",
        reason="accelerate trains in float16 only on GPUs",
        arguments=lambda setup: {"fp16": True},
    ),
    "precision bf16-pure": Technique(
        "Weights, gradients and optimizer in bfloat16.",
        "half of all memory",
        "updates below 1/256 of a weight are lost",
        problem=combinations.pure,
    ),
    **{
        f"precision {value}{end}": Technique(
            f"As `bf16{end}`, with the matmuls of linear layers in float8 and {scales}.",
            f"as `bf16{end}`",
            f"as `bf16{end}`, {bits} bits of precision in matmuls; compiles in the first step; faster",
            packages=("torchao",),
            reason="no CPU multiplies in float8 faster than in bfloat16",
            arguments=lambda setup: {"bf16": setup.mixed},
            problem=combinations.float8,
        )
        for end, (value, scales, bits) in product(("", "-pure"), FLOAT8)
    },
    "checkpoint none": Technique("Keeps every activation for the backward pass."),
    "checkpoint full": Technique(
        "Keeps only the input of each layer and recomputes the rest in the backward pass.",
        "nearly all activations within layers",
        "a second forward pass, about a quarter of the time",
        by="Transformers, torch",
    ),
    "checkpoint offload": Technique(
        "As `full`, and offloads the inputs to host memory while the GPU computes.",
        "also tokens × hidden size × bytes per layer",
        "host memory; time only if a copy takes longer than a layer",
        by="Transformers, torch",
        reason="on the CPU, activations are in host memory already",
    ),
    "checkpoint auto": Technique(
        "As `full` in the first steps, or as `offload` if inputs take over an eighth of the memory. Then each "
        "layer keeps, recomputes or offloads, by measured memory, bandwidth and time.",
        "as much as the batch needs",
        "less recomputation than `full`",
        reason="host memory has no limit to stay within",
    ),
    f"checkpoint {NUMBER}": Technique(
        "As `full` for the first layers, as many as given; the others keep their activations.",
        "the activations of those layers",
        "a second forward pass of those layers",
        by="Transformers, torch",
    ),
    "compile none": Technique("Runs the model in eager mode."),
    "compile default": Technique(
        "Compiles each layer with torch.compile; layers of a kind share a graph.",
        "some activations of each layer",
        "compiles in the first step; faster for small batches",
        problem=combinations.compiled,
    ),
    "compile graphs": Technique(
        "As `default`, and runs the forward and backward pass of a micro-batch as a CUDA graph.",
        "as `default`",
        "as `default`, and gradients stay allocated; faster where the host cannot launch kernels fast enough",
        reason="CUDA graphs are a feature of NVIDIA GPUs; --compile default compiles for the CPU, too",
        problem=combinations.graphs,
    ),
    "mlp whole": Technique("Gated MLPs compute all tokens at once.", by="Transformers"),
    "mlp tiled": Technique(
        f"Gated MLPs compute {MLP_ROWS:,} tokens at a time, in both passes.",
        f"with more than {MLP_ROWS:,} tokens, (3 to 5) × tokens × intermediate size × bytes of the layer that is "
        "computed",
        "with `--checkpoint none`, a second forward pass of MLPs; sums of weight gradients in float32",
        by="liger-hf",
        problem=combinations.tiled,
    ),
    **OPTIMIZERS,
    "shard none": Technique("Every rank holds the whole model (data parallelism)."),
    **{
        f"shard {value}": Technique(
            f"Shards {state} over the ranks{how}.",
            f"(ranks − 1) / ranks of {state}",
            f"gathers {costs}",
            packages=("deepspeed",),
            by="DeepSpeed",
        )
        for value, state, how, costs in STAGES
    },
    "shard fsdp2": Technique(
        "As `zero3`, by PyTorch.",
        "(ranks − 1) / ranks of optimizer state, gradients and weights",
        "gathers weights in both passes",
        by="torch, accelerate",
    ),
    "tp 1": Technique("Every rank computes whole layers."),
    f"tp {NUMBER}": Technique(
        "Tensor parallelism: as many ranks share each layer and the LM head, by the model's own plan, and train on "
        "the same sequences.",
        "(ranks − 1) / ranks of weights, gradients and optimizer state of linear layers, and of activations within "
        "them",
        "two sums of activations over the ranks per layer and pass",
        by="Transformers, torch",
        problem=combinations.tensor_parallel,
    ),
    "cp 1": Technique("Every rank has whole sequences."),
    f"cp {NUMBER}": Technique(
        "Context parallelism: as many ranks share each sequence, with ring attention on GPUs.",
        "(ranks − 1) / ranks of activations and logits",
        "sends keys and values around the ranks in each layer",
        by="accelerate, torch",
        problem=combinations.context_parallel,
    ),
    "replicate 1": Technique("--shard shards over all ranks."),
    f"replicate {NUMBER}": Technique(
        "Hybrid sharding: as many copies of the model, usually one on each machine. FSDP2 shards a copy over its "
        "ranks, and sums gradients over the copies.",
        "nothing; faster, since only gradients cross the network between machines",
        "fewer shards, so more memory for weights, gradients and optimizer state",
        by="torch, accelerate",
        problem=combinations.hybrid,
    ),
    "offload none": Technique("Keeps everything on the device."),
    "offload optimizer": Technique(
        "Keeps optimizer state in host memory and updates weights on the CPU.",
        "all optimizer state",
        "copies gradients to the host and weights back in each step; a slower update",
        by="DeepSpeed",
        problem=combinations.offloaded_optimizer,
    ),
    "offload parameters": Technique(
        "Keeps weights, gradients and optimizer state in host memory; fetches the weights of a layer when needed.",
        "weights, gradients and optimizer state, except one layer",
        "copies weights to the device in both passes and gradients to the host; a slower update",
        by="DeepSpeed, or torch for fsdp2",
        problem=combinations.offloaded_parameters,
    ),
    "offload nvme": Technique(
        "As `parameters`, in files on disk: in a folder within --nvme-folder that is removed when the run ends.",
        "as `parameters`, and host memory",
        "as `parameters`, at the speed of the disk",
        by="DeepSpeed",
        reason="on the CPU, DeepSpeed computes in the buffers into which it reads the next weights",
        problem=combinations.offloaded_to_disk,
    ),
    "adapter none": Technique("Trains every weight.", by="Transformers"),
    "adapter lora": Technique(
        "Freezes the weights and trains adapters of --adapter-rank 16 on every linear layer, or those of "
        "--adapter-targets.",
        "about 99 % of gradients and optimizer state",
        "limited to what low-rank adapters can express",
        packages=("peft",),
        problem=combinations.adapted,
    ),
    "adapter qlora": Technique(
        "As `lora`, with the frozen linear layers and experts in 4 bits (NF4).",
        "as `lora`, and three quarters of the weights",
        "lower-precision frozen weights, dequantized at each use",
        packages=("peft", "bitsandbytes"),
        problem=combinations.quantized,
    ),
}
TECHNIQUES: dict[str, dict[str, Technique]] = {}
for name, technique in TABLE.items():
    option, value = name.split()
    TECHNIQUES.setdefault(option, {})[value] = replace(technique, option=option, value=value)


def chosen(setup: Setup) -> list[Technique]:
    """Return the technique of every option, in the order of the table.

    Raises OptionError for an unknown value.
    """
    return [_chosen(option, values, str(getattr(setup, option))) for option, values in TECHNIQUES.items()]


def values_of(option: str) -> str:
    """Return the values of an option, as its help lists them."""
    return ", ".join(value for value in TECHNIQUES[option] if value != LIST)


def check(setup: Setup, here: bool = True) -> None:
    """Raise OptionError or DeviceError for a setup that cannot train, before anything large is loaded.

    If the run is not `here`, the libraries and disks of this machine are not checked.
    """
    check_values(setup)
    if setup.memory_limit is not None and setup.device == "cpu":
        raise SetupDeviceError("--memory-limit needs a GPU, got --device cpu")
    check_techniques(setup, here)
    fields.values(setup.set, arguments(setup))
    evaluating = [name for name in fields.EVALUATION if name in fields.strings(setup.set)]
    if evaluating and not setup.validation:
        raise SetupError(f"--set {evaluating[0]} needs --validation, the share of the text to hold out, such as 0.02")


def check_techniques(setup: Setup, here: bool) -> None:
    """Check that every technique is known, supported on the device, installed, and compatible with the others."""
    for technique in chosen(setup):
        option = f"--{technique.option} {getattr(setup, technique.option)}"
        if setup.device not in technique.devices:
            supported = " or ".join(technique.devices)
            raise SetupDeviceError(f"{option} needs --device {supported}, got {setup.device}: {technique.reason}")
        problem = technique.problem(setup)
        # Only the machine of the run has the folder of --nvme-folder.
        if problem and (here or technique.value != "nvme"):
            raise SetupError(f"{option} {problem}")
        missing = [name for name in technique.packages if importlib.util.find_spec(name.replace("-", "_")) is None]
        if missing and here:
            raise SetupError(
                f"{option} needs {' and '.join(missing)}, not installed here; pip install {' '.join(missing)}"
            )


def arguments(setup: Setup) -> dict[str, Any]:
    """Return the fields that the setup's techniques set in transformers.TrainingArguments."""
    return {name: value for technique in chosen(setup) for name, value in technique.arguments(setup).items()}


def _chosen(option: str, values: dict[str, Technique], value: str) -> Technique:
    if value in values and value not in (NUMBER, LIST):
        return values[value]
    if NUMBER in values and value.isdecimal():
        return values[NUMBER]
    if LIST in values and ("," in value or value in combinations.op_names()):
        return values[LIST]
    known = [name for name in values if name not in (NUMBER, LIST)]
    also = " or a number of layers" if NUMBER in values else " or ops separated by commas" if LIST in values else ""
    likely = [*known, *combinations.op_names()] if LIST in values else known
    raise SetupError(f"--{option} must be one of {', '.join(known)}{also}, got {value!r}.{nearest(value, likely)}")
