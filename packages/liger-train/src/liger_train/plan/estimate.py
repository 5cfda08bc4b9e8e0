# SPDX-License-Identifier: Apache-2.0
"""Estimate the time of a step from what its operations on fake tensors compute and move, at the rates of a GPU."""

from __future__ import annotations

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
from liger_core.private_torch import FakeTensorMode
from liger_train.configs import config_of
from liger_train.model import weights_dtype
from liger_train.plan.ledger import Ledger
from liger_train.plan.sharding import sharding_of
from liger_train.plan.step import fake_model, ledger_of_a_step
from liger_train.setup import Setup

# Operations that compute nothing and move nothing.
FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
    "alias",
)
# Multiplications of a matmul with the head in a kernel: logits, and both gradients; matmuls and passes over logits move
# these as well.
HEAD_MATMULS = {"linear_cross_entropy": 3, "linear_tokens": 1, "linear_tokens_backward": 3}
# Of AdamW, which reads four tensors and writes three, and of the clipping before it, which reads gradients twice and
# writes them once.
UPDATES = 10
BACKWARD_OF_ATTENTION = 2.5


@dataclass(frozen=True)
class Rates:
    """The rates of a GPU, per second.

    matmul, memory  operations in bfloat16, and bytes read and written, as `liger bench` measures them
    attention       operations of FlashAttention
    links, hosts    bytes that a GPU sends, and receives, in a collective within a host, and between hosts
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
    """The seconds of a step: operations plus tensor-parallel collectives, or the collectives of FSDP2 if longer.

    FSDP2's collectives overlap the rest of the step, so only the longer of the two counts.
    """

    operations: float
    tensor: float
    sharding: float

    @property
    def seconds(self) -> float:
        return max(self.operations + self.tensor, self.sharding)


def estimate(setup: Setup, rates: Rates, trainable: int) -> Estimate:
    """Estimate the time of an optimizer step. `trainable` is the number of trained weights of the whole model.

    The host is not counted: neither offloading nor what Python takes beyond `launch`.
    """
    text = config_of(setup).get_text_config()
    layers = text.num_hidden_layers
    if setup.checkpoint.isdecimal():
        share = int(setup.checkpoint) / layers
        full, none = (astuple(estimate(replace(setup, checkpoint=kind), rates, trainable)) for kind in ("full", "none"))
        return Estimate(*(share * a + (1 - share) * b for a, b in zip(full, none, strict=True)))
    one_layer, two_layers = (_clock(setup, layers, rates) for layers in (1, 2))
    micro = one_layer + (two_layers - one_layer) * (layers - 1) + _attention(setup, text) / rates.attention
    update = (
        UPDATES
        * weights_dtype(setup).itemsize
        * trainable
        / setup.tp
        / (setup.sharing_ranks if setup.shard != "none" else 1)
    )
    operations = micro * setup.accumulation + update / rates.memory
    return Estimate(
        operations,
        _tensor(setup, text, rates) * setup.accumulation,
        _sharding(setup, trainable, rates) * setup.accumulation,
    )


class _Clock(Ledger):
    """Add up the time of every operation: that of its matmul, or of the memory that it moves."""

    rates: Rates
    seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        namespace, _, name = func.name().partition(".")[0].partition("::")
        if func.is_view or namespace == "prim" or name in FREE:
            return result
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        moved = sum(map(_bytes, inputs + [t for t in tree_leaves(result) if isinstance(t, Tensor)]))
        operations = 0
        packet = getattr(getattr(torch.ops, namespace), name)
        if packet in flop_registry:
            operations = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif (count := HEAD_MATMULS.get(_kernel(func), 0)) and len(inputs) > 1:
            (rows, width), classes = inputs[0].shape, inputs[1].shape[0]
            operations = 2 * rows * width * classes * count
            # Each matmul reads or writes the logits, and so does the pass over them.
            moved += 2 * count * rows * classes * inputs[0].itemsize
        self.seconds += max(moved / self.rates.memory, operations / self.rates.matmul, self.rates.launch)
        return result


def _kernel(func: Any) -> str:
    return KERNELS[func].name.partition("::")[2] if func in KERNELS else ""


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor refers to, which are fewer than its elements' if it is expanded."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _clock(setup: Setup, layers: int, rates: Rates) -> float:
    """Return the time of a micro-batch of a model with `layers` layers, without attention."""
    with _of_layers(setup, layers) as shallow, torch.random.fork_rng(devices=[]):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model, _ = fake_model(shallow, mode)
        clock: Any = ledger_of_a_step(
            replace(shallow, accumulation=1), model, sharding_of(shallow, model), mode, _Clock, rates=rates
        )
    seconds: float = clock.seconds
    return seconds


@contextmanager
def _of_layers(setup: Setup, layers: int) -> Iterator[Setup]:
    config = config_of(setup)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(Path(folder))
        yield replace(setup, model=folder, random_weights=True)


def _attention(setup: Setup, text: Any) -> float:
    """Return the operations of causal attention in all layers and passes of a step, for half of the scores."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    scores = setup.batch * setup.sequence**2 / setup.cp * text.num_attention_heads / setup.tp / 2
    passes = 1 + BACKWARD_OF_ATTENTION + (setup.checkpoint != "none")
    return 4 * scores * head * passes * text.num_hidden_layers


def _tensor(setup: Setup, text: Any, rates: Rates) -> float:
    """Return the time of tensor parallelism's collectives.

    Each layer has two all-reduces of the hidden states in the forward pass, in the backward pass, and in recomputation.
    The head adds two, and gathers the logits unless the loss is fused.
    """
    if setup.tp == 1:
        return 0.0
    hidden = setup.batch * setup.sequence // setup.cp * text.hidden_size * 2
    passes = 2 if setup.checkpoint == "none" else 3
    reduced = 2 * (2 * passes * text.num_hidden_layers + 2) * hidden
    gathered = 0 if setup.liger == "all" else setup.batch * setup.sequence // setup.cp * text.vocab_size * 2
    return (reduced + gathered) * (setup.tp - 1) / setup.tp / _link(setup.tp, rates)


def _sharding(setup: Setup, trainable: int, rates: Rates) -> float:
    """Return the time of data parallelism's collectives.

    FSDP2 gathers weights in 16 bits for both passes and sums gradients in 32; DistributedDataParallel only sums them.
    """
    ranks = setup.sharing_ranks
    if ranks == 1:
        return 0.0
    size = (2 + 2 + 4) if setup.shard == "fsdp2" else 2 * weights_dtype(setup).itemsize
    return size * trainable / setup.tp * (ranks - 1) / ranks / _link(setup.ranks, rates)


def _link(ranks: int, rates: Rates) -> float:
    """Return the rate of a collective over this many neighboring ranks; between hosts, the slower links limit it."""
    return rates.links if ranks <= rates.per_host else rates.hosts
