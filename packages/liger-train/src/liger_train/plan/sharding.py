# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank for weights, gradients and optimizer state, sharded and offloaded by torch or DeepSpeed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from liger_core.private_torch import storage_id
from liger_hf.four_bits import expert_matrices, routers
from liger_train.plan.gathering import LayerGathering, ZeroGathering
from liger_train.plan.ledger import GRADIENTS, Ledger, rounded
from liger_train.plan.optimizers import OPTIMIZERS, Optimizer, Weight, weights_of
from liger_train.setup import ZERO, Setup

# DeepSpeed computes norms of this many elements at a time.
NORM_SIZE = 250_000_000
# NF4 in blocks of 64, each with an 8-bit scale; these scales are in blocks of 256, each with a 32-bit scale.
BITS_OF_NF4 = 4 + 8 / 64 + 32 / (64 * 256)


class Sharding:
    """No sharding.

    With several ranks, DistributedDataParallel has buckets for all gradients. It reduces them in a step's last
    micro-batch, and gradients are then views of them.
    """

    def __init__(self, setup: Setup, model: Any) -> None:
        self.setup = setup
        self.drops_gradients = OPTIMIZERS[setup.optimizer].drops_gradients
        self.trained = weights_of(model)

    def enter(self, model: Any, ledger: Ledger) -> None:
        """Record the memory before a step, and register hooks that record its changes."""
        self.ledger = ledger
        self.reduces = self.setup.sharing_ranks > 1 and self.setup.accumulation == 1
        if self.setup.sharing_ranks > 1:
            ledger.allocate(sum(w.elements * w.itemsize for w in self.trained), GRADIENTS)

    def accumulated(self, weight: Any) -> None:
        """Record that a gradient is complete; when ranks reduce it, a view of its bucket replaces it."""
        if self.drops_gradients or self.reduces:
            weight.grad = None

    def completed(self) -> None:
        """Record that all gradients of a micro-batch are complete."""
        self.reduces = self.setup.sharing_ranks > 1


