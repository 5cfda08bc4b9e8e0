# SPDX-License-Identifier: Apache-2.0
"""`--adapter`: the linear layers and the experts that get adapters, and a sentence that counts them on the model."""

import importlib
from collections import Counter
from collections.abc import Collection, Iterable
from math import prod
from typing import Any

from torch import nn

from liger_core.errors import listed
from liger_hf.four_bits import described, is_described, routers
from liger_train.checkpoint import beside_text
from liger_train.setup import ALL_LINEAR, Setup


def add_adapters(model: Any, setup: Setup) -> Any:
    """Add adapters by peft: to all linear layers of the language model, or to the layers and experts that the setup
    names."""
    peft = importlib.import_module("peft")
    linear, experts = adaptable(model)
    targets: list[str] | str
    beside = sorted(_linear_layers(model) - {*linear})
    if setup.adapter_targets != ALL_LINEAR:
        targets, parameters = (targeted(setup, names) for names in (linear, experts))
    elif experts:
        # By itself, peft would adapt routers, and experts of few types of models.
        routing = {*routers(model)}
        targets, parameters = (sorted(last_parts(set(names) - routing)) for names in (linear, experts))
        beside = sorted({*beside, *routing & {*linear}})
    else:
        targets, parameters = ALL_LINEAR, []
    config = peft.LoraConfig(
        r=setup.adapter_rank,
        lora_alpha=setup.adapter_alpha,
        target_modules=targets,
        target_parameters=parameters or None,
        exclude_modules=beside or None,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def adaptable(model: Any) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers in the language model, except the LM head, and those of the weights of its
    experts."""
    beside = beside_text(model)
    linear = [name for name in _linear_layers(model) if f"{name}.weight" not in beside]
    experts = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
        for name, weight in module.named_parameters(recurse=False)
        if len(_shape(weight)) == 3 and f"{path}.{name}" not in beside
    ]
    return linear, experts


def targeted(setup: Setup, names: Iterable[str]) -> list[str]:
    """Return the targets of the setup that are among names, as peft matches them: by their last parts."""
    names = [f".{name}" for name in names]
    return [target for target in names_of_targets(setup) if any(name.endswith(f".{target}") for name in names)]


def names_of_targets(setup: Setup) -> list[str]:
    """Return the names that --adapter-targets lists."""
    return [name.strip() for name in setup.adapter_targets.split(",")]


def note_of_adapters(model: Any, setup: Setup, trained: str, in_four_bits: Collection[int] = ()) -> str:
    """Return a sentence with the layers that have adapters, how many weights are trained in the dtype `trained` and how
    many are frozen, and the share of the layers' weights that have none."""
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }
    weights = {id(_adapted_weight(layer)) for layer in layers.values()}
    experts = [
        f"{name}.{layer.parameter_name}".removesuffix(".weight")
        for name, layer in layers.items()
        if _is_of_a_parameter(layer)
    ]
    linear = [name for name, layer in layers.items() if not _is_of_a_parameter(layer)]
    counted = (("linear layer", linear), ("weight", experts))
    places = [
        f"{len(names)} {kind}{'s' if len(names) > 1 else ''} ({listed(last_parts(names), most=4)})"
        for kind, names in counted
        if names
    ]
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = {id(weight) for embedding in embeddings if embedding is not None for weight in embedding.parameters()} | {
        *map(id, beside_text(model).values())
    }
    rest = {
        name: weight for name, weight in model.named_parameters() if "lora_" not in name and id(weight) not in outside
    }
    without = {name: _size(weight) for name, weight in rest.items() if id(weight) not in weights}
    share = 100 * sum(without.values()) / max(1, sum(map(_size, rest.values())))
    largest = [
        name.removesuffix(".weight")
        for name in sorted(without, key=without.__getitem__, reverse=True)
        if len(_shape(rest[name])) > 1
    ]
    none = listed(last_parts(largest), most=4)
    left = f" {share:.0f} % of the layers' weights have none: {none}." if share >= 1 else ""
    widths = weight_counts(model, in_four_bits)
    trainable = sum(count for (is_trained, _), count in widths.items() if is_trained)
    frozen = [f"{width} ({count:,})" for (is_trained, width), count in sorted(widths.items()) if not is_trained]
    return (
        f"Training adapters of rank {setup.adapter_rank} on {' and '.join(places)}, in {trained} ({trainable:,}); the "
        f"frozen weights are in {' and '.join(frozen)}.{left}"
    )


def weight_counts(model: Any, in_four_bits: Collection[int] = ()) -> Counter[tuple[bool, str]]:
    """Return how many weights are trained (True) and how many are frozen, in 4 bits and in each dtype.

    in_four_bits  the ids of weights that a plan counts as quantized
    """
    counts: Counter[tuple[bool, str]] = Counter()
    with described(model):
        for weight in model.parameters():
            is_packed = hasattr(weight, "quant_state") or is_described(weight) or id(weight) in in_four_bits
            width = "4 bits" if is_packed else str(weight.dtype).removeprefix("torch.")
            counts[weight.requires_grad, width] += _size(weight)
    return counts


def _linear_layers(model: Any) -> set[str]:
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return {
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    }


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the last parts of names, each once."""
    return list(dict.fromkeys(name.replace(".base_layer", "").rpartition(".")[2] for name in names))


def _is_of_a_parameter(layer: Any) -> bool:
    return getattr(layer, "parameter_name", None) is not None


def _adapted_weight(layer: Any) -> Any:
    """The weight that an adapter of peft adds to; several of one module are around each other."""
    base = layer.base_layer
    while _is_of_a_parameter(layer) and hasattr(base, "base_layer"):
        base = base.base_layer
    return getattr(base, layer.parameter_name) if _is_of_a_parameter(layer) else base.weight


def _shape(weight: Any) -> tuple[int, ...]:
    """The shape of a weight that may be sharded by DeepSpeed or quantized by bitsandbytes."""
    quantized = getattr(getattr(weight, "quant_state", None), "shape", None)
    return tuple(quantized or getattr(weight, "ds_shape", weight.shape))


def _size(weight: Any) -> int:
    return prod(_shape(weight))
