# SPDX-License-Identifier: Apache-2.0
"""The memory of a step on fake tensors, operation by operation and by category."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from liger_core.private_torch import storage_id

# Categories of memory. A storage has one category for its whole life, even if that is determined later.
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
CHECKPOINTS, ACTIVATIONS, LOGITS, OTHER = "checkpoints", "activations", "logits and loss", "other"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS, ACTIVATIONS, LOGITS, OTHER)
# Distinguishable with any kind of color vision (Okabe and Ito 2008).
OKABE_ITO = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#999999")
COLORS = dict(zip(CATEGORIES, OKABE_ITO, strict=True))
# Sizes in CUDA's caching allocator are multiples of this.
BLOCK = 512


@dataclass(frozen=True)
class Moment:
    """The allocated bytes by category at one time, and the phase of the step."""

    held: dict[str, int]
    doing: str

    @property
    def total(self) -> int:
        return sum(self.held.values())


class Ledger(TorchDispatchMode):
    """Tracks the allocation and release of every storage within its context, and the workspaces of operations.

    replace    (operation, arguments) → its result, or NotImplemented to run the operation itself
    workspace  (operation, arguments) → bytes of its workspace
    category   a new tensor → its category if its shape determines it, else None
    """

    def __init__(
        self,
        replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = lambda *call: NotImplemented,
        workspace: Callable[[Any, tuple[Any, ...], dict[str, Any]], int] = lambda *call: 0,
        category: Callable[[Tensor], str | None] = lambda tensor: None,
    ) -> None:
        super().__init__()
        self.replace, self.workspace, self.category = replace, workspace, category
        self.doing = ""
        self.notes: list[str] = []
        # Whether nothing is recorded, as within a fused operation.
        self.paused = False
        # (storage, bytes allocated or released, phase of the step)
        self.events: list[tuple[int, int, str]] = []
        self.labels: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        # Offloaded storages with their bytes, and storages that are dequantized at each use.
        self.offloaded: dict[int, int] = {}
        self.dequantized: set[int] = set()
        # Bytes that are allocated between steps.
        self.static = self._begin = 0
        self._known: dict[int, tuple[int, Any]] = {}
        self._last = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        result = self.replace(func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.record(value)
        temporary = self.workspace(func, args, kwargs) + self._dequantized_bytes(args)
        if temporary:
            self.allocate_briefly(temporary, LOGITS if "cross_entropy" in str(func) else OTHER)
        return result

    def _dequantized_bytes(self, args: tuple[Any, ...]) -> int:
        if not self.dequantized or len(args) < 2:
            return 0
        used = [t for t in args if isinstance(t, Tensor) and storage_id(t.untyped_storage()) in self.dequantized]
        return sum(t.untyped_storage().nbytes() for t in used)

    def record(self, tensor: Tensor, label: str | None = None) -> int:
        """Record the storage of a tensor if it is new, and label it; return its number."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        known = self._known.get(key)
        if known is None:
            self._last += 1
            number, size = self._last, rounded(storage.nbytes())
            self._known[key] = number, weakref.ref(storage, partial(self._on_release, number, key))
            self.sizes[number] = size
            self.events.append((number, size, self.doing))
            label = label or self.category(tensor)
        else:
            number = known[0]
        if label is not None:
            self.labels[number] = label
        return number

    def allocated(self) -> set[int]:
        """Return the numbers of the storages that are allocated now."""
        return {number for number, _ in self._known.values()}

    def allocate(self, size: int, label: str) -> int:
        """Record an allocation that does not belong to a tensor; return its number."""
        self._last += 1
        self.labels[self._last], self.sizes[self._last] = label, size
        self.events.append((self._last, size, self.doing))
        return self._last

    def free(self, number: int) -> None:
        """Record the release of what `allocate` recorded."""
        self.events.append((number, -self.sizes[number], self.doing))

    def move(self, tensor: Tensor, size: int) -> None:
        """Record that bytes of a storage are offloaded, or fetched if negative; its release frees the rest."""
        number = self.record(tensor)
        self.events.append((number, -size, self.doing))
        self.sizes[number] -= size

    def offload(self, tensor: Tensor) -> None:
        """Record that a whole storage is offloaded."""
        number = self.record(tensor)
        self.offloaded[number] = self.sizes[number]
        self.move(tensor, self.sizes[number])

    def fetch(self, number: int) -> None:
        """Record that a storage is fetched, if it was offloaded as a whole."""
        size = self.offloaded.pop(number, 0)
        self.events.append((number, size, self.doing))
        self.sizes[number] += size

    def allocate_briefly(self, size: int, label: str) -> None:
        """Record an allocation that is released at once."""
        self.free(self.allocate(size, label))

    def _on_release(self, number: int, address: int, _: Any) -> None:
        self.offloaded.pop(number, None)
        self.events.append((number, -self.sizes[number], self.doing))
        if self._known.get(address, (0,))[0] == number:
            del self._known[address]

    def begin(self) -> None:
        """Start the step; what is allocated now is allocated between steps."""
        self.static, self._begin = sum(size for _, size, _ in self.events), len(self.events)

    def peak(self) -> Moment:
        """Return the moment of the step with the most memory."""
        held: Counter[str] = Counter()
        best, most, total = Moment({}, ""), -1, 0
        for index, (number, size, doing) in enumerate(self.events):
            held[self.labels.get(number, OTHER)] += size
            total += size
            if total > most and index >= self._begin:
                best, most = Moment(dict(held), doing), total
        return best

    def end(self) -> Moment:
        """Return the memory that is allocated now."""
        held: Counter[str] = Counter()
        for number, size, _ in self.events:
            held[self.labels.get(number, OTHER)] += size
        return Moment(dict(held), self.doing)


def rounded(size: int) -> int:
    """Return the bytes that the allocator uses for an allocation of this size."""
    return -(-size // BLOCK) * BLOCK