class Zero(Sharding):
    """ZeRO stages 1 and 2: 16-bit weights, and a sharded 32-bit copy in the optimizer, on the device or the host."""

    def __init__(self, setup: Setup, model: Any) -> None:
        super().__init__(setup, model)
        self.stage = int(setup.shard.removeprefix("zero"))
        self.on_host = setup.offload != "none"
        self.shard_elements = -(-sum(w.elements for w in self.trained) // setup.sharing_ranks)
        self.itemsize = max((w.itemsize for w in self.trained), default=2)
        width = model.config.get_text_config().hidden_size
        # Transformers' value for "auto". Stages 1 and 2 have two buckets, for two streams.
        self.bucket = width * width
        # Sizes of the gradients in the bucket, and a gradient that is larger than the bucket.
        self.filled: list[int] = []
        self.large_gradient: Tensor | None = None

    def enter(self, model: Any, ledger: Ledger) -> None:
        self.ledger = ledger
        buffers = 1 if self.stage == 3 else 2
        ledger.allocate(rounded(self.bucket * self.itemsize) * buffers, GRADIENTS)
        if self.on_host and self.stage < 3:
            # A buffer for copying gradients to the host, of the size of the largest.
            ledger.allocate(max((rounded(w.elements * w.itemsize) for w in self.trained), default=0), GRADIENTS)

    def accumulated(self, weight: Any) -> None:
        """Add a gradient to the bucket, unless it is larger; reduce the bucket first if there is no room."""
        if self.stage == 1 and not self.on_host:
            return
        elements = weight.numel()
        if sum(self.filled) + elements > self.bucket:
            self._reduce()
        if elements > self.bucket:
            self.large_gradient = weight.grad
        self.filled.append(elements)
        weight.grad = None
        if self.stage == 2 and not self.on_host:
            self.ledger.allocate(rounded(-(-elements // self.setup.sharing_ranks) * self.itemsize), GRADIENTS)

    def _reduce(self) -> None:
        """Reduce the bucket.

        An offloaded gradient is converted to float64 for its norm; stage 3 first reads it back.
        """
        if self.on_host and self.filled:
            elements = -(-max(self.filled) // self.setup.sharing_ranks)
            copied = self.itemsize if self.stage == 3 else 0
            self.ledger.allocate_briefly(rounded(elements * copied) + rounded(8 * min(elements, NORM_SIZE)), GRADIENTS)
        self.filled, self.large_gradient = [], None

    def completed(self) -> None:
        self._reduce()


class Zero3(Zero):
    """ZeRO stage 3: weights are sharded as well, and gathered when a module runs."""

    gathering: ZeroGathering | None = None

    def enter(self, model: Any, ledger: Ledger) -> None:
        super().enter(model, ledger)
        # DeepSpeed's mark of weights that are gathered while a module uses them.
        for number, weight in enumerate(model.get_output_embeddings().parameters()):
            weight.ds_id = number
        offloaded = self.setup.offload in ("parameters", "nvme")
        width = model.config.get_text_config().hidden_size
        small = 10 * width
        for weight in model.parameters():
            size = weight.numel() * weight.itemsize
            if weight.numel() > small:
                # A single rank without offloading computes with its shard, which is the whole weight.
                shard_bytes = 0 if offloaded else -(-size // self.setup.sharing_ranks)
                ledger.move(weight, rounded(size) - rounded(shard_bytes))
        if not self.on_host:
            ledger.allocate(rounded(self.shard_elements * self.itemsize), GRADIENTS)
        if offloaded or self.setup.sharing_ranks > 1:
            from liger_train.zero import live_elements

            order: list[list[Tensor]] = []
            if self.gathering is not None:
                # The step before this one has shown the order of modules.
                self.gathering.hooks.close()
                order = self.gathering.order
            live = live_elements(self.setup) if offloaded else 10**9
            self.gathering = ZeroGathering(ledger, small, live, int(0.9 * width * width), order)
            self.gathering.register(model)

    def completed(self) -> None:
        """Release all weights; no gradient of an input signals that the embedding is done."""
        super().completed()
        if self.gathering is not None:
            self.gathering.release_all()


class Fsdp2(Sharding):
    """FSDP2: weights, gradients and optimizer state are sharded, and layers gathered in the dtype of matmuls."""

    def enter(self, model: Any, ledger: Ledger) -> None:
        self.ledger = ledger
        self.offloaded = self.setup.offload == "parameters"
        for weight in model.parameters():
            shard_bytes = 0 if self.offloaded else rounded(self._shard_bytes(weight))
            ledger.move(weight, rounded(weight.numel() * weight.itemsize) - shard_bytes)
        self.layers = LayerGathering(ledger, self.setup.sharing_ranks)
        self.layers.register(model)

    def accumulated(self, weight: Any) -> None:
        """Record that a gradient is complete, which the ranks reduce at once."""
        with self.layers.reducing(weight, self._itemsize(weight)):
            if not self.offloaded:
                self.ledger.allocate(rounded(self._shard_bytes(weight)), GRADIENTS)
        weight.grad = None

    def completed(self) -> None:
        self.layers.release_all()

    def _shard_bytes(self, weight: Tensor) -> int:
        """Return the bytes of a weight's or gradient's shard."""
        return -(-weight.numel() // self.setup.sharing_ranks) * self._itemsize(weight)

    def _itemsize(self, weight: Tensor) -> int:
        """Return the bytes of an element of a weight, and of a reduced gradient: float32 if trained, not bf16-pure."""
        return weight.itemsize if self.setup.pure or not weight.requires_grad else 4


def sharding_of(setup: Setup, model: Any) -> Sharding:
    if setup.shard in ZERO:
        return (Zero3 if setup.shard == "zero3" else Zero)(setup, model)
    return (Fsdp2 if setup.shard == "fsdp2" else Sharding)(setup, model)


def optimizer_memory(setup: Setup, kind: Optimizer, weights: Sequence[Weight]) -> tuple[int, int]:
    """Return a rank's bytes of optimizer state, and of the workspace of the update."""
    if setup.shard != "none" and setup.offload != "none":
        return 0, 0
    shards = list(weights)
    if setup.shard in ZERO:
        # DeepSpeed's optimizer has one flat float32 weight, and flattens the shard of the gradients, too.
        elements = -(-sum(w.elements for w in weights) // setup.sharing_ranks)
        itemsize = max((w.itemsize for w in weights), default=2)
        flat = Weight(elements, (elements,), 4)
        copied = itemsize < 4
        workspace = kind.step(flat) + (elements * (4 + itemsize) if copied else 4 * elements)
        return kind.state(flat) + (rounded(4 * elements) if copied else 0), workspace
    if setup.shard == "fsdp2":
        itemsize = 2 if setup.pure else 4
        shards = [replace(w, elements=-(-w.elements // setup.sharing_ranks), itemsize=itemsize) for w in weights]
    return sum(map(kind.state, shards)), max(map(kind.step, shards), default=0)


def quantized_weights(model: Any) -> list[Tensor]:
    """Return the frozen weights that are quantized: of experts and linear layers, except the LM head and routers."""
    others = {model.get_output_embeddings(), *map(model.get_submodule, routers(model))}
    linear = (m.weight for m in model.modules() if isinstance(m, nn.Linear) and m not in others)
    experts = (getattr(module, name) for module in model.modules() for name in expert_matrices(module))
    return [weight for weight in (*linear, *experts) if not weight.requires_grad]


def record_four_bits(model: Any, ledger: Ledger) -> set[int]:
    """Record quantized weights in 4 bits; return their storages, which are dequantized at each use."""
    storages = set()
    for weight in quantized_weights(model):
        size = rounded(weight.numel() * weight.itemsize)
        ledger.move(weight, size - rounded(int(weight.numel() * BITS_OF_NF4 / 8)))
        storages.add(storage_id(weight.untyped_storage()))
    return storages
