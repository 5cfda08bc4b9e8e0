# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank for weights, gradients and optimizer state, with sharding and offloading by torch, DeepSpeed or
nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from liger_core.private_torch import storage_id
from liger_hf.four_bits import expert_matrices
from liger_train.plan.gathering import Gathering, Layerwise
from liger_train.plan.ledger import GRADIENTS, Ledger, rounded
from liger_train.plan.optimizers import OPTIMIZERS, Optimizer, Weight, weights_of
from liger_train.setup import ZERO, Setup

# DeepSpeed computes norms of this many elements at a time.
NORMED = 250_000_000
# NF4 in blocks of 64, each with an 8-bit scale; these scales are in blocks of 256, each with a 32-bit scale.
BITS_OF_NF4 = 4 + 8 / 64 + 32 / (64 * 256)


class Sharding:
    """No sharding.

    With several ranks, DistributedDataParallel has buckets for all gradients from the first step on; gradients are
    their views.
    """

    # Whether weights are gathered, and whether the second step differs from the first.
    gathers = learns = False
    # Bytes of the first step's buckets. The second step replaces them, but NCCL releases them only when its watchdog
    # thread next looks at finished work, which can be after the peak.
    first_buckets = 0

    def __init__(self, setup: Setup, model: Any) -> None:
        self.setup = setup
        self.drops_gradients = OPTIMIZERS[setup.optimizer].drops_gradients
        self.trained = weights_of(model)

    def enter(self, model: Any, ledger: Ledger) -> None:
        """Record the memory before a step; hooks record what changes within it."""
        self.ledger = ledger
        if self.setup.sharing_ranks > 1:
            buckets = sum(w.elements * w.itemsize for w in self.trained)
            ledger.hold(buckets, GRADIENTS)
            if self.setup.device == "cuda":
                self.first_buckets = buckets

    def after_a_step(self) -> Sharding:
        """Return the sharding of later steps, in which the order of modules is known."""
        return self

    def accumulated(self, weight: Any) -> None:
        """Record that a gradient is complete. With several ranks, a view of its bucket replaces it."""
        if self.drops_gradients or self.setup.sharing_ranks > 1:
            weight.grad = None

    def completed(self) -> None:
        """Record that all gradients are complete."""


