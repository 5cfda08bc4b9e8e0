# SPDX-License-Identifier: Apache-2.0
"""The bytes that ranks exchange in an optimizer step, by a formula."""

from dataclasses import dataclass

import torch

from liger_train.auto_checkpoint import bytes_of_inputs
from liger_train.configs import config_of
from liger_train.float8 import RECIPES, chosen_layers, gathers_in_float8
from liger_train.model import LOW, on_meta, weights_dtype
from liger_train.setup import Setup

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
# The kinds of exchanges: the collectives of --tp and --cp wait for operations, and the others overlap with them.
ACTIVATIONS, WEIGHTS, GRADIENTS = "activations", "weights", "gradients"


@dataclass(frozen=True)
class Exchange:
    """The collectives of one kind in a step.

    what    what they exchange
    kind    the collective
    ranks   the number of ranks in a group
    stride  the distance of neighboring ranks in a group
    size    the bytes of all whole tensors
    """

    what: str
    kind: str
    ranks: int
    stride: int
    size: float

    def received(self, per_machine: int) -> tuple[float, float]:
        """Return the bytes that a rank receives from ranks of its machine, and over the network.

        Of each tensor, a machine receives the parts of the others once, over the adapters of its ranks in the group.
        An all-reduce is a reduce-scatter and an all-gather.
        """
        near = min(self.ranks, max(1, per_machine // self.stride))
        machines = self.ranks / near
        size = 2 * self.size if self.kind == REDUCE else self.size
        network = size * (machines - 1) / machines / near
        return size * (self.ranks - 1) / self.ranks - network, network


def exchanges(setup: Setup, parameters: int, trainable: int) -> list[Exchange]:
    """Return the exchanges of a setup; the numbers of weights are those of the whole model."""
    return [each for each in (*_of_activations(setup), *_of_weights(setup, parameters, trainable)) if each.ranks > 1]


def host_bytes(setup: Setup, parameters: int, trainable: int, per_machine: int) -> int:
    """Return the host memory of a machine for offloaded weights, optimizer state and inputs of layers.

    The optimizer updates float32 weights there: 16 bytes for a weight, its gradient and two moments. `--offload nvme`
    keeps all this on disk.
    """
    low = LOW.get(setup.precision, torch.float32).itemsize
    state = {"none": 0, "optimizer": 16 * trainable, "parameters": 16 * trainable + low * parameters, "nvme": 0}
    inputs = bytes_of_inputs(setup) if setup.checkpoint == "offload" else 0
    rank = state[setup.offload] // (setup.tp * setup.sharing_ranks) + inputs
    return rank * min(per_machine, setup.ranks)


def checkpoint_bytes(setup: Setup, static_bytes: int, trainable: int, per_machine: int) -> int:
    """Return the host memory of a machine for the copy from which ranks write their shards while training continues.

    The copy has the weights and the optimizer state: on the device, all that is allocated between steps.
    """
    if not setup.saves_shards:
        return 0
    rank = static_bytes if setup.offload == "none" else 12 * trainable // (setup.tp * setup.sharing_ranks)
    return rank * min(per_machine, setup.ranks)


def _of_activations(setup: Setup) -> list[Exchange]:
    """Return the exchanges of tensor and context parallelism.

    Each layer sums the hidden states over --tp after its row-wise linear layers, and the gradients of inputs after each
    column-wise one. Recomputation ends before the last sum. The embedding and the LM head add two sums, and the logits
    are gathered unless the loss is fused. --cp gathers keys and values in the forward pass and in recomputation, and
    sums their gradients.
    """
    text = config_of(setup).get_text_config()
    size, layers = LOW.get(setup.precision, torch.float32).itemsize, text.num_hidden_layers
    tokens = setup.batch * setup.sequence * setup.accumulation * size
    passes = 1 if setup.checkpoint == "none" else 2
    styles = [style[:3] for name, style in (text.base_model_tp_plan or {}).items() if "layers.*" in name]
    sums = passes * styles.count("row") - (passes > 1) + styles.count("col")
    hidden = tokens // setup.cp * text.hidden_size
    logits = 0 if setup.liger == "all" else tokens // setup.cp * text.vocab_size
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    keys = layers * 2 * tokens * heads * head // setup.tp
    return [
        Exchange(ACTIVATIONS, REDUCE, setup.tp, 1, (sums * layers + 2) * hidden),
        Exchange(ACTIVATIONS, GATHER, setup.tp, 1, logits),
        Exchange(ACTIVATIONS, GATHER, setup.cp, setup.tp, passes * keys),
        Exchange(ACTIVATIONS, SCATTER, setup.cp, setup.tp, keys),
    ]


def _of_weights(setup: Setup, parameters: int, trainable: int) -> list[Exchange]:
    """Return the exchanges of data parallelism.

    FSDP2 and ZeRO-3 gather the weights of layers for both passes of each micro-batch, and the others once; they sum
    gradients to shards. ZeRO-1 and ZeRO-2 gather updated weights. Hybrid sharding sums the shards of gradients over the
    copies, and plain data parallelism whole gradients.
    """
    ranks, stride = setup.sharing_ranks, setup.tp
    size, low = weights_dtype(setup).itemsize, LOW.get(setup.precision, torch.float32).itemsize
    gradients = trainable * size / setup.tp
    if setup.shard == "none":
        return [Exchange(GRADIENTS, REDUCE, ranks, stride, gradients)]
    if setup.shard in ("zero1", "zero2"):
        gathered = float(trainable * size)
    else:
        text = config_of(setup).get_text_config()
        once = (text.vocab_size * (1 if text.tie_word_embeddings else 2) + 1) * text.hidden_size
        in_float8 = 0
        if setup.precision in RECIPES:
            model = on_meta(setup)
            weights = (model.get_submodule(name).weight for name in chosen_layers(model, setup, []))
            in_float8 = sum(weight.numel() for weight in weights if gathers_in_float8(setup, len(weight)))
        gathered = ((2 * parameters - once) * low - 2 * in_float8 * (low - 1)) * setup.accumulation / setup.tp
    if setup.shard == "fsdp2":
        gradients = trainable * (size if setup.pure else 4) / setup.tp
    return [
        Exchange(WEIGHTS, GATHER, ranks, stride, gathered),
        Exchange(GRADIENTS, SCATTER, ranks, stride, gradients),
        Exchange(GRADIENTS, REDUCE, setup.replicate, stride * ranks, gradients / ranks),
    ]
