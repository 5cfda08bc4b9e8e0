# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of weights, gradients and optimizer, by who splits and moves them: torch, DeepSpeed or nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from liger_train.combinations import ZERO
from liger_train.plan.gathering import Gathering, Layerwise
from liger_train.plan.ledger import GRADIENTS, Ledger, rounded
from liger_train.plan.optimizers import OPTIMIZERS, Optimizer, Weight, weights_of
from liger_train.setup import Setup

# DeepSpeed takes the norm of so many elements at a time.
NORMED = 250_000_000
# NF4 in blocks of 64 with a scale of 8 bits each, which has a scale of 32 bits in blocks of 256.
BITS_OF_NF4 = 4 + 8 / 64 + 32 / (64 * 256)


class Sharding:
    """One process holds everything; with several, DistributedDataParallel has buckets for all gradients besides, from the first step on."""

    # Whether weights come and go; and whether a second step differs.
    gathers = learns = False

    def __init__(self, setup: Setup, model: Any) -> None:
        self.setup = setup
        self.drops_gradients = OPTIMIZERS[setup.optimizer].drops_gradients
        self.trained = weights_of(model)

    def enter(self, model: Any, books: Ledger) -> None:
        """Note what is held before a step; hooks tell the books what comes and goes in it."""
        self.books = books
        if self.setup.ranks > 1:
            books.hold(sum(w.elements * w.itemsize for w in self.trained), GRADIENTS)

    def after_a_step(self) -> Sharding:
        """The same, once the order of the modules is known."""
        return self

    def accumulated(self, weight: Any) -> None:
        """A gradient is complete; that of several ranks was copied into its bucket, and gets the sum from there."""
        if self.drops_gradients:
            weight.grad = None

    def completed(self) -> None:
        """All gradients are."""


