# SPDX-License-Identifier: Apache-2.0
"""The memory of a step on fake tensors, operation by operation and by category."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from liger_core.private_torch import storage_id

# Categories of memory. A storage has its category from its allocation on, even if that is determined later.
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
CHECKPOINTS, ACTIVATIONS, LOGITS, OTHER = "checkpoints", "activations", "logits and loss", "other"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS, ACTIVATIONS, LOGITS, OTHER)
# Sizes are multiples of this in CUDA's caching allocator.
BLOCK = 512

Bytes = dict[str, int]


@dataclass(frozen=True)
class Moment:
    """The memory at one time, by category, and the phase of the step."""

    held: Bytes
    doing: str

    @property
    def total(self) -> int:
        return sum(self.held.values())


class Ledger(TorchDispatchMode):
    """Within this context, tracks the allocation and release of every storage, and the memory within operations.

    replace  (operation, arguments) → its result, or NotImplemented to run the operation itself
    scratch  (operation, arguments) → bytes of its workspace
    known_as  the category of a new tensor that its shape determines, or None
    """

    def __init__(
        self,
        replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = lambda *call: NotImplemented,
        scratch: Callable[[Any, tuple[Any, ...], dict[str, Any]], int] = lambda *call: 0,
        known_as: Callable[[Tensor], str | None] = lambda tensor: None,
    ) -> None:
        super().__init__()
        self.replace, self.scratch, self.known_as = replace, scratch, known_as
        self.doing = ""
        self.notes: list[str] = []
        # (storage, bytes allocated or released, phase of the step)
        self.events: list[tuple[int, int, str]] = []
        self.labels: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        # Offloaded storages and their bytes; weights that are dequantized at each use; bytes allocated between steps.
        self.away: dict[int, int] = {}
        self.expanded: set[int] = set()
        self.static = self._begin = 0
        self._known: dict[int, tuple[int, Any]] = {}
        self._last = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self.replace(func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.note(value)
        inside = self.scratch(func, args, kwargs) + self._expanded(args)
        if inside:
            self.pass_by(inside, LOGITS if "cross_entropy" in str(func) else OTHER)
        return result

    def _expanded(self, args: tuple[Any, ...]) -> int:
        """The bytes of dequantized weights among the arguments."""
        if not self.expanded or len(args) < 2:
            return 0
        used = [t for t in args if isinstance(t, Tensor) and storage_id(t.untyped_storage()) in self.expanded]
        return sum(t.untyped_storage().nbytes() for t in used)

    def note(self, tensor: Tensor, label: str | None = None) -> int:
        """Record the storage of a tensor, or label it if it is known; returns its number."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        known = self._known.get(key)
        if known is None:
            self._last += 1
            number, size = self._last, rounded(storage.nbytes())
            self._known[key] = number, weakref.ref(storage, self._died(number, key))
            self.sizes[number] = size
            self.events.append((number, size, self.doing))
            label = label or self.known_as(tensor)
        else:
            number = known[0]
        if label is not None:
            self.labels[number] = label
        return number

    def label(self, tensors: Iterable[Tensor], label: str) -> None:
        for tensor in tensors:
            self.note(tensor, label)

    def alive(self) -> set[int]:
        """The storages that are allocated now."""
        return {number for number, _ in self._known.values()}

    def hold(self, size: int, label: str) -> int:
        """Record memory that does not belong to a tensor of this step; returns its number."""
        self._last += 1
        self.labels[self._last], self.sizes[self._last] = label, size
        self.events.append((self._last, size, self.doing))
        return self._last

    def give_back(self, number: int) -> None:
        """Record the release of such memory."""
        self.events.append((number, -self.sizes[number], self.doing))

    def move(self, tensor: Tensor, size: int) -> None:
        """Record offloaded bytes of a storage, fetched bytes if negative; the rest is released with the storage."""
        number = self.note(tensor)
        self.events.append((number, -size, self.doing))
        self.sizes[number] -= size

    def leave(self, tensor: Tensor) -> None:
        """Record that a storage is offloaded as a whole."""
        number = self.note(tensor)
        self.away[number] = self.sizes[number]
        self.move(tensor, self.sizes[number])

    def fetch(self, number: int) -> None:
        """Record that a storage is back, if it was offloaded as a whole."""
        size = self.away.pop(number, 0)
        self.events.append((number, size, self.doing))
        self.sizes[number] += size

    def pass_by(self, size: int, label: str) -> None:
        """Record memory that is allocated and released at once."""
        self.give_back(self.hold(size, label))

    def _died(self, number: int, address: int) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            self.away.pop(number, None)
            self.events.append((number, -self.sizes[number], self.doing))
            if self._known.get(address, (0,))[0] == number:
                del self._known[address]

        return died

    def begin(self) -> None:
        """Start the step: what is allocated now stays allocated between steps."""
        self.static, self._begin = sum(size for _, size, _ in self.events), len(self.events)

    def peak(self) -> Moment:
        """The moment of the step with the most memory."""
        held: Counter[str] = Counter()
        best, most, total = Moment({}, ""), -1, 0
        for index, (number, size, doing) in enumerate(self.events):
            held[self.labels.get(number, OTHER)] += size
            total += size
            if total > most and index >= self._begin:
                best, most = Moment(dict(held), doing), total
        return best

    def end(self) -> Moment:
        """The memory allocated now."""
        held: Counter[str] = Counter()
        for number, size, _ in self.events:
            held[self.labels.get(number, OTHER)] += size
        return Moment(dict(held), self.doing)


def rounded(size: int) -> int:
    """The bytes that the allocator uses for an allocation of this size."""
    return -(-size // BLOCK) * BLOCK
