# SPDX-License-Identifier: Apache-2.0
"""Estimate the time of a step from its operations on fake tensors, at the rates of a GPU."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from liger_core.kernels import KERNELS
from liger_train.configs import config_of
from liger_train.model import on_meta, weights_dtype
from liger_train.plan.ledger import Ledger
from liger_train.plan.sharding import sharding_of
from liger_train.plan.step import fake_model, ledger_of_a_step
from liger_train.plan.traffic import ACTIVATIONS, Exchange, exchanges
from liger_train.setup import Setup

# The beginnings of the names of operations that neither compute nor move memory, besides views, and of attention, which
# has a rate of its own.
FREE = ("empty", "new_empty", "_unsafe_view", "_scaled_dot_product")
# Kernel → number of matmuls with each of its matrices. Gradients of the weights of adapted layers are not counted.
HEAD_MATMULS = {"linear_cross_entropy": 3, "linear_tokens": 1, "linear_tokens_backward": 3}
MATMULS = HEAD_MATMULS | {
    **dict.fromkeys(("grouped_linear", "lora_linear", "lora_linears", "lora_linear_scaled"), 1),
    **dict.fromkeys(("lora_linear_backward", "lora_linears_backward", "lora_linear_scaled_backward"), 1),
    "grouped_linear_backward": 2,
}
# Passes over memory of the size of the weights: AdamW reads four tensors and writes three, and clipping reads gradients
# twice and writes them once.
UPDATE_PASSES = 10
# Operations of attention's backward pass per operation of its forward pass.
BACKWARD_OF_ATTENTION = 2.5


@dataclass(frozen=True)
class Rates:
    """The rates of a GPU, per second.

    matmul, memory  operations in bfloat16, and bytes read and written, as `liger bench` measures them
    attention       operations of FlashAttention
    links, hosts    bytes that a GPU receives, and as many that it sends, within a host and between hosts
    per_host        the number of GPUs in a host
    launch          the shortest time of an operation, in seconds
    """

    matmul: float
    memory: float
    attention: float
    links: float
    hosts: float
    per_host: int = 8
    launch: float = 5e-6


@dataclass(frozen=True)
class Estimate:
    """The seconds of a step.

    The collectives of data parallelism (`sharding`) overlap operations and the other collectives (`tensor`), so the
    longer of the two counts.
    """

    operations: float
    tensor: float
    sharding: float

    @property
    def seconds(self) -> float:
        return max(self.operations + self.tensor, self.sharding)


def estimate(setup: Setup, rates: Rates, trainable: int, parameters: int | None = None) -> Estimate:
    """Estimate the time of an optimizer step.

    `trainable` is the number of trained weights of the whole model, and `parameters` that of all, if some are frozen.

    Time of the host is not included: neither offloading, nor Python beyond `launch`.
    """
    text = config_of(setup).get_text_config()
    layers = text.num_hidden_layers
    if setup.checkpoint.isdecimal():
        share = int(setup.checkpoint) / layers
        full, none = (
            astuple(estimate(replace(setup, checkpoint=each), rates, trainable, parameters))
            for each in ("full", "none")
        )
        return Estimate(*(share * a + (1 - share) * b for a, b in zip(full, none, strict=True)))
    one_layer, two_layers = (_micro_batch_time(setup, layers, rates) for layers in (1, 2))
    micro = one_layer + (two_layers - one_layer) * (layers - 1) + _attention_operations(setup, text) / rates.attention
    ranks = setup.tp * (setup.sharing_ranks if setup.shard != "none" else 1)
    update = UPDATE_PASSES * weights_dtype(setup).itemsize * trainable / ranks
    operations = micro * setup.accumulation + update / rates.memory
    all_exchanges = exchanges(setup, parameters or trainable, trainable)
    waits, overlaps = (
        sum(seconds_of(each, rates) for each in all_exchanges if (each.what == ACTIVATIONS) == is_waited_for)
        for is_waited_for in (True, False)
    )
    return Estimate(operations, waits, overlaps)


def seconds_of(exchange: Exchange, rates: Rates) -> float:
    """Return the time of an exchange, which uses both kinds of links at once."""
    near, network = exchange.received(rates.per_host)
    return max(near / rates.links, network / rates.hosts)


class _Clock(Ledger):
    """Adds up the time of every operation: of its matmul, or of the memory that it moves if that takes longer."""

    rates: Rates
    seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        namespace, _, name = func.name().partition(".")[0].partition("::")
        if func.is_view or namespace == "prim" or name.startswith(FREE):
            return result
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        moved = sum(map(_bytes, inputs + [t for t in tree_leaves(result) if isinstance(t, Tensor)]))
        operations = 0
        packet = getattr(getattr(torch.ops, namespace), name)
        if packet in flop_registry:
            operations = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif func in KERNELS and (count := MATMULS.get(kernel := KERNELS[func].name.partition("::")[2])):
            named = {field.name: value for field, value in zip(KERNELS[func].schema.arguments, args, strict=False)} | (
                kwargs or {}
            )
            rows = next(named[name] for name in ("hidden", "x", "rows") if name in named).shape[:-1].numel()
            operations = 2 * rows * _elements(named) * count
            if kernel in HEAD_MATMULS:
                # Each matmul, and a pass beside each, reads or writes the logits.
                moved += 2 * count * rows * len(named["weight"]) * inputs[0].itemsize
        self.seconds += max(moved / self.rates.memory, operations / self.rates.matmul, self.rates.launch)
        return result


def _elements(named: dict[str, Any]) -> int:
    """Return how many elements of the matrices of a kernel each row is multiplied by."""
    matrices = [each for name, each in named.items() if each is not None and name.startswith(("weight", "matrices"))]
    # A row is multiplied by one matrix of a stack of experts.
    return sum(each.shape[-2:].numel() for each in matrices)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor refers to, which are fewer than its elements' if it is expanded."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _micro_batch_time(setup: Setup, layers: int, rates: Rates) -> float:
    """Return the time of a micro-batch of a model with `layers` layers, without attention."""
    # In eager mode, in which the clock sees every operation.
    with with_layers(replace(setup, compile="none"), layers) as shallow:
        model, mode, _ = fake_model(shallow)
        clock: Any = ledger_of_a_step(
            replace(shallow, accumulation=1), model, sharding_of(shallow, model), mode, _Clock, rates=rates
        )
    return clock.seconds


@contextmanager
def with_layers(setup: Setup, layers: int) -> Iterator[Setup]:
    """Yield the setup with another number of layers, whose kinds repeat in the model's order."""
    config = config_of(setup)
    text = config.get_text_config()
    kinds = {name: v for name, v in vars(text).items() if isinstance(v, list) and len(v) == text.num_hidden_layers}
    text.num_hidden_layers = layers
    for name, values in kinds.items():
        setattr(text, name, [values[index % len(values)] for index in range(layers)])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(Path(folder))
        yield replace(setup, model=folder, random_weights=True)


def _attention_operations(setup: Setup, text: Any) -> float:
    """Return the operations of causal attention (half of the scores) in all layers and passes of a step."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    scores = setup.batch * setup.sequence**2 / setup.cp * text.num_attention_heads / setup.tp / 2
    passes = 1 + BACKWARD_OF_ATTENTION + (setup.checkpoint != "none")
    return 4 * scores * head * passes * text.num_hidden_layers


def work(setup: Setup) -> tuple[float, float]:
    """Return the operations of a step's matmuls: per token, and per token and token of its sequence."""
    model, text = on_meta(setup), config_of(setup).get_text_config()
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    layers = sum(
        # A token takes some of the experts, whose matrices are stacked.
        weight.numel() * (1 if weight.dim() == 2 else min(1, getattr(text, "num_experts_per_tok", 1) / len(weight)))
        for weight in model.parameters()
        if weight.dim() > 1 and weight is not head and weight is not embedding
    )
    # Outputs, and gradients of inputs and of trained weights.
    passes = 3 if setup.adapter == "none" else 2
    per_token = 2 * (layers * (passes + (setup.checkpoint != "none")) + head.numel() * passes)
    return per_token, _attention_operations(replace(setup, batch=1, sequence=1), text)