class Zero(Sharding):
    """ZeRO stages 1 and 2: 16-bit weights, and a 32-bit copy in the optimizer, sharded over ranks, on the device or the
    host."""

    def __init__(self, setup: Setup, model: Any) -> None:
        super().__init__(setup, model)
        self.stage = int(setup.shard.removeprefix("zero"))
        self.on_host = setup.offload != "none"
        self.shard_elements = -(-sum(w.elements for w in self.trained) // setup.sharing_ranks)
        self.itemsize = max((w.itemsize for w in self.trained), default=2)
        width = model.config.get_text_config().hidden_size
        # The value that Transformers fills in for "auto"; stages 1 and 2 have two buckets, for two streams.
        self.bucket = width * width
        # Gradients in the bucket; a gradient larger than the bucket stays outside.
        self.filled: list[int] = []
        self.waiting: Tensor | None = None

    def enter(self, model: Any, ledger: Ledger) -> None:
        self.ledger = ledger
        buffers = 1 if self.stage == 3 else 2
        ledger.hold(rounded(self.bucket * self.itemsize) * buffers, GRADIENTS)
        if self.on_host and self.stage < 3:
            # A buffer for copying gradients to the host, as large as the largest.
            ledger.hold(max((rounded(w.elements * w.itemsize) for w in self.trained), default=0), GRADIENTS)

    def accumulated(self, weight: Any) -> None:
        """Add a gradient to the bucket, unless it is larger; reduce the bucket first if there is no room."""
        if self.stage == 1 and not self.on_host:
            return
        elements = weight.numel()
        if sum(self.filled) + elements > self.bucket:
            self._reduce()
        if elements > self.bucket:
            self.waiting = weight.grad
        self.filled.append(elements)
        weight.grad = None
        if self.stage == 2 and not self.on_host:
            self.ledger.hold(rounded(-(-elements // self.setup.sharing_ranks) * self.itemsize), GRADIENTS)

    def _reduce(self) -> None:
        """Reduce the bucket.

        An offloaded gradient is converted to float64 for its norm; stage 3 first reads it back.
        """
        if self.on_host and self.filled:
            elements = -(-max(self.filled) // self.setup.sharing_ranks)
            copied = self.itemsize if self.stage == 3 else 0
            self.ledger.pass_by(rounded(elements * copied) + rounded(8 * min(elements, NORMED)), GRADIENTS)
        self.filled, self.waiting = [], None

    def completed(self) -> None:
        self._reduce()


class Zero3(Zero):
    """ZeRO stage 3: weights are sharded, too, and gathered when a module runs."""

    gathers = learns = True
    gathering: Gathering | None = None
    order: list[list[Tensor]] | None = None

    def enter(self, model: Any, ledger: Ledger) -> None:
        super().enter(model, ledger)
        # DeepSpeed's mark of a weight that is there while a module uses it.
        for number, weight in enumerate(model.get_output_embeddings().parameters()):
            weight.ds_id = number
        away = self.setup.offload in ("parameters", "nvme")
        width = model.config.get_text_config().hidden_size
        small = 10 * width
        for weight in model.parameters():
            size = weight.numel() * weight.itemsize
            if weight.numel() > small:
                # A single rank without offload computes with its shard, which is the whole weight.
                shard_bytes = 0 if away else -(-size // self.setup.sharing_ranks)
                ledger.move(weight, rounded(size) - rounded(shard_bytes))
        if not self.on_host:
            ledger.hold(rounded(self.shard_elements * self.itemsize), GRADIENTS)
        if away or self.setup.sharing_ranks > 1:
            from liger_train.zero import live

            self.gathering = Gathering(
                ledger, small, live(self.setup) if away else 10**9, int(0.9 * width * width), self.order
            )
            self.gathering.watch(model)

    def after_a_step(self) -> Sharding:
        if self.gathering is None:
            return self
        self.gathering.end()
        self.order = self.gathering.order
        return self

    def completed(self) -> None:
        """Release the weights of the embedding last, since no gradient of its input signals its end."""
        super().completed()
        if self.gathering is not None:
            self.gathering.release_all()


class Fsdp2(Sharding):
    """FSDP2: weights, gradients and optimizer state are sharded in float32; layers are gathered in the dtype of the
    matmuls."""

    gathers = True

    def enter(self, model: Any, ledger: Ledger) -> None:
        self.ledger = ledger
        self.away = self.setup.offload == "parameters"
        for weight in model.parameters():
            shard_bytes = 0 if self.away else rounded(self._part(weight))
            ledger.move(weight, rounded(weight.numel() * weight.itemsize) - shard_bytes)
        self.layers = Layerwise(ledger)
        self.layers.watch(model)

    def accumulated(self, weight: Any) -> None:
        weight.grad = None
        if not self.away:
            self.ledger.hold(rounded(self._part(weight)), GRADIENTS)

    def _part(self, weight: Tensor) -> int:
        """The bytes of a shard of a weight or gradient: in float32 for mixed precision, in bfloat16 for bf16-pure."""
        itemsize = weight.itemsize if self.setup.pure else 4
        return -(-weight.numel() // self.setup.sharing_ranks) * itemsize


def sharding_of(setup: Setup, model: Any) -> Sharding:
    if setup.shard in ZERO:
        return (Zero3 if setup.shard == "zero3" else Zero)(setup, model)
    return (Fsdp2 if setup.shard == "fsdp2" else Sharding)(setup, model)


def optimizer_memory(setup: Setup, kind: Optimizer, weights: Sequence[Weight]) -> tuple[int, int]:
    """The bytes of a rank for optimizer state, and for the workspace of the update."""
    parts = list(weights)
    if setup.shard in ZERO:
        # DeepSpeed's optimizer has one flat float32 weight; the shard of the gradients becomes one, too.
        elements, itemsize = (
            -(-sum(w.elements for w in weights) // setup.sharing_ranks),
            max((w.itemsize for w in weights), default=2),
        )
        if setup.offload != "none":
            return 0, 0
        flat = Weight(elements, (elements,), 4)
        copied = itemsize < 4
        inside = kind.step(flat) + (elements * (4 + itemsize) if copied else 4 * elements)
        return kind.state(flat) + (rounded(4 * elements) if copied else 0), inside
    if setup.shard == "fsdp2":
        if setup.offload != "none":
            return 0, 0
        itemsize = 2 if setup.pure else 4
        parts = [replace(w, elements=-(-w.elements // setup.sharing_ranks), itemsize=itemsize) for w in weights]
    return sum(map(kind.state, parts)), max(map(kind.step, parts), default=0)


def held_in_four_bits(model: Any) -> list[Tensor]:
    """Return the weights that are quantized: those of frozen linear layers, except the LM head, and of experts."""
    head = model.get_output_embeddings()
    linear = (m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    experts = (getattr(module, name) for module in model.modules() for name in expert_matrices(module))
    return [weight for weight in (*linear, *experts) if not weight.requires_grad]


def in_four_bits(model: Any, ledger: Ledger) -> set[int]:
    """Record frozen weights as 4 bits; returns their storages, which are dequantized at each use."""
    storages = set()
    for weight in held_in_four_bits(model):
        size = rounded(weight.numel() * weight.itemsize)
        ledger.move(weight, size - rounded(int(weight.numel() * BITS_OF_NF4 / 8)))
        storages.add(storage_id(weight.untyped_storage()))
    return storages
