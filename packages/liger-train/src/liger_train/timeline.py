# SPDX-License-Identifier: Apache-2.0
"""Device memory over time, by category, from the allocator's events."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# In the order of a picture, from the bottom.
CATEGORIES = ("weights", "gradients", "optimizer", "checkpoints", "logits and loss", "other")
WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS, LOGITS, OTHER = CATEGORIES
# The maximum number of points, which is all that a picture can show.
POINTS = 1000

# (bytes of a block, time of its allocation) → category, or None.
Guess = Callable[[int, float], str | None]


@dataclass(frozen=True)
class Event:
    """An allocation, or a release if `bytes` is negative, at a time in microseconds."""

    time: float
    address: int
    bytes: int


@dataclass(frozen=True)
class Tag:
    """The category of the memory at an address at a time."""

    time: float
    address: int
    category: str


@dataclass(frozen=True)
class Timeline:
    """Bytes of each category over time, in milliseconds since the first point; `steps` are the starts of steps."""

    milliseconds: list[float]
    bytes: dict[str, list[int]]
    steps: list[float] = field(default_factory=list)

    @property
    def totals(self) -> list[int]:
        return [sum(values) for values in zip(*self.bytes.values(), strict=True)]

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of each category at the peak of the total."""
        totals = self.totals
        index = totals.index(max(totals)) if totals else None
        return {name: 0 if index is None else values[index] for name, values in self.bytes.items()}


@dataclass
class _Block:
    start: float
    end: float
    bytes: int
    category: str | None = None


def timeline(
    initial: Mapping[int, int],
    events: Iterable[Event],
    tags: Iterable[Tag],
    guess: Guess = lambda size, time: None,
    steps: Sequence[float] = (),
    start: float = float("-inf"),
) -> Timeline:
    """Return the memory over time from `start` on.

    initial  address → bytes of the blocks allocated before the first event
    tags     a block gets the earliest tag within its lifetime
    guess    returns the category of a block without a tag
    steps    the starts of steps, in microseconds
    """
    blocks = _blocks(initial, sorted(events, key=lambda event: event.time))
    for tag in sorted(tags, key=lambda tag: tag.time):
        at_address = blocks.get(tag.address, [])
        index = bisect_right(at_address, tag.time, key=lambda block: block.start) - 1
        if index >= 0 and tag.time < at_address[index].end and at_address[index].category is None:
            at_address[index].category = tag.category
    return _by_category([block for at_address in blocks.values() for block in at_address], guess, steps, start)


def logits_sizes(vocabulary: int, hidden: int, tokens: int | None) -> Guess:
    """Return a guess that recognizes logits, and tensors computed from them, by a multiple of the vocabulary size.

    The gradient of the LM head also has such a size, with `hidden` rows. The baseline loss has logits for all `tokens`
    of a batch. For the fused loss, which has fewer rows at a time, tokens is None, and `hidden` rows are a gradient. No
    other tensor of a model has a multiple of the vocabulary size, unless that is a power of two.
    """

    def guess(size: int, time: float) -> str | None:
        rows = [_rows(size, vocabulary * item) for item in (2, 4)]
        if not any(rows):
            return None
        return GRADIENTS if hidden in rows and tokens not in rows else LOGITS

    return guess


def _rows(size: int, row_bytes: int) -> int:
    """Return the number of rows in a block, or 0 if it is not a whole number."""
    rows, rest = divmod(size, row_bytes)
    # An allocator may round sizes up, which leaves a small remainder.
    return rows if rest == 0 or rest < 512 < row_bytes // 32 else 0


def _blocks(initial: Mapping[int, int], events: Iterable[Event]) -> dict[int, list[_Block]]:
    """Return address → the blocks at it, in order of time."""
    blocks = {address: [_Block(float("-inf"), float("inf"), size)] for address, size in initial.items()}
    for event in events:
        at_address = blocks.setdefault(event.address, [])
        # A second allocation at an address implies a release. A release without an allocation implies an earlier block.
        if at_address and at_address[-1].end == float("inf"):
            at_address[-1].end = event.time
        elif event.bytes < 0:
            at_address.append(_Block(float("-inf"), event.time, -event.bytes))
        if event.bytes > 0:
            at_address.append(_Block(event.time, float("inf"), event.bytes))
    return blocks


def _by_category(blocks: Iterable[_Block], guess: Guess, steps: Sequence[float], start: float) -> Timeline:
    changes: list[tuple[float, str, int]] = []
    for block in blocks:
        category = block.category or guess(block.bytes, block.start) or OTHER
        changes.append((block.start, category, block.bytes))
        if block.end != float("inf"):
            changes.append((block.end, category, -block.bytes))
    # Of simultaneous changes, releases come first, which avoids a false peak.
    changes.sort(key=lambda change: (change[0], change[2]))
    now = dict.fromkeys(CATEGORIES, 0)
    points: list[tuple[float, dict[str, int]]] = []
    for time, category, size in changes:
        now[category] += size
        if points and points[-1][0] >= max(time, start):
            points.pop()
        points.append((max(time, start), dict(now)))
    if points and points[0][0] == float("-inf"):
        first = points[1][0] if len(points) > 1 else 0.0
        points[0] = (first, points[0][1])
    zero = points[0][0] if points else 0.0
    points = _thinned(points)
    return Timeline(
        [round((time - zero) / 1e3, 3) for time, _ in points],
        {name: [values[name] for _, values in points] for name in CATEGORIES},
        [round((time - zero) / 1e3, 3) for time in steps if time >= zero],
    )


def _thinned(points: list[tuple[float, dict[str, int]]]) -> list[tuple[float, dict[str, int]]]:
    """Return about POINTS points or fewer, including the highest of each group of neighbors."""
    if len(points) <= POINTS:
        return points
    size = -(-2 * len(points) // POINTS)
    thinned = points[:1]
    for first in range(1, len(points), size):
        group = points[first : first + size]
        highest = max(range(len(group)), key=lambda index: sum(group[index][1].values()))
        thinned += [group[index] for index in sorted({highest, len(group) - 1})]
    return thinned
