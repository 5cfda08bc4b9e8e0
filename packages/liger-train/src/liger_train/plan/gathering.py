# SPDX-License-Identifier: Apache-2.0
"""Sharded or offloaded weights, which are on the device only while modules use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from liger_train.checkpointing import layers
from liger_train.plan.ledger import OTHER, WEIGHTS, Ledger, rounded


class Gathering:
    """The gathering of ZeRO stage 3, by DeepSpeed's rules (deepspeed/runtime/zero/partitioned_param_coordinator.py).

    The weights of a module are fetched before its forward and backward pass. Once the order of modules is known, as
    many of the next weights as fit into the prefetch bucket are prefetched. Weights are released afterwards, unless
    reused within the reuse distance.
    """

    def __init__(
        self, ledger: Ledger, persistent: int, live: int, prefetch: int, order: list[list[Tensor]] | None = None
    ) -> None:
        self.ledger, self.persistent, self.live, self.prefetch = ledger, persistent, live, prefetch
        self.known = order
        self.order: list[list[Tensor]] = []
        self.here: dict[int, tuple[Tensor, int]] = {}
        self.users: defaultdict[int, set[int]] = defaultdict(set)
        self.handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        for module in model.modules():
            weights: list[Tensor] = [w for w in module.parameters(recurse=False) if w.numel() > self.persistent]
            if weights:
                _around(module, self._before(module, weights), self._after(module, weights), self.handles)

    def end(self) -> None:
        """Stop watching."""
        _removed(self.handles)

    def release_all(self) -> None:
        for weight, _ in list(self.here.values()):
            self._release(weight)

    def _before(self, module: nn.Module, weights: list[Tensor]) -> Callable[[], None]:
        def before() -> None:
            self.order.append(weights)
            for weight in weights:
                self._fetch(weight)
                self.users[id(weight)].add(id(module))
            if self.known is not None:
                self._prefetch()

        return before

    def _after(self, module: nn.Module, weights: list[Tensor]) -> Callable[[], None]:
        def after() -> None:
            soon = self._used_soon()
            for weight in weights:
                self.users[id(weight)].discard(id(module))
                if not self.users[id(weight)] and id(weight) not in soon:
                    self._release(weight)

        return after

    def _fetch(self, weight: Tensor) -> None:
        if id(weight) not in self.here:
            self.here[id(weight)] = weight, self.ledger.hold(rounded(weight.numel() * weight.itemsize), WEIGHTS)

    def _prefetch(self) -> None:
        assert self.known is not None
        room = min(self.live - sum(w.numel() for w, _ in self.here.values()), self.prefetch)
        fetched = 0
        for weights in self.known[len(self.order) :]:
            for weight in weights:
                if fetched >= room:
                    return
                if id(weight) not in self.here:
                    self._fetch(weight)
                    fetched += weight.numel()

    def _release(self, weight: Tensor) -> None:
        fetched = self.here.pop(id(weight), None)
        if fetched is not None:
            self.ledger.give_back(fetched[1])

    def _used_soon(self) -> set[int]:
        soon: set[int] = set()
        distance = 0
        for weights in (self.known or [])[len(self.order) :]:
            if distance >= self.live:
                break
            soon.update(map(id, weights))
            distance += sum(w.numel() for w in weights)
        return soon


class Layerwise:
    """The gathering of FSDP2: each layer is gathered before it runs, and the next one is prefetched; all other weights
    stay gathered."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.handles: list[Any] = []

    def end(self) -> None:
        _removed(self.handles)

    def watch(self, model: nn.Module) -> None:
        every = layers(model)
        inside = {id(w) for layer in every for w in layer.parameters()}
        self.ledger.hold(
            sum(rounded(w.numel() * w.itemsize) for w in model.parameters() if id(w) not in inside), WEIGHTS
        )
        for layer in every:
            size = sum(rounded(w.numel() * w.itemsize) for w in layer.parameters())
            held: list[int] = []

            def before(size: int = size, held: list[int] = held) -> None:
                # This layer, and the next one, which is being gathered.
                if not held:
                    held.extend([self.ledger.hold(size, WEIGHTS), self.ledger.hold(size, OTHER)])

            def after(held: list[int] = held) -> None:
                while held:
                    self.ledger.give_back(held.pop())

            _around(layer, before, after, self.handles)


def _around(module: nn.Module, before: Callable[[], None], after: Callable[[], None], handles: list[Any]) -> None:
    """Call `before` and `after` around the forward and the backward pass of a module."""

    def started(_: nn.Module, args: Any) -> None:
        before()

    def ended(_: nn.Module, args: Any, output: Any) -> None:
        result = next((value for value in tree_iter(output) if isinstance(value, Tensor) and value.requires_grad), None)
        argument = next((value for value in tree_iter(args) if isinstance(value, Tensor) and value.requires_grad), None)
        if result is not None:
            result.register_hook(lambda grad: before())
        if argument is not None:
            argument.register_hook(lambda grad: after())
        after()

    # They stand for hooks that bring weights, for which no loss needs real logits.
    started.__module__ = ended.__module__ = "deepspeed"
    handles.extend([module.register_forward_pre_hook(started), module.register_forward_hook(ended)])


def _removed(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