class Zero(Sharding):
    """DeepSpeed: weights in 16 bits, and in the optimizer a copy in 32, of which each rank has a part, on the device or the host."""

    def __init__(self, setup: Setup, model: Any) -> None:
        super().__init__(setup, model)
        self.stage = int(setup.shard.removeprefix("zero"))
        self.on_host = setup.offload != "none"
        self.part = -(-sum(w.elements for w in self.trained) // setup.ranks)
        self.itemsize = max((w.itemsize for w in self.trained), default=2)
        width = model.config.get_text_config().hidden_size
        # "auto", as Transformers fills it in; with two streams there are two of them in stages 1 and 2.
        self.bucket = width * width
        # Gradients in the bucket; one that is larger than it is kept as it came.
        self.filled: list[int] = []
        self.waiting: Tensor | None = None

    def enter(self, model: Any, books: Ledger) -> None:
        self.books = books
        buffers = 1 if self.stage == 3 else 2
        books.hold(rounded(self.bucket * self.itemsize) * buffers, GRADIENTS)
        if self.on_host and self.stage < 3:
            # Through here the largest gradient goes to the host.
            books.hold(max((rounded(w.elements * w.itemsize) for w in self.trained), default=0), GRADIENTS)

    def accumulated(self, weight: Any) -> None:
        """Into the bucket, unless it is larger. Where the next one has no room, what is there is shared out first."""
        if self.stage == 1 and not self.on_host:
            return
        elements = weight.numel()
        if sum(self.filled) + elements > self.bucket:
            self._share_out()
        if elements > self.bucket:
            self.waiting = weight.grad
        self.filled.append(elements)
        weight.grad = None
        if self.stage == 2 and not self.on_host:
            self.books.hold(rounded(-(-elements // self.setup.ranks) * self.itemsize), GRADIENTS)

    def _share_out(self) -> None:
        """On its way to the host a gradient is in float64 for its norm; stage 3 first reads it back."""
        if self.on_host and self.filled:
            part = -(-max(self.filled) // self.setup.ranks)
            copied = self.itemsize if self.stage == 3 else 0
            self.books.pass_by(rounded(part * copied) + rounded(8 * min(part, NORMED)), GRADIENTS)
        self.filled, self.waiting = [], None

    def completed(self) -> None:
        self._share_out()


class Zero3(Zero):
    """Weights are split, too, and come to the device when a module runs."""

    gathers = learns = True
    gathering: Gathering | None = None
    order: list[list[Tensor]] | None = None

    def enter(self, model: Any, books: Ledger) -> None:
        super().enter(model, books)
        away = self.setup.offload in ("parameters", "nvme")
        width = model.config.get_text_config().hidden_size
        small = 10 * width
        for weight in model.parameters():
            size = weight.numel() * weight.itemsize
            if weight.numel() > small:
                # One rank without offload computes with its part, which is all.
                kept = 0 if away else -(-size // self.setup.ranks)
                books.move(weight, rounded(size) - rounded(kept))
        if not self.on_host:
            books.hold(rounded(self.part * self.itemsize), GRADIENTS)
        if away or self.setup.ranks > 1:
            from liger_train.zero import live

            self.gathering = Gathering(books, small, live(self.setup) if away else 10**9, int(0.9 * width * width), self.order)
            self.gathering.watch(model)

    def after_a_step(self) -> Sharding:
        if self.gathering is None:
            return self
        self.gathering.end()
        self.order = self.gathering.order
        return self

    def completed(self) -> None:
        """What the embedding had gathered goes last, since no gradient tells that it is through."""
        super().completed()
        if self.gathering is not None:
            self.gathering.release_all()


class Fsdp2(Sharding):
    """torch: weights, gradients and optimizer are split in float32; a layer is gathered in the dtype of the products."""

    gathers = True

    def enter(self, model: Any, books: Ledger) -> None:
        self.books = books
        self.away = self.setup.offload == "parameters"
        for weight in model.parameters():
            kept = 0 if self.away else rounded(self._part(weight))
            books.move(weight, rounded(weight.numel() * weight.itemsize) - kept)
        self.layers = Layerwise(books)
        self.layers.watch(model)

    def accumulated(self, weight: Any) -> None:
        weight.grad = None
        if not self.away:
            self.books.hold(rounded(self._part(weight)), GRADIENTS)

    def _part(self, weight: Tensor) -> int:
        """A rank's part of a weight or its gradient: in float32 where the products are in less, and in bfloat16 if all is."""
        itemsize = weight.itemsize if self.setup.precision == "bf16-pure" else 4
        return -(-weight.numel() // self.setup.ranks) * itemsize


def sharding_of(setup: Setup, model: Any) -> Sharding:
    if setup.shard in ZERO:
        return (Zero3 if setup.shard == "zero3" else Zero)(setup, model)
    return (Fsdp2 if setup.shard == "fsdp2" else Sharding)(setup, model)


def optimizer_memory(setup: Setup, kind: Optimizer, weights: Sequence[Weight]) -> tuple[int, int]:
    """What a rank holds of the optimizer between two steps, and besides while it updates."""
    parts = list(weights)
    if setup.shard in ZERO:
        # DeepSpeed's has one flat weight in float32, and the part of the gradients becomes one, in float32, too.
        elements, itemsize = -(-sum(w.elements for w in weights) // setup.ranks), max((w.itemsize for w in weights), default=2)
        if setup.offload != "none":
            return 0, 0
        flat = Weight(elements, (elements,), 4)
        copied = itemsize < 4
        inside = kind.step(flat) + (elements * (4 + itemsize) if copied else 4 * elements)
        return kind.state(flat) + (rounded(4 * elements) if copied else 0), inside
    if setup.shard == "fsdp2":
        if setup.offload != "none":
            return 0, 0
        itemsize = 2 if setup.precision == "bf16-pure" else 4
        parts = [replace(w, elements=-(-w.elements // setup.ranks), itemsize=itemsize) for w in weights]
    return sum(map(kind.state, parts)), max(map(kind.step, parts), default=0)


def held_in_four_bits(name: str, module: nn.Module) -> bool:
    """bitsandbytes leaves the head as it is, and peft puts no adapter beside it."""
    return isinstance(module, nn.Linear) and name.endswith("base_layer")


def in_four_bits(model: Any, books: Ledger) -> set[int]:
    """Frozen linear weights are held in 4 bits; their storages, which are expanded at each use."""
    found = set()
    for name, module in model.named_modules():
        if held_in_four_bits(name, module):
            size = rounded(module.weight.numel() * module.weight.itemsize)
            books.move(module.weight, size - rounded(int(module.weight.numel() * BITS_OF_NF4 / 8)))
            found.add(module.weight.untyped_storage()._cdata)
    return found
